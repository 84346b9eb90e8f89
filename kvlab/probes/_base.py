"""What a probe must answer, and `measure`, which runs probes on a comparison, correctness before speed."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from kvlab.attention import Comparison, Inputs, Trial
from kvlab.kv.cache import Layout
from kvlab.probes._device import guarded
from kvlab.record.environment import cpu_name, free_memory, last_level_cache
from kvlab.record.reading import Reading, failed, missing
from kvlab.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

Found = tuple[Trial | None, Reading]           # None: the reading is about the whole comparison


class Probe(Protocol):
    """Something that looks at a comparison.

    A frozen dataclass in its own file; knobs are its fields. metrics: metric -> unit, for the whole project one unit
    per name. needs: probes whose readings it uses. rotates: whether it calls on rotating input copies (else copy 0
    alone is built). Optional: on_request = True for a costly one, which runs only where it is named (Watch.also).
    """
    name: ClassVar[str]
    metrics: ClassVar[Mapping[str, str]]
    needs: ClassVar[tuple[str, ...]]
    rotates: ClassVar[bool]

    def why_not(self, trial: Trial) -> str | None:
        """Why it cannot look at this trial here, in one sentence; None = it can."""

    def measure(self, bench: Bench) -> Iterable[Found]:
        """(trial, reading) pairs; a trial of None means that the reading is of the whole comparison."""


probes = Registry("probe", "kvlab.probes", attribute="name")
MOST_COPIES = 1000              # of inputs; more than these take seconds to make, for calls of a few KiB


class Broken(Exception):
    """A variant's output is wrong; the message says how."""


@dataclass(frozen=True)
class Watch:
    """What the process that runs a comparison is told, and tells.

    at: told which trial is about to run in which probe, so that a crash of the process can be laid at its door;
    case_id "" means that kvlab's own code runs.
    failures: case_id -> (status, error) of trials that must not be run (again): they brought an earlier process down.
    fatal: called where the process can measure no more (a CUDA error that sticks): the worker ends, and is blamed.
    also: names of probes to run beside the chosen ones, those on request among them.
    """
    at: Callable[[str, str], None] = lambda case_id, stage: None
    fatal: Callable[[], None] = lambda: None
    failures: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    also: tuple[str, ...] = ()


@dataclass
class Bench:
    """What a probe works on: the trials that still stand, their inputs, and the readings of the probes before it."""
    comparison: Comparison
    trials: list[Trial]
    inputs: dict[tuple[str, Layout], list[Inputs]]
    artifacts: Path | None = None
    readings: list[Found] = field(default_factory=list)
    failures: dict[Trial, tuple[str, str]] = field(default_factory=dict)        # trial -> (status, error)
    first_call_s: dict[Trial, float] = field(default_factory=dict)              # filled by kernel_error
    watch: Watch = Watch()
    stage: str = ""

    def inputs_of(self, trial: Trial) -> list[Inputs]:
        """The inputs of the trial's KV format and layout: several copies where a call would find one in a cache."""
        return self.inputs[trial.kv_format, trial.layout]

    @contextmanager
    def on(self, trial: Trial) -> Iterator[None]:
        """Run a trial's own code: whatever it raises makes that trial `failed` (or `oom`) and leaves the rest alone."""
        import torch
        self.watch.at(trial.case_id, self.stage)
        torch.set_num_threads(trial.threads)                        # the trial before may have changed it
        try:
            yield
            if trial.device.startswith("cuda"):
                torch.cuda.synchronize()                            # this trial's kernels err here, not the next one's
        except (Exception, SystemExit) as error:
            self.fail(trial, error)
            if "CUDA error" in str(error) and "out of memory" not in str(error):
                self.watch.at(trial.case_id, f"{self.stage}: {self.failures[trial][1]}")
                self.watch.fatal()

    def fail(self, trial: Trial, error: BaseException | str) -> None:
        """Take the trial off the bench; what went wrong becomes its rows' status and error."""
        text = str(error) if isinstance(error, str | Broken) else f"{type(error).__name__}: {error}".strip()
        low = text.lower()
        oom = isinstance(error, MemoryError) or "out of memory" in low or "can't allocate memory" in low
        self.failures.setdefault(trial, ("oom" if oom else "failed", " ".join(text.split())[:500]))
        if trial in self.trials:
            self.trials.remove(trial)

    def reading(self, trial: Trial | None, metric: str, kind: str = "measured") -> Reading | None:
        """A reading of a probe already run, or None; a missing one counts as none."""
        return next((r for t, r in self.readings if t == trial and r.metric == metric and r.kind == kind), None)

    def relabel(self, trial: Trial, source: str, cache_state: str) -> None:
        """Say anew what the caches held in a probe's unverified cold readings of a trial: a counter has looked."""
        self.readings = [(t, replace(r, cache_state=cache_state) if t == trial and r.source == source
                          and r.cache_state == "cold (unverified)" else r) for t, r in self.readings]

    def check(self, trial: Trial, output: Tensor, expected: Tensor, tolerance: float,
              rows: Tensor | None = None) -> float:
        """Relative L2 distance of an output from the oracle's; raises Broken where it is wrong in any way.

        output: [tokens, query heads, v_head_dim]. rows: [n], the tokens that are compared, None = all; expected:
        [n, query heads, v_head_dim].
        tolerance: for the worst query head of the worst query token, so that one lost tile cannot hide in the rest.
        """
        import torch
        w = self.comparison.workload
        shape = (sum(w.q_lens), w.shape.num_q_heads, w.shape.v_dim)
        if type(output) is not torch.Tensor:                        # a subclass may put the work off until it is read
            raise Broken(f"returned {type(output).__name__}, must be a plain torch.Tensor")
        if tuple(output.shape) != shape:
            raise Broken(f"returned shape {tuple(output.shape)}, must be (query tokens, query heads, v_head_dim) = "
                         f"{shape}")
        if output.dtype != trial.torch_dtype:
            raise Broken(f"returned {output.dtype}, must be {trial.torch_dtype}")
        if not bool(output.isfinite().all()):
            raise Broken("the output holds NaN or infinity")
        got = (output if rows is None else output[rows]).double()
        worst = worst_row(got, expected)
        if worst > tolerance:
            raise Broken(f"an output row is off by {worst:.2g} of its length, which exceeds the tolerance "
                         f"{tolerance:.2g}")
        return float((got - expected).norm() / expected.norm())


