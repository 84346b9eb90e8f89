"""The two sides of a comparison: which rows are meant, from which run, and how their environments differ."""
from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.record.environment import Manifest
from kvlab.record.store import find_run, read_table
from kvlab.registry import no_such
from kvlab.serving.bench_files import is_bench, of_scrapes, read_bench

if TYPE_CHECKING:
    import pandas as pd

FILES = (".parquet", ".csv", ".jsonl")
UNCOMPARED = ("load_average", "gpus_note", "last_level_cache_source")       # of a manifest's environment


@dataclass
class Side:
    """One half: what it is called, its rows, all rows of where they are from, and the run directory, if it is one.

    samples: (case id, metric) -> samples by round, of a load generator's file; remarks: what to know of such a file;
    load: what was offered, of one with a single benchmark; model: its name for the model.
    """
    name: str
    rows: pd.DataFrame
    table: pd.DataFrame
    run: Path | None = None
    source: str = ""                            # of a variant: the name of the run or file that it is from
    samples: dict | None = None
    remarks: tuple[str, ...] = ()
    load: str = ""
    model: str = ""
    manifest: Manifest | None = field(init=False, default=None)

    def __post_init__(self):
        if self.run is not None:
            self.manifest = Manifest.read(self.run)

    @property
    def machine(self) -> str:
        """The hardware that the rows are about; empty where they do not say."""
        return ", ".join(sorted({one for one in self.rows["hardware"] if one and one != "none"}))


def sides(a, b, run, profiles: Path) -> tuple[Side, Side, bool]:
    """A, B, and whether they are two variants of one run; KeyError where a name means neither."""
    import pandas as pd
    if run is None:
        places = [x if isinstance(x, pd.DataFrame) else _place(str(x), profiles) for x in (a, b)]
        if all(place is not None for place in places):
            return *map(_opened, places), False
        if any(place is not None for place in places):
            raise no_such("run or file of results", str(b if places[1] is None else a), _runs(profiles))
        where = _newest_with(str(a), str(b), profiles)
    else:
        where = run if isinstance(run, pd.DataFrame) else _place(str(run), profiles)
        if where is None:
            raise no_such("run or file of results", str(run), _runs(profiles))
    whole = _opened(where)
    labels = set(whole.table["variant"]) - {""}
    for name in (a, b):
        if name not in labels:
            raise no_such(f"variant in {whole.name}", str(name), labels)
    return *(Side(name, whole.rows[whole.rows["variant"] == name], whole.table, whole.run, whole.name)
             for name in (a, b)), True


def _opened(place) -> Side:
    if isinstance(place, Path) and is_bench(place):
        return _bench_side(place, place.stat().st_mtime_ns)
    if isinstance(place, Path):
        table = read_table(place)
        if set(table["study"]) == {"watch"}:
            table = of_scrapes(table)
        return Side(place.name, table, table, place if place.is_dir() else None)
    run = Path(place.attrs["run"]) if "run" in place.attrs else None
    return Side(run.name if run else "a table", place, place, run if run and run.is_dir() else None)


@lru_cache(maxsize=4)                           # one comparison asks for several metrics
def _bench_side(path: Path, changed: int) -> Side:
    bench = read_bench(path)
    table = bench.table()
    return Side(path.name, table, table, samples=bench.samples(), remarks=tuple(bench.remarks), model=bench.model,
                load=bench.cases[0].load if len(bench.cases) == 1 else "")


def _place(text: str, profiles: Path) -> Path | None:
    """The file or run directory that is meant; None where the text names none. Of a study, its newest run."""
    path = Path(text)
    if path.suffix in FILES and path.is_file() or (path / "manifest.json").is_file() or is_bench(path):
        return path
    of_study = [run for run in _runs(profiles).values() if run.parent.name == text]
    if of_study:
        return of_study[-1]
    try:
        return find_run(text, profiles)
    except KeyError as error:
        if "could be any of" in str(error):
            raise
        return None


def _runs(profiles: Path) -> dict[str, Path]:
    """Run id -> directory, oldest first: an id begins with its time."""
    found = (manifest.parent for manifest in profiles.glob("*/*/manifest.json"))
    return {path.name: path for path in sorted(found, key=lambda path: path.name)}


def _newest_with(a: str, b: str, profiles: Path) -> Path:
    """The newest run that holds both variants."""
    runs, seen = _runs(profiles), set()
    for path in reversed(runs.values()):
        labels = set(read_table(path)["variant"])
        if {a, b} <= labels:
            return path
        seen |= labels - {""}
    if not runs:
        raise KeyError(f"{a!r} and {b!r} are no runs or files of results, and {profiles} has no run that could hold "
                       "them as variants; give two runs, or two variants and --run RUN")
    if {a, b} <= seen:
        raise KeyError(f"no run in {profiles} holds both {a!r} and {b!r}; measure them together: kvlab run "
                       f"{next(reversed(runs.values())).parent.name} --variants {a},{b}")
    raise no_such(f"run, file of results or variant in the runs of {profiles}", b if a in seen else a, seen)


def differences(a: Side, b: Side) -> list[str]:
    """One sentence for each thing that differs between the machines, the software and the sources of two runs."""
    said = [f"hardware differs: {a.machine} / {b.machine}; the ratio is between the two machines"] \
        if a.machine != b.machine else []
    said += [f"{name} differs: {_short(one)} / {_short(other)}" for name, one, other in (
        ("model", a.model, b.model), ("load", a.load, b.load)) if one and other and one != other]
    said += [f"{letter}: {remark}" for letter, side in (("A", a), ("B", b)) for remark in side.remarks]
    without = [side.name for side in (a, b) if side.manifest is None]
    if without:
        return [*said, f"the environment of {' and of '.join(without)} is unknown: it is no run directory"]
    if a.run.resolve() == b.run.resolve():
        return ["A and B are the same run"]
    one, other = (side.manifest.environment for side in (a, b))
    said += [f"{name} differs: {_short(one.get(name))} / {_short(other.get(name))}"
             for name in sorted({*one, *other} - set(UNCOMPARED)) if one.get(name) != other.get(name)]
    sources = [{v.ref: v.sha256 for v in side.manifest.variants} for side in (a, b)]
    said += [f"the source of {ref} differs" for ref, sha256 in sources[0].items()
             if sources[1].get(ref, sha256) != sha256]
    return said + [found for side in (a, b) if (found := _busy(side))]


def _busy(side: Side) -> str:
    load, cores = (side.manifest.environment.get(name) for name in ("load_average", "logical_cores"))
    if isinstance(load, int | float) and isinstance(cores, int) and load > cores:
        return f"the machine was busy when {side.name} began: load {load:.1f} on {cores} cores"
    return ""


def _short(value) -> str:
    text = "unknown" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:59] + "…"
