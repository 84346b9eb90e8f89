"""Whether a GPU's counters can be trusted: every source on cases of known traffic, in a few minutes, step by step."""
from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from threading import Event, Thread

from kvlab.attention import Comparison
from kvlab.attention._base import no_device
from kvlab.probes import measure
from kvlab.probes._base import hardware, room_on
from kvlab.probes._device import exclusive
from kvlab.probes._gpm import Calibration, Meter, copies_of
from kvlab.probes._known import Operation
from kvlab.probes._loop import Loop
from kvlab.probes._ncu_run import counted, program
from kvlab.probes._nvml import Unavailable, gpu
from kvlab.probes.ceilings import Ceilings
from kvlab.probes.gpm import Gpm
from kvlab.probes.kernel_error import KernelError
from kvlab.probes.ncu import readings
from kvlab.probes.nvml import Nvml
from kvlab.probes.roofline import Roofline
from kvlab.probes.timer import Timer
from kvlab.record.export import made_folder
from kvlab.record.reading import Reading
from kvlab.show import printable
from kvlab.validate_answers import changes
from kvlab.validate_cases import Sizes, comparisons, name_of, operations, trials_of
from kvlab.validate_job import Job, anonymous

PARAMETERS = Path("/proc/driver/nvidia/params")
# asked once, so that tests can replay what a GPU says
PLAIN = ("GetUtilizationRates", "GetMemoryInfo", "GetTotalEnergyConsumption", "GetPowerUsage", "GetMigMode",
         "GetEccMode", "GetCurrentClocksEventReasons")
FIELDS = (74, 76, 83, 185, 186, 269, 270, 271)              # throttle ns by reason, energy, power average and instant
POLLED = {"energy": 83, "power": 186}                       # fields whose refresh is looked at


def _shown(line: str) -> None:
    print(printable(line), flush=True)                       # at once: a person watches, through a pipe too


def validate(out: Path, *, device: str = "cuda", sizes: Sizes | None = None, say: Callable[[str], None] = _shown
             ) -> Validation:
    """Run every step that the time allows and write what it found; its `verdicts` are the answers.

    Into `out`, after each step: validate.json (steps and answers), nvml.json and ncu.json (raw responses, for replays),
    counters.parquet (rows of the study counters; rows.json where it cannot be written). A step that breaks is told
    there, and the next one runs; one that hangs ends the process, 15 s behind the budget. Raises ValueError without a
    CUDA device.
    """
    if not device.startswith("cuda"):
        raise ValueError(f"validate-gpu counts on an NVIDIA GPU: device {device!r} must be cuda, cuda:0, cuda:1, …")
    if why := no_device(device):
        raise ValueError(f"validate-gpu counts on an NVIDIA GPU, and there is none: {why}")
    import torch
    folder = made_folder(Path(out))
    with exclusive(device, say) as unlocked, torch.no_grad(), torch.cuda.device(device):
        if unlocked:
            say(unlocked)
        job = Validation(folder, device, sizes or Sizes(), say)      # its clock runs from here: a lock may take long
        with job.guarded():
            for name, needs_s, work in job.plan():
                job.step(name, needs_s, work)
    return job