def worst_row(got: Tensor, expected: Tensor) -> float:
    """Largest relative L2 distance over query tokens and heads of [rows, Q, E].

    A row that nearly cancels is measured against a tenth of the usual length, since its own says nothing.
    """
    length = expected.norm(dim=-1)
    usual = float(length.square().mean().sqrt())
    return float(((got - expected).norm(dim=-1) / length.clamp_min(max(usual / 10, 1e-300))).max())


def room_on(device: str) -> tuple[int, int]:
    """(free bytes of the device's memory, bytes of the cache in front of it: a CPU's last level, a GPU's L2)."""
    if not device.startswith("cuda"):
        return free_memory(), last_level_cache()[0]
    import torch
    torch.cuda.empty_cache()                                        # what torch only keeps is free
    return torch.cuda.mem_get_info(device)[0], torch.cuda.get_device_properties(device).L2_cache_size


def rotation(smallest: int, all_of: int, cache: int, free: int) -> int:
    """Input copies so that a call finds none of its K/V in the cache: ceil(5 · cache / bytes) + 1.

    smallest: bytes that a call touches of one copy, in the smallest format; all_of: bytes of one copy in all formats.
    At most MOST_COPIES, and so many that they take half of the free memory. Source: FlashInfer's rotating buffers.
    """
    return max(1, min(-(-5 * cache // smallest) + 1, free // 2 // all_of, MOST_COPIES))


def in_order(chosen: Sequence[Probe]) -> list[Probe]:
    """Probes so that each comes after those it needs, and kernel_error before all others."""
    left, done = sorted(chosen, key=lambda p: p.name != "kernel_error"), []
    while left:
        names = {p.name for p in left}
        ready = next((p for p in left if not names & set(p.needs)), None)
        if ready is None:
            raise ValueError(f"probes need each other in a circle: {', '.join(sorted(names))}")
        left.remove(ready)
        done.append(ready)
    return done


def with_also(chosen: Sequence[Probe] | None, also: Sequence[str]) -> list[Probe]:
    """The chosen probes (None: all that are not on request) and those of these names."""
    if chosen is None:
        chosen = [probes[name]() for name in probes if not getattr(probes[name], "on_request", False)]
    names = {p.name for p in chosen}
    return [*chosen, *(probes[name]() for name in dict.fromkeys(also) if name not in names)]


def measure(comparison: Comparison, chosen: Sequence[Probe] | None = None, *, artifacts: Path | None = None,
            watch: Watch | None = None) -> list[dict]:
    """Every probe's readings on one comparison, as rows: context columns and the reading's own.

    chosen: None is every probe that does not run on request only; those that `watch.also` names come in addition.
    What cannot run leaves a row that says why: `skipped` (why_not), `missing` (a probe's hardware), `failed`, `oom`.
    A trial that fails kernel_error gets `failed` rows from every later probe. Nothing is dropped silently.
    A GPU is locked against other processes of kvlab meanwhile; where processes of others are on it before or after,
    each measured row's note says "contended".
    """
    import torch
    watch, device = watch or Watch(), comparison.device
    chosen = in_order(with_also(chosen, watch.also))
    threads, on_gpu = torch.get_num_threads(), _on_gpu(device)
    guard = guarded(device if on_gpu else "cpu", lambda words: watch.at("", words))
    torch.set_num_threads(comparison.trials[0].threads)
    try:
        with guard as beside, torch.no_grad(), torch.cuda.device(device) if on_gpu else nullcontext():
            bench = _open(comparison, chosen, artifacts, watch)
            for probe in chosen:
                bench.stage = probe.name
                _run(probe, bench)
            said = beside()
    finally:
        torch.set_num_threads(threads)
    return _rows(bench, said)


def _on_gpu(device: str) -> bool:
    """Whether this is a CUDA device that torch sees."""
    import torch
    return (device.startswith("cuda") and torch.cuda.is_available()
            and int(device.partition(":")[2] or 0) < torch.cuda.device_count())


def _open(comparison, chosen, artifacts, watch) -> Bench:
    """The bench with its inputs built; a comparison larger than free memory fails before anything is allocated."""
    bench = Bench(comparison, [], {}, artifacts, watch=watch)
    for trial in comparison.trials:
        if trial.case_id in watch.failures:
            bench.failures[trial] = watch.failures[trial.case_id]
            continue
        watch.at(trial.case_id, "loading")
        try:
            why = trial.why_not()
        except (Exception, SystemExit) as error:
            bench.fail(trial, error)
            continue
        if why:
            bench.failures[trial] = ("skipped", why)
        else:
            bench.trials.append(trial)
    if not bench.trials:
        return bench
    runnable = Comparison(tuple(bench.trials))
    free, cache = room_on(comparison.device)
    copies = 1
    if any(p.rotates for p in chosen):
        copies = rotation(min(runnable.touched_bytes().values()), sum(runnable.cache_bytes().values()), cache, free)
        while copies > 1 and runnable.nbytes(copies) > free:        # rather warm than not at all
            copies -= 1
    watch.at("", "inputs")
    try:
        if (needed := runnable.nbytes(copies)) > free:
            raise MemoryError(f"needs {needed:,} bytes, {free:,} are free; take a smaller kv_len, batch or format")
        bench.inputs = runnable.inputs(copies)
    except Exception as error:
        for trial in list(bench.trials):
            bench.fail(trial, error)
    return bench


def _run(probe: Probe, bench: Bench) -> None:
    """One probe over the trials that stand; then a row for each of its metrics that a trial has no reading of."""
    everyone, ran_before, began = bench.comparison.trials, list(bench.trials), len(bench.readings)
    absent, broke = {}, None
    bench.watch.at("", probe.name)
    try:
        absent = {trial: why for trial in ran_before if (why := probe.why_not(trial))}
        bench.trials = [t for t in ran_before if t not in absent]
        if bench.trials:
            for found in probe.measure(bench):
                bench.readings.append(found)
    except Exception as error:                                       # the probe's own, no trial's: other probes go on
        broke = f"the probe {probe.name} broke: {type(error).__name__}: {error}"
    bench.trials = [t for t in ran_before if t not in bench.failures]
    have = {(t, r.metric) for t, r in bench.readings[began:]}         # of this probe: another's number is not its own
    for trial in everyone:
        for metric, unit in probe.metrics.items():
            if (trial, metric) in have or (None, metric) in have:
                continue
            if trial in bench.failures:
                status, error = bench.failures[trial]
                bench.readings.append((trial, failed(metric, unit, error, status=status, source=probe.name)))
            elif trial in absent or broke is None:
                why = absent.get(trial, f"the probe {probe.name} gave no reading of it")
                bench.readings.append((trial, missing(metric, unit, why, source=probe.name)))
            else:
                bench.readings.append((trial, failed(metric, unit, broke, source=probe.name)))


def hardware(device: str) -> str:
    """Name of the processor or GPU behind a device, as rows keep it."""
    if not _on_gpu(device):
        return cpu_name()
    import torch
    return torch.cuda.get_device_name(device)


def _rows(bench: Bench, beside: str = "") -> list[dict]:
    """The readings with their context. beside: what the note of every measured one must say of the device."""
    named = hardware(bench.comparison.device)
    paths, rows = {}, []
    for trial, reading in bench.readings:
        if beside and reading.kind == "measured":
            reading = replace(reading, note="; ".join(filter(None, [reading.note, beside])))
        if trial is None:
            context = dict(case_id=bench.comparison.comparison_id, **bench.comparison.columns())
            scope = "comparison"
        else:
            if trial not in paths:
                try:
                    paths[trial] = trial.format_path
                except (Exception, SystemExit):                      # a user class that does not load; its rows say so
                    paths[trial] = None
            context = dict(case_id=trial.case_id, format_path=paths[trial], **trial.columns())
            scope = reading.scope
        rows.append({"comparison_id": bench.comparison.comparison_id, **context, **asdict(reading), "scope": scope,
                     "hardware": reading.hardware or named})
    return rows
