"""One stem: a study, its notebook, its tests and its reference run share their name; a figure names its study."""
from pathlib import Path

import pytest

from kvlab.figures import figures
from kvlab.record.store import read_table
from kvlab.studies._run import studies

ROOT = Path(__file__).parents[1]
GUIDES = {"claims", "trace_tour"}       # and names that start with two digits
SIMULATED = {"batching", "monitoring"}  # studies that time nothing on this machine, as `capacity`, which reads logs


@pytest.mark.parametrize("stem", studies.names())
def test_a_study_has_its_notebook_tests_reference_and_a_figure(stem):
    for path in (f"notebooks/{stem}.ipynb", f"tests/studies/test_{stem}.py", f"data/reference/{stem}.parquet"):
        assert (ROOT / path).is_file(), path
    assert any(figures[name].STUDY == stem for name in figures)


@pytest.mark.parametrize("name", figures.names())
def test_a_figure_names_a_study_or_none(name):
    assert figures[name].STUDY is None or figures[name].STUDY in studies.names()


def test_notebooks_and_references_belong_to_a_study():
    for path in [*(ROOT / "notebooks").glob("*.ipynb"), *(ROOT / "data" / "reference").glob("*.parquet")]:
        assert path.stem in studies.names() or path.stem in GUIDES or path.stem[:2].isdigit(), path


@pytest.mark.parametrize("stem", studies.names())
def test_the_reference_run_is_whole_and_reads_as_a_result_table(stem):
    table = read_table(ROOT / "data" / "reference" / f"{stem}.parquet")
    assert set(table["study"]) == {stem} and not table["status"].isin(["failed", "oom"]).any()
    assert ({"modelled", "quoted"} if stem == "capacity" else {"simulated"} if stem in SIMULATED
            else {"measured"} if stem == "soak" else {"measured", "modelled"}) <= set(table["kind"])


def test_the_shipped_example_run_shows_the_whole_layout():
    runs = [p.parent for p in (ROOT / "profiles").glob("memory_wall/*/manifest.json")
            if (p.parent / "report.html").exists()]
    assert runs
    for name in ("readings.jsonl", "readings.parquet", "samples", "figures/memory_wall.png", "report.html"):
        assert (runs[0] / name).exists()