class Validation(Job):
    """The steps."""

    def __init__(self, out: Path, device: str, sizes: Sizes, say: Callable[[str], None]):
        super().__init__(out, sizes, say)
        self.device = device
        self.operations, self.comparisons = operations(sizes, device), comparisons(sizes, device)
        self.gpm = Gpm(sizes.window_s, sizes.copy_bytes, self.nvml)

    def plan(self) -> list[tuple[str, float, Callable[[], dict]]]:
        """(step, seconds that it takes about, its work), what answers most first: the time is up before the last."""
        s, (copy, read, product), (first, *decodes, prompt) = self.sizes, self.operations, self.comparisons
        pair = 3.2 * s.window_s + 0.8                                # two windows, their lead-ins, finding the pace
        sweep = s.times * (sum(s.sweep_s) + 0.3 * len(s.sweep_s)) + 0.5

        def looped(case):
            beside = 0.5 if isinstance(case, Operation) else 4.0     # inputs, correctness, ceilings, time
            return f"gpm {name_of(case)}", len(trials_of(case)) * pair + beside, lambda: self.count(case)

        def profiled(case, passes=("traffic",)):
            name = " ".join(["ncu", name_of(case), *(p for p in passes if p != "traffic")])
            return name, 15.0 * len(passes), lambda: self.profile(case, passes)
        return [("environment", 0, self.environment), ("nvml responses", 0.5, self.responses),
                ("kappa", 2 * pair + s.window_s, self.kappa), looped(copy), looped(first), profiled(copy),
                profiled(first), ("sensors", s.window_s + 0.5, self.sensors), ("window sweep", sweep, self.sweep),
                ("L2", 7 * (s.window_s / 3 + 0.6), self.l2), profiled(copy, ("activity",)),
                ("nvml", 6.5 * s.window_s + 0.5, self.watched), looped(product), looped(decodes[0]), looped(prompt),
                profiled(prompt), *map(looped, [read, *decodes[1:]]), *map(profiled, [*decodes, product, read]),
                profiled(first, ("activity",)), profiled(first, ("cold",))]

    def row(self, case, reading: Reading) -> dict:
        own = next(c.comparison_id for c in [*self.operations, *self.comparisons] if case in trials_of(c))
        return {"comparison_id": own, "case_id": case.case_id, **case.columns(), **asdict(reading),
                "hardware": reading.hardware or hardware(self.device)}

    # ---- steps

    def environment(self) -> dict:
        import torch
        found = dict(torch=torch.__version__, gpu=torch.cuda.get_device_name(self.device), cuda=torch.version.cuda,
                     l2_bytes=room_on(self.device)[1], root=hasattr(os, "geteuid") and os.geteuid() == 0,
                     admin_only=_admin_only(), ncu=_or_why(lambda: program().version))
        try:
            with gpu(self.device, self.nvml) as one:
                whole, nvml = one.whole, one.nvml
                found |= dict(driver=_or_why(nvml.nvmlSystemGetDriverVersion), mig=one.slice_of is not None,
                              **{key: _or_why(lambda ask=ask: whole.ask(*ask)) for key, ask in dict(
                                  bus_bits=("DeviceGetMemoryBusWidth",), memory_mhz=("DeviceGetClockInfo", 2),
                                  memory_max_mhz=("DeviceGetMaxClockInfo", 2), sm_mhz=("DeviceGetClockInfo", 1),
                                  sm_max_mhz=("DeviceGetMaxClockInfo", 1), gpm=("GpmQueryDeviceSupport",)).items()})
        except Unavailable as why:
            found["nvml"] = str(why)
        return found

    def kappa(self) -> dict:
        """The idle GPU, and κ from a copy and a read."""
        if why := self.gpm.why_not(self.operations[0]):
            raise Unavailable(why)
        with self.meter() as meter:
            known, _ = self.gpm.calibration(meter)
        if not isinstance(known, Calibration):
            raise known
        return dict(copy=known.copy, read=known.read, idle={k: _number(v) for k, v in known.idle.shares.items()})

    def count(self, case) -> dict:
        """One case by GPM; of attention also correctness, ceilings, time and the model."""
        if isinstance(case, Operation):
            cost = case.cost()
            ideal = Reading("ideal_bytes", cost.read_bytes + cost.write_bytes, "B", "modelled", source="operation",
                            method=f"formula:operands of a {case.name}, once")
            return self.add([self.row(case, reading) for reading in [ideal, *self.gpm.operation(case)]])
        chosen = [KernelError(), Ceilings(samples=3), Timer(cap_s=self.sizes.timer_s), Roofline(), self.gpm]
        return self.add(measure(case, chosen))

    def profile(self, case, passes) -> dict:
        """One case by ncu, in processes of their own that need the GPU's memory; it verifies the timer's cold label."""
        cache = room_on(self.device)[1]
        limit = max(5.0, min(45.0, self.left() / len(passes)))
        found = counted(case, passes, timeout_s=limit, heard=self.ncu)
        rows = []
        for one in trials_of(case):
            of_one = readings(one, {name: of[one.case_id] for name, of in found.items()}, cache)
            asked = [r for r in of_one if r.value is not None or "was not run" not in r.note]
            rows += [self.row(one, r) for r in asked]
            state = next((r.cache_state for r in asked if r.metric == "cold_share" and r.value is not None), None)
            for row in self.rows:
                if state and row["case_id"] == one.case_id and row["cache_state"] == "cold (unverified)" and row[
                        "source"] in ("timer", "roofline"):
                    row["cache_state"] = state
        return self.add(rows)

    def sweep(self) -> dict:
        """How short a window may be: DRAM utilisation of the copy, out of idleness, over windows of several lengths."""
        op, found = self.operations[0], {}
        with self.meter() as meter:
            loop = Loop(op.calls(copies_of(op)), self.device)
            for seconds in sorted(self.sizes.sweep_s):
                found[f"{seconds:g}"] = [_busy(meter, loop, seconds) for _ in range(self.sizes.times)]
        told = [one for all_of in found.values() for one in all_of]
        if all(isinstance(one, str) for one in told):
            raise Unavailable(told[0])
        return dict(dram_utilization=found)

    def l2(self) -> dict:
        """What part of a buffer's bytes comes from memory while it is read again and again, by its size."""
        cache, found, lacking = room_on(self.device)[1], {}, {}
        with self.meter() as meter:
            known, _ = self.gpm.calibration(meter)
            if not isinstance(known, Calibration):
                raise known
            for share in (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0):
                op = Operation("read", int(cache * share), "fp32", self.device)
                loop = Loop(op.calls(1), self.device)
                try:
                    seen = meter.window(loop, loop.lasting(self.sizes.window_s / 3, least=1))
                    found[str(op.nbytes)] = seen.bytes(known.idle, known.kappa) / seen.calls / op.nbytes
                except Unavailable as why:
                    lacking[str(op.nbytes)] = str(why)
        if not found:
            raise Unavailable(next(iter(lacking.values())))
        return dict(torch_bytes=cache, from_memory=found, refused=lacking)

    def responses(self) -> dict:
        """What NVML answers to plain questions, behind a moment of work."""
        op = self.operations[0]
        loop = Loop(op.calls(1), self.device)
        loop.run(loop.lasting(0.2))
        with gpu(self.device, self.nvml) as one:
            lacking = {name: why for name in PLAIN if (why := _refusal(one.whole.ask, f"Device{name}"))}
            lacking |= {str(n): why for n in FIELDS if (why := _refusal(one.whole.field, n))}
        return dict(refused=lacking)

    def watched(self) -> dict:
        """NVML's sensors on decode by SDPA, as the probe reads them."""
        window = 2 * self.sizes.window_s
        return self.add(measure(Comparison(self.comparisons[0].trials[:1]), [Nvml(window, window / 2)]))

    def sensors(self) -> dict:
        """How often energy counter and instant power change under load: polled without a pause while a copy loops."""
        loop, over = Loop(self.operations[0].calls(1), self.device), Event()
        n, seen, refused = loop.lasting(self.sizes.window_s), {name: [] for name in POLLED}, {}
        with gpu(self.device) as one:                        # not recorded: these are thousands of answers
            whole = one.whole

            def poll():
                while not over.is_set() and len(refused) < len(POLLED):
                    for name, number in POLLED.items():
                        if name not in refused:
                            try:
                                seen[name].append((time.perf_counter(), whole.field(number)))
                            except Unavailable as why:
                                refused[name] = str(why)
            thread = Thread(target=poll, daemon=True)
            thread.start()
            try:
                loop.run(n)
            finally:
                over.set()
                thread.join()
        return {name: dict(refused=refused[name]) if name in refused else changes(seen[name]) for name in POLLED}

    @contextmanager
    def meter(self) -> Iterator[Meter]:
        """GPM on the GPU, recorded."""
        with gpu(self.device, self.nvml) as one:
            yield Meter(one, self.device, self.sizes.window_s)


def _admin_only() -> str:
    """Whether the driver keeps performance counters for administrators: yes, no, or unknown."""
    try:
        found = re.search(r"^RmProfilingAdminOnly: (\d)", PARAMETERS.read_text(errors="replace"), re.M)
    except OSError:
        found = None
    return "unknown" if found is None else "no" if found[1] == "0" else "yes"


def _or_why(ask: Callable):
    """The answer, or the reason for none, as text."""
    try:
        return ask()
    except Exception as error:                               # of pynvml, ncu: told beside the other answers
        return f"missing: {anonymous(str(error))}"


def _busy(meter: Meter, loop: Loop, seconds: float) -> float | str:
    """DRAM utilisation of calls that last so long, or why there is none: a window may be too short for any."""
    try:
        return _number(meter.from_idle(loop, loop.lasting(seconds, least=1)).shares["dram_utilization"])
    except Unavailable as why:
        return str(why)


def _refusal(ask: Callable, *arguments) -> str | None:
    try:
        ask(*arguments)
    except Unavailable as why:
        return str(why)
    return None


def _number(value) -> float | str:
    return str(value) if isinstance(value, Unavailable) else value
