"""Running a study: cases to a worker, rows to the journal, one committed comparison after another.

A study is a module of this package with a docstring that asks its question, and
    SIZES                                           the sizes it knows
    cases(size, *, device, variants, model)         its cases; None = the study's own choice
    run(case, *, artifacts=None, watch=None)        the rows of one case
    findings(table)                                 optional: what the table says, in words (list of Finding)
A case is a Comparison or a frozen dataclass with columns() and comparison_id.
A class attribute `timed = False` says that a case gives no times, so that several may run at once (each on as many
cores as its `threads` says, 1 where it has none).
"""
from __future__ import annotations

import ast
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

from kvlab.attention import Comparison, VariantRef
from kvlab.attention._base import no_device
from kvlab.attention._variant import _class_in
from kvlab.probes import measure, probes
from kvlab.probes._base import Watch
from kvlab.record._places import is_url
from kvlab.record.environment import Manifest, VariantSource
from kvlab.record.reading import Reading, failed
from kvlab.record.remote import fetched
from kvlab.record.store import RunStore
from kvlab.registry import Registry, no_such

studies = Registry("study", "kvlab.studies")
ENGINES = ("local", "ray", "slurm")


class Case(Protocol):
    """What is committed, resumed and mapped as a whole."""
    @property
    def comparison_id(self) -> str: ...

    def columns(self) -> dict: ...


class Finding(NamedTuple):
    """One thing a table says: a number with its interval and kind, and the sentence that says it."""
    name: str
    sentence: str
    value: float | None
    unit: str
    low: float | None
    high: float | None
    kind: str


@dataclass(frozen=True)
class Job:
    """A way to run a case: a study's own, or (without a study) the probes of that name, all of them by default.

    also: probes beside them, those on request among them. Calling it runs the case in this process. Picklable, for any
    `each`.
    """
    study: str | None = None
    artifacts: Path | None = None
    probes: tuple[str, ...] | None = None
    also: tuple[str, ...] = ()

    def __call__(self, case: Case, watch: Watch | None = None) -> list[dict]:
        if self.also:
            watch = replace(watch or Watch(), also=self.also)
        if self.study is None:
            chosen = None if self.probes is None else [probes[name]() for name in self.probes]
            return measure(case, chosen, artifacts=self.artifacts, watch=watch)
        return studies[self.study].run(case, artifacts=self.artifacts, watch=watch)


Each = Callable[[Job, Iterable[Case]], Iterator[list[dict]]]


