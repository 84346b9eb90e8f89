"""kvlab claims: the article's claims, each with a verdict that follows from stored or freshly measured evidence."""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvlab.verbs._complete import names, words
from kvlab.verbs._help import verb
from kvlab.verbs._options import print_json

SHOW = "show"
HELP = verb("kvlab claims", "kvlab claims show C03", "kvlab claims --section 5 --lang zh",
            "kvlab claims --html claims.html",
            Which_claims="section", Which_results="results run size out", Output="html lang as_json help")


def command(asked: Annotated[list[str] | None, typer.Argument(metavar="[show] [ID]…", autocompletion=names("claims"),
                                                              help="Claims by id, such as C03; default: all. With "
                                                              "show: each with its evidence.")] = None,
            section: Annotated[int | None, typer.Option(help="A section of the article, 1 … 8.")] = None,
            results: Annotated[list[str] | None, typer.Option(help="A run to judge in place of the shipped one of "
                                                              "its study (directory, id or file); may be given "
                                                              "several times.")] = None,
            run: Annotated[bool, typer.Option("--run", help="Run the studies that these claims rest on, on this "
                                              "machine, and judge those runs; not those of --results.")] = False,
            size: Annotated[str, typer.Option(autocompletion=words("smoke", "small", "large"), help="With --run: "
                                              "smoke, small or large.")] = "small",
            out: Annotated[Path, typer.Option(help="With --run: parent of <study>/<UTC>-<id>.")] = Path("profiles"),
            html: Annotated[Path | None, typer.Option(help="Write the ledger as one self-contained page, in both "
                                                      "languages.")] = None,
            lang: Annotated[str, typer.Option(autocompletion=words("en", "zh"), help="en or zh.")] = "en",
            as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False) -> int:
    """Check the article's claims: each with its verdict and the evidence behind it.

    Verdicts: supported, conditional, refuted, outdated, inconclusive, untestable here.
    """
    from kvlab.claims import as_row, ledger
    from kvlab.claims._ledger import chosen
    from kvlab.claims._results import Results, runs_of
    from kvlab.lang import checked
    from kvlab.show_claims import print_claim, print_ledger
    checked(lang)
    ids = list(asked or ())
    one_by_one = ids[:1] == [SHOW]
    ids = ids[one_by_one:]
    if one_by_one and not ids:
        raise ValueError("show needs the id of a claim, such as: kvlab claims show C03")
    claims = chosen(ids, section)
    if not claims:
        raise ValueError(f"none of {', '.join(ids)} is in section {section}; leave --section out")
    given = runs_of(results or ())
    rests_on = {study for claim in claims for study in claim.studies}
    for study in given.keys() - rests_on:
        print(f"kvlab: {given[study]} is not used: no claim that was asked for rests on {study}", file=sys.stderr)
    if run:
        needed = {study: None for claim in claims for study in claim.studies if study not in given}
        if not needed:
            print("kvlab: nothing was run: these claims rest on no study besides those of --results", file=sys.stderr)
        fresh = _fresh(list(needed), size, out)
        for path in filter(None, fresh.values()):
            print(f"kvlab: judged by {path}", file=sys.stderr)
        given |= fresh
    rows = [as_row(one) for one in ledger(Results(given), ids=[claim.id for claim in claims])]
    if html is not None:
        from kvlab.claims_page import write_page
        print(write_page(rows, html, lang, runs=given), file=sys.stderr)
    if as_json:
        print_json(rows)
    elif one_by_one:
        for at, row in enumerate(rows):
            print("\n" * (at > 0), end="")
            print_claim(row, lang)
    elif html is None:
        print_ledger(rows, lang)
    return 0


def _fresh(studies: list[str], size: str, out: Path) -> dict[str, Path | None]:
    """study -> the directory of its new run. One that cannot run is said, and its shipped results do not stand in."""
    from kvlab.studies._run import run as run_study
    from kvlab.studies._run import studies as known
    unknown = [study for study in studies if size not in known[study].SIZES]
    if unknown:
        raise ValueError(f"--size {size} is none of {unknown[0]}; allowed: {', '.join(known[unknown[0]].SIZES)}")
    done: dict[str, Path | None] = {}
    begun: dict[str, Path] = {}
    try:
        for study in studies:
            try:
                done[study] = run_study(study, size=size, out=out,
                                        begun=lambda store, of=study: begun.update({of: store.path})).path
            except (ValueError, RuntimeError) as error:
                print(f"kvlab: {study} cannot run here: {error}", file=sys.stderr)
                done[study] = None
    except KeyboardInterrupt:
        half = "".join(f"kvlab run {study} --resume {path}, then: " for study, path in begun.items()
                       if study not in done)
        kept = "".join(f" --results {path}" for study, path in begun.items() if done.get(study, path))
        print(f"\nkvlab: interrupted; what was committed is kept. Go on with: {half}kvlab claims --run{kept}",
              file=sys.stderr)
        raise
    return done
