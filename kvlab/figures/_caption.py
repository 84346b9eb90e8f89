"""What a figure's rows are about, of which run and kinds, and how small a difference can be told: below it, or beside.

On kvlab's own page it stands in the picture, as a footer. A venue's figure has its caption in the text, so it goes to
files beside the picture and into what the files say of themselves.
"""
from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvlab.figures._language import wrapped
from kvlab.figures._style import GREY, KINDS
from kvlab.lang import translated
from kvlab.record._latex import escaped
from kvlab.record.statistics import aa_resolution

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


class Caption(NamedTuple):
    """title: what is shown; lines: what the footer would say; keywords: kinds of numbers, studies and runs.

    What it gives as text is in `lang`.
    """
    title: str
    lines: tuple[str, ...]
    keywords: tuple[str, ...]
    lang: str = "en"

    @property
    def text(self) -> str:
        """Everything, as sentences one after another."""
        return translated(" ".join(f"{line.rstrip('.')}." for line in (self.title, *self.lines)), self.lang)

    @property
    def latex(self) -> str:
        """The same for \\caption{…}, its special characters made harmless."""
        return escaped(self.text)

    def metadata(self, wanted: str) -> dict[str, str | list[str]]:
        """What a file of that format can say of itself."""
        words, title = ", ".join(self.keywords), translated(self.title, self.lang)
        return {"pdf": {"Title": title, "Subject": self.text, "Keywords": words},
                "png": {"Title": title, "Description": self.text, "Keywords": words},
                "svg": {"Title": title, "Description": self.text, "Keywords": list(self.keywords)}}.get(wanted, {})


def caption(title: str, rows: pd.DataFrame, table: pd.DataFrame, *, anonymous: bool = False,
            lang: str = "en") -> Caption:
    """The caption of a figure of these rows of that table. anonymous: without the ids of runs, which are published."""
    kinds = [kind for kind in KINDS if kind in set(rows["kind"])]
    more = [*filter(None, rows["study"].unique()), *([] if anonymous else filter(None, rows["run_id"].unique()))]
    return Caption(title, tuple(footer(rows, table, anonymous=anonymous)),
                   tuple(dict.fromkeys(["kvlab", *kinds, *more])), lang)


def add_footer(figure: Figure, lines: Sequence[str]) -> None:
    """The lines below the axes, small."""
    told = [line for part in lines for line in wrapped(translated(part, getattr(figure, "lang", "en")), 136)]
    figure.supxlabel("\n".join(told), x=0.01, ha="left", fontsize=6, color=GREY, linespacing=1.35)


def footer(rows: pd.DataFrame, table: pd.DataFrame, *, anonymous: bool = False) -> Iterator[str]:
    """Hardware and run; kinds, samples and resolution; what is not drawn and why."""
    own = rows[rows["kind"] != "quoted"]
    hardware = [name for name in own["hardware"].unique() if name not in ("", "none")]
    told = "simulated" if "simulated" in set(own["kind"]) else "computed from kvlab's catalogue"
    about = hardware or [f"nothing measured: {told}"]
    about += [name for name in own["dtype"].unique() if name]
    for run in filter(None, own["run_id"].unique()):
        dated = re.match(r"(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)\d\dZ-", run)
        about += ["{}-{}-{} {}:{} UTC".format(*dated.groups())] if dated else []
        about += [] if anonymous else [f"run {run}"]
    yield " · ".join(about)
    counts = own[(own["kind"] == "measured") & (own["variant"] != "") & (own["n"] > 1)]["n"]
    told = [KINDS[kind] for kind in KINDS if kind in set(rows["kind"])]
    if len(counts):
        most = f"–{counts.max()}" if counts.max() > counts.min() else ""
        told.append(f"n = {counts.min()}{most} a point")
    pair = aa_resolution(table)
    if pair is not None and (own["metric"] == "latency_s").any():       # it is a ratio of two times
        told.append("A/A resolution {:.3f} [{:.3f}, {:.3f}]".format(*pair))
    if told:
        yield " · ".join(told)
    bad = table[(table["status"] != "ok") & table["phase"].isin(own["phase"])]
    undrawn = sorted(set(bad["variant"]) - set(rows["variant"]) - {""})
    if undrawn:
        yield f"Not drawn, because it failed or was refused: {', '.join(undrawn)}"
    if len(table):                                       # of a run: what the catalogue lacks is part of the picture
        for source, absent in rows[rows["kind"] == "missing"].groupby("source", sort=False):
            yield f"Not drawn: {source} gave nothing: {'; '.join(dict.fromkeys(absent['note']))}"
