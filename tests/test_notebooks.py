"""The notebooks: committed executed, without functions of their own, and running from top to bottom with parameters."""
import ast
import runpy
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="the extra `notebook` is not installed")
ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def images(notebook):
    return [output for cell in code_cells(notebook) for output in cell.outputs
            if "image/png" in output.get("data", {})]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_committed_executed_and_defines_nothing(path):
    notebook = nbformat.read(path, 4)
    for cell in code_cells(notebook):
        assert not any(isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda)
                       for node in ast.walk(ast.parse(cell.source)))
        assert not [o for o in cell.outputs if o.output_type == "error"]
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1))
    with_output = [cell for cell in code_cells(notebook) if cell.outputs]
    assert "image/png" in with_output[0].outputs[-1].data, "the first output is a figure"
    assert any("parameters" in cell.metadata.get("tags", []) for cell in code_cells(notebook))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_small_and_keeps_nothing_of_what_only_a_kernel_can_show(path):
    assert path.stat().st_size < 10**6
    notebook = nbformat.read(path, 4)
    views = [cell for cell in code_cells(notebook) for output in cell.outputs
             if "application/vnd.jupyter.widget-view+json" in output.get("data", {})]
    assert ("widgets" in notebook.metadata) == bool(views), "state without a view of it, or a view without its state"
    for cell in code_cells(notebook):
        if "interactive" in cell.metadata.get("tags", []):
            assert cell.outputs == [] and cell.execution_count


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_names_no_folder_of_the_machine_that_ran_it(path):
    for cell in code_cells(nbformat.read(path, 4)):
        text = "".join(str(o.get("text", "")) + str(o.get("data", {}).get("text/plain", "")) for o in cell.outputs)
        assert "/home/" not in text and "/root" not in text and "/tmp/" not in text and str(ROOT) not in text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    papermill = pytest.importorskip("papermill", reason="the extra `notebook` is not installed")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    papermill.execute_notebook(str(path), str(tmp_path / path.name), cwd=str(path.parent), progress_bar=False,
                               kernel_name="python3", parameters=dict(OUT=str(tmp_path)))
    ran = nbformat.read(tmp_path / path.name, 4)
    assert len(images(ran)) == len(images(nbformat.read(path, 4))) > 0


def test_making_notebooks_keeps_outputs_but_those_of_interactive_cells_and_no_state_of_them(tmp_path, monkeypatch):
    pytest.importorskip("ipywidgets", reason="the extra `notebook` is not installed")
    slider = "import ipywidgets; ipywidgets.IntSlider()"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("40 + 2"), nbformat.v4.new_code_cell(
        slider, metadata={"tags": ["interactive"]})])
    nbformat.write(notebook, tmp_path / "made.ipynb")
    monkeypatch.setattr("sys.argv", ["notebooks.py", str(tmp_path / "made.ipynb")])
    runpy.run_path(str(ROOT / "tools" / "notebooks.py"), run_name="__main__")
    made = nbformat.read(tmp_path / "made.ipynb", 4)
    assert made.cells[0].outputs[0].data["text/plain"] == "42" and made.cells[1].outputs == []
    assert [cell.execution_count for cell in made.cells] == [1, 2] and "widgets" not in made.metadata
