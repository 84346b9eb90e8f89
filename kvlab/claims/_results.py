"""Where claims take their numbers from: stored results of studies, the catalogue, and facts quoted with a source."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from kvlab.catalog import data_dir, rows
from kvlab.claims._base import Evidence, Known, absent
from kvlab.lang import Text

if TYPE_CHECKING:
    import pandas as pd

    from kvlab.studies._run import Finding

Number = TypeVar("Number", bound=float)


def runs_of(texts: Iterable[str]) -> dict[str, Path]:
    """study -> where its results are, of runs given as directories, ids or files. Refused: two runs of one study."""
    from kvlab.record._places import FILES, is_url
    from kvlab.record.store import find_run, read_table
    found: dict[str, Path] = {}
    for text in texts:
        plain = not is_url(text) and Path(text).suffix in FILES
        path = Path(text) if plain else find_run(text, Path("profiles"))
        for study in read_table(path)["study"].dropna().unique():
            if study in found:
                raise ValueError(f"{text} and {found[study]} are both results of {study}; give one of them")
            found[study] = path
    return found


class Results:
    """Stored results by study: the reference runs that kvlab ships, or other runs given in their place.

    runs: study -> run directory or file; None = there are no results of it. Refused: what read_table refuses, a run of
    another study (ValueError).
    """

    def __init__(self, runs: Mapping[str, Path | None] | None = None):
        paths = {path.stem: path for path in (data_dir() / "reference").glob("*.parquet")} | dict(runs or {})
        self.paths = {study: path for study, path in paths.items() if path is not None}
        self._tables: dict[str, pd.DataFrame] = {}
        self._findings: dict[str, dict[str, Finding]] = {}

    def rows(self, study: str) -> pd.DataFrame | None:
        """The study's result table; None where there is none."""
        from kvlab.record.store import read_table
        if study not in self.paths:
            return None
        if study not in self._tables:
            table = read_table(self.paths[study])
            if others := sorted(set(table["study"].dropna()) - {study}):
                raise ValueError(f"{self.paths[study]} holds results of {', '.join(others)}, not of {study}; give a "
                                 f"run of `kvlab run {study}`")
            self._tables[study] = table
        return self._tables[study]

    def findings(self, study: str) -> dict[str, Finding]:
        """What the study says of its table, by the finding's name (the first of a name); empty without a table."""
        from kvlab.studies._run import studies
        if study not in self._findings:
            by_name: dict[str, Finding] = {}
            table = self.rows(study)
            for one in studies[study].findings(table) if table is not None and len(table) else ():
                by_name.setdefault(one.name, one)
            self._findings[study] = by_name
        return self._findings[study]

    def finding(self, study: str, finding: str, about: Text, *, name: str = "", unit: str = "") -> Evidence:
        """A study's finding as evidence; missing, with the study to run, where its table does not give it."""
        one = self.findings(study).get(finding)
        if one is None or one.value is None:
            return self.lacking(study, name or finding, about, one.sentence if one else "")
        return Evidence(name or finding, about, one.value, unit or one.unit, one.kind, one.low, one.high,
                        source=self.source(study))

    def reading(self, study: str, name: str, about: Text, chosen: pd.DataFrame, *, unit: str = "") -> Evidence:
        """The one row chosen of a study's table as evidence; missing where there is none.

        Refused: several rows.
        """
        import pandas as pd
        if len(chosen) > 1:
            raise ValueError(f"{name}: {len(chosen)} rows of {study} were chosen for one number")
        if chosen.empty or chosen["kind"].iloc[0] == "missing":
            return self.lacking(study, name, about, "" if chosen.empty else str(chosen["note"].iloc[0]))
        row = chosen.iloc[0]
        low, high, n = (None if pd.isna(row[end]) else row[end] for end in ("low", "high", "n"))
        return Evidence(name, about, float(row["value"]), unit or row["unit"], row["kind"], low, high,
                        None if n is None else int(n), source=self.source(study))

    def lacking(self, study: str, name: str, about: Text, why: str = "") -> Evidence:
        """Missing evidence of a study, with the command that would give it."""
        there = study in self.paths
        en = (f"the results of {study} do not give it" if there else f"there are no results of {study}")
        zh = (f"{study} 的结果没有给出这个数" if there else f"没有 {study} 的结果")
        run = f"kvlab run {study}"
        return absent(name, about, f"{en}{f': {why}' if why else ''}; run: {run}, then kvlab claims --results RUN",
                      f"{zh}{f'：{why}' if why else ''}；请运行：{run}，再运行 kvlab claims --results RUN")

    def source(self, study: str) -> str:
        """Whose rows these are: the study, the run, what it ran on."""
        if (table := self.rows(study)) is None:
            return study
        runs = [one for one in table["run_id"].dropna().unique() if one]
        on = [one for one in table["hardware"].dropna().unique() if one not in ("", "none", "not stated")][:2]
        return f"{study}, run {', '.join(runs)}" + (f" on {' and '.join(on)}" if on else "")

    @cached_property
    def facts(self) -> dict[str, dict[str, str]]:
        """data/facts.csv by key."""
        return {row["key"]: row for row in rows("facts.csv")}

    def quoted(self, key: str, *, name: str = "") -> Known:
        """A fact that others state, of data/facts.csv, with its source and the day it was read."""
        row = self.facts[key]
        one = Evidence(name or key, Text(row["about"], row["about_zh"]), float(row["value"]), row["unit"], "quoted",
                       source=f"{row['source']} (read {row['read']})")
        return cast(Known, one)


def given(value: Number | None, what: str) -> Number:
    """A number of the catalogue that a claim is computed from; ValueError where the catalogue lacks it."""
    if value is None:
        raise ValueError(f"the catalogue does not give {what}, which a claim is computed from")
    return value


def catalogue(name: str, about: Text, value: float, unit: str, source: str, *, n: int | None = None) -> Evidence:
    """A number computed from kvlab's catalogue, such as bytes of a cache. source: the files or rows behind it."""
    return Evidence(name, about, float(value), unit, "modelled", n=n, source=source)