def run(study: str, *, size: str | None = None, device: str | None = None, out: Path | str = "profiles",
        resume: Path | str | None = None, variants: Iterable | None = None, model: str | None = None,
        also: Sequence[str] = (), tune: bool = True, engine: str | None = None, address: str | None = None,
        each: Each | None = None, progress: bool = True, patience_s: float = 300.0,
        begun: Callable[[RunStore], None] = lambda store: None) -> RunStore:
    """Run a study and return its closed run.

    size: one of the study's SIZES (default small). device: cpu (default) or cuda. out: parent of <study>/<UTC>-<id>, a
    folder or an fsspec URL. resume: a run directory or its URL, whose committed cases are kept and not repeated; what
    is left None is as it was there. variants: names, "file.py:Class" references, classes or instances. also: probes on
    request, such as torch_profile, beside the study's own. tune: False keeps kernels from choosing their configuration
    by measuring. engine: one of ENGINES: local (default; one long-lived worker process, several for cases that give no
    times), ray (processes of a cluster; address: of a running one, default a Ray of this machine alone) or
    slurm (jobs that take case after case; address: sbatch's options, such as "partition=gpu,timeout_min=60,jobs=8").
    each: in place of an engine, maps a job over cases and yields the rows of one case after the other, in any order.
    patience_s: seconds without a sign of life after which a worker is taken to hang, 60 more where no variant is at
    work. begun: told the run's store before anything is measured.
    Raises KeyError or ValueError for wrong names, StoreError for a folder that cannot be written.
    """
    module = studies[study]
    if resume:
        resume = fetched(resume) if is_url(resume) else Path(resume)
        begun_as = Manifest.read(resume)
        if begun_as.study != study:
            raise ValueError(f"{resume} is a run of {begun_as.study!r}, not of {study!r}")
        was = begun_as.options
        size, device, model = size or was["size"], device or was["device"], model or was["model"]
        variants = variants or was["variants"] and [_from_json(v) for v in was["variants"]]
        also, tune = also or was.get("also", ()), tune and was.get("tune", True)
        engine = engine or was.get("engine")
    size, device, engine = size or "small", device or "cpu", engine or "local"
    if size not in module.SIZES:
        raise ValueError(f"{study} has no size {size!r}; allowed: {', '.join(module.SIZES)}")
    refs = None if variants is None else tuple(VariantRef.of(v) for v in variants)
    cases = list(module.cases(size, device=device, variants=refs, model=model))
    if not tune:
        cases = [untuned(case) for case in cases]
    if engine not in ENGINES:
        raise no_such("engine", engine, ENGINES)
    if address is not None and engine == "local":
        raise ValueError("--address is of a cluster, and the engine is local: add --engine ray or slurm")
    if not resume and engine == "local" and (why := no_device(device)):
        raise ValueError(f"nothing of {study} can be measured on {device}: {why}")
    used = {t.variant for case in cases if isinstance(case, Comparison) for t in case.trials}
    options = dict(size=size, device=device, variants=refs and [_to_json(r) for r in refs], model=model)
    if also:
        options["also"] = [probes[name].name for name in also]           # raises for an unknown name
    if not tune:
        options["tune"] = False
    if engine != "local":
        options["engine"] = engine
    sources = [_source(ref) for ref in sorted(used, key=lambda r: (r.ref, r.knobs))]
    if resume:                                      # before a cluster is started: another process may have the run
        store = _resumed(study, resume, options, sources)
    try:
        each = each or _each(engine, address, patience_s, used, lambda *of: store.met(*of))
    except BaseException:
        if resume:
            store.close()
        raise
    if not resume:                                  # after it: one that cannot be reached leaves no empty run
        store = RunStore.create(out, study, Manifest(
            study=study, argv=sys.argv, size=size, device=device, variants=sources, models=[model] if model else [],
            options=options, cases=len({c.comparison_id for c in cases}),
            seeds=sorted({t.seed for c in cases if isinstance(c, Comparison) for t in c.trials})))
    store.hold()
    begun(store)
    try:
        todo = [case for case in cases if case.comparison_id not in store.committed]
        if resume and not todo:
            print(f"{store.place}: every case is there already", file=sys.stderr)
        results = each(Job(study, store.artifacts, also=tuple(also)), todo)
        try:
            for rows in _with_progress(results, len(todo), study, progress):
                store.append(rows[0]["comparison_id"],
                             [{**row, "model": row.get("model") or model or ""} for row in rows])
        finally:
            if hasattr(results, "close"):
                results.close()                     # ends the worker now, not when somebody forgets the traceback
        if lost := {case.comparison_id for case in todo} - store.committed:
            raise RuntimeError(f"`each` gave no rows of {len(lost)} of {len(todo)} cases; complete the run with "
                               f"resume={store.path}")
    finally:
        store.close()
    return store


def _each(engine: str, address: str | None, patience_s: float, used: set[VariantRef],
          met: Callable[[str, dict], None]) -> Each:
    """How the engine maps cases; classes that no other process can load are run in this one.

    met: told the id and the environment of each worker on another machine.
    """
    local_only = sorted(ref.label for ref in used if ref.in_process)
    if engine != "local":
        if local_only:
            raise ValueError(f"{', '.join(local_only)} exists in this process only, and a cluster has others; put the "
                             "class into a file and name it file.py:Class")
        if engine == "slurm":
            from kvlab.studies._slurm import slurm_each
            return slurm_each(address, patience_s, met)
        from kvlab.studies._ray import ray_each
        return ray_each(address, patience_s, met)
    if local_only:
        return in_process
    from kvlab.studies._worker import worker_each
    return worker_each(patience_s)


def untuned(case: Case) -> Case:
    """The case, also one around a comparison, with the knob `tune` off in every variant that has it."""
    if isinstance(case, Comparison):
        # replace keeps a study's own kind of comparison, which says how it is run
        return replace(case, trials=tuple(dict.fromkeys(replace(t, variant=_untuned(t.variant)) for t in case.trials)))
    if isinstance(getattr(case, "comparison", None), Comparison):
        return replace(case, comparison=untuned(case.comparison))
    return case


