"""kvlab figure: draw figures from stored rows, with the CSV of exactly what they show."""
from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from kvlab.verbs._complete import names, words
from kvlab.verbs._help import verb
from kvlab.verbs._options import results

HELP = verb("kvlab figure memory_wall --out figures", "kvlab figure paging --venue neurips --format pdf",
            "kvlab figure --all")
VENUES = ("neurips", "icml", "iclr", "acl", "ieee", "acm", "slides")


def command(name: Annotated[str, typer.Argument(
                                                help="A name from `kvlab ls figures`.",
                                                     autocompletion=names("figures"))] = "",
            run: Annotated[str | None, typer.Option(help="Run directory, id or file; default: shipped rows.")] = None,
            out: Annotated[Path | None, typer.Option(help="Folder to write to; default: here, with --all "
                                                     "gallery.")] = None,
            formats: Annotated[str, typer.Option("--format", autocompletion=words("png", "pdf", "svg", "pgf"),
                                                 help="Of png, pdf, svg, pgf (needs LaTeX).")] = "png,pdf",
            every: Annotated[bool, typer.Option("--all", help="Every figure from shipped rows, with an "
                                                "index.html.")] = False,
            venue: Annotated[str | None, typer.Option(autocompletion=words(*VENUES), help="Widths and fonts of "
                                                      "neurips, icml, iclr, acl, ieee, acm or slides, and the "
                                                      "caption beside the picture.")] = None,
            columns: Annotated[int, typer.Option(help="Columns of the venue's page that it spans.")] = 1,
            anonymous: Annotated[bool, typer.Option("--anonymous", help="For blind review: without run ids, paths "
                                                    "and names.")] = False,
            lang: Annotated[str, typer.Option(autocompletion=words("en", "zh"), help="en, or zh for labels in "
                                              "Chinese.")] = "en") -> None:
    """Draw a figure, or all, from stored rows, with the CSV of exactly what it shows."""
    if bool(name) == every:
        raise ValueError(f"give {'either ' if name else ''}the NAME of a figure (kvlab ls figures) or --all"
                         + (f", not both: {name} and --all" if name else ""))
    if every and run is not None:
        raise ValueError("--all draws from the rows that kvlab ships; leave --run out, or draw the figures of a run "
                         f"with kvlab report {run}")
    wanted = tuple(dict.fromkeys(one.strip() for one in formats.split(",") if one.strip()))
    from kvlab.show import printable
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *where: print(f"kvlab: {printable(message)}", file=sys.stderr)
        if every:
            from kvlab.figures._gallery import write_all
            paths = write_all(out or Path("gallery"), wanted, venue=venue, columns=columns, anonymous=anonymous,
                              lang=lang)
        else:
            from kvlab.figures import save
            paths = iter(save(name, results(run), out or Path("."), wanted, venue=venue, columns=columns,
                              anonymous=anonymous, lang=lang))
        for path in paths:
            print(path)
