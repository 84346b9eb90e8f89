"""kvlab export: a run's readings, or its operator traces, for other programs."""
from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvlab.verbs._options import results


def command(run: Annotated[str, typer.Argument(help="A run directory, id or file of results.")],
            format: Annotated[str, typer.Option(help="csv, parquet, latex or chrome-trace.")],
            out: Annotated[Path | None, typer.Option(help="File, or folder that is there; default: here.")] = None,
            wide: Annotated[bool, typer.Option("--wide", help="One line per case instead of one per reading.")] = False
            ) -> None:
    """Write a run's readings, or its operator traces, for other programs."""
    from kvlab.record.export import export as export_run
    print(export_run(results(run), format, out, wide=wide))