def _untuned(ref: VariantRef) -> VariantRef:
    if ref.source_file:                             # read, not run: only a worker runs a user's file
        knobs = {getattr(line.target, "id", "") for line in _class_in(ref.ref).body if isinstance(line, ast.AnnAssign)}
    else:
        knobs = getattr(ref.load(), "__dataclass_fields__", {})
    if "tune" not in knobs:
        return ref
    return replace(ref, knobs=(*(knob for knob in ref.knobs if knob[0] != "tune"), ("tune", False)))


def in_process(job: Job, cases: Iterable[Case]) -> Iterator[list[dict]]:
    """Run cases in this process, for classes that no other process can load; their rows say so."""
    for case in cases:
        for row in (rows := job(case)):
            if row.get("kind") == "measured":
                row["note"] = "; ".join(filter(None, [row.get("note"), "measured in the calling process"]))
        yield rows


def failed_case(case: Case, why: str, status: str = "failed") -> list[dict]:
    """The row of a case that as a whole came to nothing."""
    return [case_row(case, failed("case", "count", why, status))]


def case_row(case: Case, reading: Reading, case_id: str | None = None, /, **columns) -> dict:
    """A reading as a row about a whole case, or about the part of it that case_id names; columns beside the case's."""
    return {"comparison_id": case.comparison_id, "case_id": case_id or case.comparison_id, **case.columns(), **columns,
            **asdict(reading), "scope": "comparison"}


def _with_progress(results, total, study, progress):
    if not progress or not total:                   # of a complete run that is resumed there is nothing to show
        return results
    from tqdm.auto import tqdm
    # cases differ in length: tqdm's own 0.3 is about the last three of them, a mean of all (0) holds the start too
    return tqdm(results, total=total, desc=study, unit="case", smoothing=0.05)


def _to_json(ref: VariantRef):
    return [ref.ref, dict(ref.knobs)] if ref.knobs else ref.ref


def _from_json(stored) -> VariantRef:
    return VariantRef.of(stored) if isinstance(stored, str) else VariantRef(stored[0], tuple(stored[1].items()))


def _source(ref: VariantRef) -> VariantSource:
    """A variant of the manifest; a user's own, also one from a notebook cell, with its source text."""
    if ref.source_file:
        text = ref.source_file.read_text(encoding="utf-8")
    elif ref.in_process:
        try:
            text = inspect.getsource(type(ref.load()))
        except (OSError, TypeError):                # typed at a prompt that keeps no text
            return VariantSource(ref=ref.ref)
    else:
        return VariantSource(ref=ref.ref)
    return VariantSource(ref=ref.ref, sha256=hashlib.sha256(text.encode()).hexdigest(), source=text)


def _resumed(study: str, path: Path, options: dict, sources: list[VariantSource]) -> RunStore:
    """The run to go on with, held; refused where it had other options or other source text."""
    store = RunStore.open(path, hold=True)
    try:
        _check_same(store, path, study, options, sources)
    except BaseException:
        store.close()
        raise
    return store


def _check_same(store: RunStore, path: Path, study: str, options: dict, sources: list[VariantSource]) -> None:
    for problem in store.problems:
        print(f"{path.name}: {problem}", file=sys.stderr)
    was = Manifest(study=study, options=options, environment={}).options       # the same cutting of absolute paths
    begun, was = {"engine": "local", **store.manifest.options}, {"engine": "local", **was}
    if begun != was:
        other = [f"{name} {begun.get(name)!r}, not {was.get(name)!r}" for name in {**begun, **was}
                 if begun.get(name) != was.get(name)]
        raise ValueError(f"{path} was run with {'; '.join(other)}: resume with the same options, or start a new run")
    here = Manifest(study=study).environment
    then = store.manifest.environment
    other = [f"{what} {then.get(what)!r}, here {here[what]!r}" for what in ("cpu", "gpus", "torch")
             if then.get(what) != here[what] and "engine" not in options]      # there each row names its worker
    if other:
        raise ValueError(f"{path} was measured elsewhere ({'; '.join(other)}); numbers of two machines are two runs")
    changed = [s.ref for s in sources if s not in store.manifest.variants]
    if changed:
        raise ValueError(f"{', '.join(changed)} changed since {path} was begun; start a new run")
