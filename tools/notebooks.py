"""Run notebooks and keep their outputs in them: `python tools/notebooks.py [notebooks/x.ipynb …]`, all by default.

What a cell tagged `interactive` shows lives in a running kernel only (sliders, searchable tables) and would store a
megabyte of JavaScript and state: such a cell keeps its number and no output. The figure beside it is the same, static.
"""
from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def run(path: Path) -> None:
    """Execute in the notebook's own folder and write it back, with widget state only where a kept output needs it."""
    notebook = nbformat.read(path, 4)
    NotebookClient(notebook, timeout=600, kernel_name="python3", record_timing=False,
                   resources={"metadata": {"path": str(path.parent)}}).execute()
    for cell in notebook.cells:
        if "interactive" in cell.metadata.get("tags", []):
            cell.outputs = []
    if not any("application/vnd.jupyter.widget-view+json" in output.get("data", {})
               for cell in notebook.cells for output in cell.get("outputs", [])):
        notebook.metadata.pop("widgets", None)
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(Path(__file__).parents[1].glob("notebooks/*.ipynb")):
        run(Path(name))
        print(name)
