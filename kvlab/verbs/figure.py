"""kvlab figure: draw a figure from stored rows, with the CSV of exactly what it shows."""
from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvlab.verbs._options import results


def command(name: Annotated[str, typer.Argument(help="A name from `kvlab ls figures`.")],
            run: Annotated[str | None, typer.Option(help="Run directory, id or file; default: shipped rows.")] = None,
            out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("."),
            formats: Annotated[str, typer.Option("--format", help="Of png, pdf, svg.")] = "png,pdf") -> None:
    """Draw a figure from stored rows, and write the CSV of exactly what it shows."""
    from kvlab.figures import save
    for path in save(name, results(run), out, tuple(f.strip() for f in formats.split(","))):
        print(path)
