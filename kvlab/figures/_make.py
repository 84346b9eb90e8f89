"""From a name and a run to a figure, and to files: image, PDF and the CSV of exactly the rows that are shown.

A figure is a module of this package with a docstring that says what it shows and which claim that bears on, and
    STUDY                   the study whose rows it draws; None where it is computed from the catalogue
    select(table)           the rows of a result table that are shown, quoted rows added; ValueError if some are lacking
    draw(rows, style)       the Figure of those rows (the footer is added here)
"""
from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.record.export import StoreError, atomic_write, explained, write_csv
from kvlab.registry import Registry

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from kvlab.figures._caption import Caption
    from kvlab.figures._style import Style

figures = Registry("figure", "kvlab.figures")
FORMATS = ("png", "pdf", "svg", "pgf")


def make(name: str, run: pd.DataFrame | Path | str | None = None, *, venue: str | None = None, columns: int = 1,
         lang: str = "en") -> Figure:
    """Draw a figure from stored rows.

    run: a result table, a run directory, a .parquet, .csv or .jsonl of results; None = the reference run shipped with
    kvlab. venue: neurips, icml, iclr, acl, ieee, acm or slides, over so many of its columns; None = kvlab's own page.
    lang: en, or zh; where no font has Chinese characters, labels stay English and a warning says what to install.
    Refused: an unknown name or venue (KeyError), a table without the rows that the figure shows, more columns than the
    venue has (ValueError), a file that is not there or no result table (StoreError, ValueError).
    """
    return _drawn(name, run, venue, columns, lang=lang)[0]


def save(name: str, run: pd.DataFrame | Path | str | None, out: Path | str,
         formats: Sequence[str] = ("png", "pdf"), *, venue: str | None = None, columns: int = 1,
         anonymous: bool = False, lang: str = "en") -> list[Path]:
    """Draw a figure and write `<name>.<format>` for each format and `<name>.csv`, the rows it shows; returns the paths.

    formats: of png, pdf, svg, pgf. Fonts are embedded as TrueType (Type 42). The same rows give the same bytes. With a
    venue the footer is not in the picture but in `<name>.caption.txt` and `.caption.tex`, and in the metadata of the
    files. anonymous: without what `kvlab export --anonymous` drops. Refused: what `make` refuses, another format or
    one whose program is not installed (ValueError), a folder that cannot be written (StoreError).
    """
    from kvlab.figures._pgf import engine, pgf
    from kvlab.figures._style import image
    formats = list(dict.fromkeys([formats] if isinstance(formats, str) else formats))
    for wanted in formats:
        if wanted not in FORMATS:
            raise ValueError(f"figure format {wanted!r} is unknown; allowed: {', '.join(FORMATS)}")
    if "pgf" in formats and lang != "en":
        raise ValueError("the text of format pgf is set by the document's LaTeX, for which kvlab has no Chinese font; "
                         "choose --format pdf, or --lang en")
    if "pgf" in formats:
        engine()                                              # said before anything is drawn or written
    figure, rows, told = _drawn(name, run, venue, columns, anonymous, lang)
    out = Path(out)
    with explained(out):
        out.mkdir(parents=True, exist_ok=True)
    caption = told if venue else None
    paths = []
    for wanted in formats:
        made = pgf(figure, name, caption) if wanted == "pgf" else {
            f"{name}.{wanted}": image(figure, wanted, caption.metadata(wanted) if caption else None)}
        figure.set_layout_engine("none")                      # laid out once: every format shows the same
        for file, content in made.items():
            paths.append(out / file)
            atomic_write(paths[-1], content)
    for kind, text in (("txt", told.text), ("tex", told.latex)) if venue else ():
        paths.append(out / f"{name}.caption.{kind}")
        atomic_write(paths[-1], f"{text}\n".encode())
    paths.append(out / f"{name}.csv")
    write_csv(rows, paths[-1])
    return paths


def _drawn(name: str, run: pd.DataFrame | Path | str | None, venue: str | None = None, columns: int = 1,
           anonymous: bool = False, lang: str = "en") -> tuple[Figure, pd.DataFrame, Caption]:
    module = figures[name]
    from kvlab.figures._caption import add_footer, caption
    from kvlab.figures._language import tell, usable
    from kvlab.figures._style import drawing
    lang = usable(lang)
    style = _style(venue, columns, lang)
    table = _table(name, module.STUDY, run)
    if anonymous:
        from kvlab.record.anonymous import Anonymous
        table = Anonymous().table(table)
    rows = module.select(table)
    told = caption(shows(name), rows, table, anonymous=anonymous, lang=lang)
    with drawing(style.venue, lang):
        figure = module.draw(rows, style)
        tell(figure, lang)
        if style.venue:
            from kvlab.figures._fit import fit
            fit(figure, name)
        else:
            add_footer(figure, told.lines)
    return figure, rows, told


def shows(name: str) -> str:
    """What the figure shows, in a line."""
    return figures[name].__doc__.strip().partition("\n")[0].rstrip(".")


def _style(venue: str | None, columns: int, lang: str) -> Style:
    from kvlab.figures._style import Style
    if venue is None:
        if columns != 1:
            raise ValueError(f"--columns {columns} is about a venue's page; give --venue too")
        return Style(lang=lang)
    from kvlab.figures._venue import venue as named
    place = named(venue)
    return Style(place.width(columns), place, lang)


def _table(name: str, study: str | None, run: pd.DataFrame | Path | str | None) -> pd.DataFrame:
    import pandas as pd

    from kvlab.record.reading import table
    from kvlab.record.store import read_table
    if study is None:
        if run is not None:
            raise ValueError(f"figure {name} is computed from the catalogue and takes no run; leave the run out")
        return table([])
    if isinstance(run, pd.DataFrame):
        return _long_form(name, run)
    return read_table(_reference(name, study) if run is None else run)


def _long_form(name: str, given: pd.DataFrame) -> pd.DataFrame:
    """The table with the dtypes and blanks of a stored one, which a frame that was read or built by hand may lack."""
    from kvlab.record.reading import COLUMNS
    lacking = [column for column in COLUMNS if column not in given]
    if lacking:
        raise ValueError(f"figure {name} needs a result table in long form (one row per reading); the one given "
                         f"lacks the columns {', '.join(lacking)}")
    table = given[list(COLUMNS)].astype(COLUMNS)
    return table.fillna({column: "" for column, dtype in COLUMNS.items() if dtype == "string"})


def _reference(name: str, study: str) -> Path:
    from kvlab.catalog import data_dir
    path = data_dir() / "reference" / f"{study}.parquet"
    if not path.is_file():
        raise StoreError(errno.ENOENT, f"kvlab ships no reference run of {study} to draw {name} from; make one: "
                                       f"`kvlab run {study}`, then `kvlab figure {name} --run DIR` with the run "
                                       "directory that its last line names")
    return path
