"""Is decoding limited by memory, and prefill by the score matrix? Two stories, never mixed.

Tests the article's claims that attention over the KV cache is bound by memory traffic, that compute utilisation
falls below 10 %, that flash attention takes O(n) memory where naive takes O(n²), and that KV far exceeds the weights.
Decode is traffic: time against ideal bytes, share of the compute ceiling, cost of repeated heads.
Prefill is memory: bytes of a call beyond its inputs against the prompt's length.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from kvlab.attention import Comparison, VariantRef, trial
from kvlab.attention._base import digest
from kvlab.catalog.gpus import gpu as catalogued_gpu
from kvlab.catalog.models import model as catalogued
from kvlab.kv.sizing import crossover_tokens, kv_bytes, weight_bytes
from kvlab.probes import measure
from kvlab.probes._base import Watch
from kvlab.probes.ceilings import Ceilings
from kvlab.probes.format_error import FormatError
from kvlab.probes.gpm import Gpm
from kvlab.probes.kernel_error import KernelError
from kvlab.probes.memory import Memory
from kvlab.probes.nvml import Nvml
from kvlab.probes.roofline import Roofline
from kvlab.probes.timer import Timer
from kvlab.record.environment import free_memory, last_level_cache
from kvlab.record.reading import Reading, missing
from kvlab.record.statistics import aa_resolution, fit
from kvlab.shapes import AttentionShape, Workload
from kvlab.studies._run import Case, Finding
from kvlab.units import display

SIZES = ("smoke", "small", "large")
NEAR = 0.6                                                   # share of a ceiling from which it is called the limit
MODEL = "Qwen/Qwen2-72B"                                     # the article's
DECODE = ("naive_repeat", "naive", "sdpa", "sdpa_enable_gqa", "paged")
PREFILL = ("naive", "flash", "sdpa")
METRICS = {"weight_bytes": "B", "kv_bytes": "B", "crossover_tokens": "count", "kv_to_weights": "ratio"}


@dataclass(frozen=True)
class Decomposition:
    """What one sequence of a real model holds: bytes of its weights and of its KV cache at one context length."""
    model: str
    kv_len: int
    kv_format: str = "bf16"

    @property
    def comparison_id(self) -> str:
        return digest(asdict(self))

    def columns(self) -> dict:
        import json
        return dict(model=self.model, batch_size=1, kv_len=self.kv_len, kv_format=self.kv_format,
                    case=json.dumps(asdict(self), sort_keys=True))


@dataclass(frozen=True)
class ContextSweep(Comparison):
    """Decode at one context length, batch 1 and the main group ratio: where a GPU's telemetry is worth its seconds."""


def cases(size: str, *, device: str = "cpu", variants: tuple[VariantRef, ...] | None = None,
          model: str | None = None) -> Iterator[Case]:
    """Decode over context, group ratio and batch (not crossed), prefill over the prompt's length, one real model."""
    spec = catalogued(model or MODEL)
    shape = AttentionShape(32, 4, 128) if model is None else _shape_of(spec)
    itemsize = 2 if device.startswith("cuda") else 4
    per_token = shape.num_kv_heads * (shape.head_dim + (0 if shape.v_in_k else shape.v_dim)) * itemsize
    longest = _longest(size, per_token, device)
    chosen = tuple(VariantRef(name) for name in DECODE) if variants is None else variants

    def decode(shape, kv_len, batch_size=1, aa=False, kind=Comparison):
        workload = Workload.decode(shape, batch_size=batch_size, kv_len=kv_len)
        # one call of naive_repeat on the longest context or on a batch takes more than a trial's whole time
        repeat = batch_size == 1 and (kv_len < longest or size == "smoke")
        refs = [v for v in chosen if repeat or v.ref != "naive_repeat"] or list(chosen)
        trials = [trial(v, workload, device=device) for v in refs]
        again = next((v for v in refs if v.ref == "sdpa"), refs[0])
        return kind(tuple(trials + ([trial(again, workload, device=device, replica=1)] if aa else [])))

    steps = 4 if size == "smoke" else 5
    contexts = [longest >> i for i in reversed(range(steps))]
    middle = contexts[1]
    yield from (decode(shape, n, aa=n == middle, kind=ContextSweep) for n in contexts)
    if not shape.v_in_k:
        kv_heads = {shape.num_q_heads // r for r in ((1, 8) if size == "smoke" else (1, 4, 8, 32))
                    if shape.num_q_heads % r == 0} - {shape.num_kv_heads}
        for heads in sorted(kv_heads, reverse=True):
            yield decode(AttentionShape(shape.num_q_heads, heads, shape.head_dim, shape.v_head_dim), middle)
    for n in (contexts[1:2] if size == "smoke" else contexts[1:3]):
        yield decode(shape, n, batch_size=4)
    yield from _prefill_cases(size, device, variants)
    yield Decomposition(spec.name, 2048)


def _prefill_cases(size, device, variants) -> Iterable[Comparison]:
    """Prompts over an eightfold range, long enough that the output and the tiles of flash are above resolution."""
    longest = {"smoke": 1024, "small": 4096, "large": 16384}[size]
    prompts = [longest // 8, longest // 4, longest // 2, longest]
    refs = tuple(VariantRef(name) for name in PREFILL) if variants is None else variants
    for n in prompts:
        workload = Workload.prefill(AttentionShape(4, 1, 128), q_len=n)
        yield Comparison(tuple(trial(v, workload, device=device) for v in refs))


def _shape_of(spec) -> AttentionShape:
    shaped = [layer for layer in spec.layers if layer.shape is not None]
    if not shaped:
        raise ValueError(f"{spec.name} has no attention layer; choose a model with a KV cache")
    return next((layer for layer in shaped if layer.kind in ("full", "mla")), shaped[0]).shape


def _longest(size: str, per_token: int, device: str) -> int:
    """Tokens whose K/V is four times the last-level cache (a GPU: 2 GiB), a power of two; smoke: a quarter cache."""
    wanted = 2**31 if device.startswith("cuda") else 4 * last_level_cache()[0]
    tokens = 2**math.ceil(math.log2(wanted / per_token))
    if size == "smoke":
        return 2048
    if device == "cpu":                                       # the repeated heads of naive_repeat must fit as well
        while tokens > 4096 and 24 * tokens * per_token > free_memory():
            tokens //= 2
    return tokens * (4 if size == "large" else 1)


def run(case: Case, *, artifacts=None, watch: Watch | None = None) -> list[dict]:
    """Decode: correctness, ceilings, time, roofline. Prefill: correctness and memory. A model: arithmetic."""
    if isinstance(case, Decomposition):
        return _decomposed(case)
    if case.workload.phase == "prefill":
        chosen = (KernelError(), Memory())
    else:
        on_gpu = case.device.startswith("cuda")
        cap_s = None if on_gpu else 0.1 if max(case.workload.kv_lens) <= 2048 else 0.6
        watched = (Nvml(), Gpm()) if isinstance(case, ContextSweep) or not on_gpu else ()     # 3 to 8 s per trial
        chosen = (KernelError(), FormatError(), Ceilings(), Timer(cap_s=cap_s), Roofline(), *watched)
    return measure(case, chosen, artifacts=artifacts, watch=watch)


def _decomposed(case: Decomposition) -> list[dict]:
    spec = catalogued(case.model)
    weights, kv = weight_bytes(spec), kv_bytes(spec, case.kv_len, case.kv_format)
    crossover = crossover_tokens(spec, case.kv_format)
    unknown = f"the parameter count of {spec.name} is not in the catalogue"
    endless = f"the cache of {spec.name} never reaches its weights, or {unknown}"

    def known(metric, value, why, formula):
        if value is None:
            return missing(metric, METRICS[metric], why, source="kv.sizing")
        return Reading(metric, value, METRICS[metric], "modelled", method=f"formula:{formula}", source="kv.sizing",
                       hardware="none", note=f"approximate: {spec.approximate}" if spec.approximate else "")
    readings = [known("weight_bytes", weights, unknown, "parameters · 2 bytes"),
                known("kv_bytes", kv, "", "layer_bytes"),
                known("crossover_tokens", crossover, endless, "largest n with kv_bytes(n) ≤ weight_bytes"),
                known("kv_to_weights", kv / weights if weights else None, unknown, "kv_bytes ÷ weight_bytes")]
    return [{"comparison_id": case.comparison_id, "case_id": case.comparison_id, **case.columns(), **asdict(r),
             "scope": "comparison"} for r in readings]


def findings(table) -> list[Finding]:
    """The four findings, the resolution they are to be read at, and the real model's decomposition."""
    ok = table[(table["status"] == "ok") & (table["kind"] != "missing")]
    found = [*_crossover(table), *_bottleneck(ok), *_slope(ok), *_compute_share(ok), *_exponents(ok), *_repeated(ok),
             *_resolution(ok)]
    return found or [Finding("none", "no finding: the run holds no successful reading of this study", None, "ratio",
                             None, None, "missing")]


def _of(rows, metric, kind=None):
    chosen = rows[(rows["metric"] == metric) & (rows["replica"].fillna(0) == 0)]
    return chosen if kind is None else chosen[chosen["kind"] == kind]


def _decode(rows):
    return rows[rows["phase"] == "decode"]


def main_ratio(rows) -> int | None:
    """The group ratio of the context sweep: the one measured at most context lengths."""
    times = _of(_decode(rows), "latency_s")
    times = times[times["batch_size"] == 1]
    return None if times.empty else int(times.groupby("group_ratio")["kv_len"].nunique().idxmax())


def sweep(rows, metric):
    """Rows of the context sweep: batch 1, the main group ratio, one per variant and kv_len."""
    chosen = _of(_decode(rows), metric)
    return chosen[(chosen["batch_size"] == 1) & (chosen["group_ratio"] == main_ratio(rows))]


def _best(rows) -> str:
    """The variant that the words are about: sdpa, or the fastest of the longest context."""
    times = sweep(rows, "latency_s")
    if (times["variant"] == "sdpa").any():
        return "sdpa"
    return times.sort_values(["kv_len", "value"], ascending=[False, True])["variant"].iloc[0]


def _bottleneck(rows) -> list[Finding]:
    """Which ceiling the longest call of the sweep comes near, if any; and what a GPU's data sheet allows there."""
    if main_ratio(rows) is None:
        return []
    variant = _best(rows)
    share = {m: sweep(rows, m) for m in ("bandwidth_share", "flops_share")}
    last = {m: s[s["variant"] == variant].sort_values("kv_len").tail(1) for m, s in share.items()}
    if any(s.empty for s in last.values()):
        return []
    read, flops = (last[m].iloc[0] for m in share)
    limit = ("memory limits it" if read["value"] >= max(NEAR, flops["value"]) else
             "arithmetic limits it" if flops["value"] >= NEAR else
             "neither limits it here: the kernel does, and a faster one would run into the nearer of the two")
    gpu = catalogued_gpu("H200")
    allowed = main_ratio(rows) / gpu.ridge()
    return [Finding(
        "bottleneck", f"Why is decoding slow? At {read['kv_len']} tokens and group ratio {main_ratio(rows)} {variant} "
        f"reaches {100 * read['value']:.0f} % of the read ceiling and {100 * flops['value']:.0f} % of the matmul "
        f"ceiling: {limit}. On {gpu.name}, by its data sheet and in bf16, memory allows {100 * allowed:.1f} % of the "
        "matrix peak at this ratio: there memory is the wall.", read["value"], "ratio", read["low"], read["high"],
        "modelled")]


def _slope(rows) -> list[Finding]:
    if main_ratio(rows) is None:
        return []
    ideal = sweep(rows, "ideal_bytes").set_index("case_id")["value"]
    ceilings = _decode(rows)[_decode(rows)["metric"] == "read_ceiling"]
    if ceilings.empty:
        return []
    ceiling, slowest, fastest = (float(ceilings[end].median()) for end in ("value", "low", "high"))
    found = []
    for variant, times in sweep(rows, "latency_s").groupby("variant", sort=False):
        times = times[times["case_id"].isin(ideal.index)].sort_values("kv_len")
        if len(times) < 4:
            continue
        x = ideal[times["case_id"]]
        slope, low, high = fit(x, times["value"], times["low"], times["high"])
        if low <= 0:
            found.append(Finding(f"decode_bandwidth:{variant}", f"No slope of decode time over bytes can be told for "
                                 f"{variant}: the points' intervals allow a time that does not grow.", None, "B/s",
                                 None, None, "missing"))
            continue
        value, down, up = 1 / slope, 1 / high, 1 / low
        found.append(Finding(
            f"decode_bandwidth:{variant}",
            f"Decode time grows with ideal bytes: {variant} streams K/V at {display(value, 'B/s')} "
            f"[{display(down, 'B/s')}, {display(up, 'B/s')}], {100 * value / ceiling:.1f} % "
            f"[{100 * down / fastest:.1f}, {100 * up / slowest:.1f}] of the read ceiling "
            f"({display(ceiling, 'B/s')}).", value, "B/s", down, up, "modelled"))
    return sorted(found, key=lambda f: f.name != f"decode_bandwidth:{_best(rows)}")


def _compute_share(rows) -> list[Finding]:
    if main_ratio(rows) is None:
        return []
    variant = _best(rows)
    shares, allowed = _of(_decode(rows), "flops_share"), _of(_decode(rows), "attainable_flops_share")
    shares = shares[(shares["variant"] == variant) & (shares["batch_size"] == 1)]
    if shares.empty:
        return []
    kv_len, found = shares.groupby("kv_len")["group_ratio"].nunique().idxmax(), []
    for _, row in shares[shares["kv_len"] == kv_len].sort_values("group_ratio").iterrows():
        limit = allowed[allowed["case_id"] == row["case_id"]]["value"].iloc[0]
        found.append(Finding(
            f"flops_share:{variant}:ratio{row['group_ratio']}",
            f"At group ratio {row['group_ratio']} {variant} reaches {100 * row['value']:.1f} % "
            f"[{100 * row['low']:.1f}, {100 * row['high']:.1f}] of the matmul ceiling; the roofline allows "
            f"{100 * limit:.0f} % (kv_len {kv_len}).", row["value"], "ratio", row["low"], row["high"], "modelled"))
    return found


def _exponents(rows) -> list[Finding]:
    extra = _of(rows[rows["phase"] == "prefill"], "peak_extra_bytes")
    found = []
    for variant, points in extra[extra["value"] > 0].groupby("variant", sort=False):
        points = points.sort_values("kv_len")
        if len(points) < 3:
            continue
        slope, low, high = fit(points["kv_len"], points["value"], points["low"].clip(lower=1), points["high"],
                               power=True)
        most = points.iloc[-1]
        found.append(Finding(
            f"memory_exponent:{variant}",
            f"Prefill memory of {variant} grows as n^{slope:.2f} [{low:.2f}, {high:.2f}]: "
            f"{display(most['value'], 'B')} beyond the inputs at {most['kv_len']} tokens.",
            slope, "ratio", low, high, "measured"))
    return found


def _repeated(rows) -> list[Finding]:
    if main_ratio(rows) is None:
        return []
    times, system = sweep(rows, "latency_s").set_index(["variant", "kv_len"]), sweep(rows, "system_time_share")
    found = []
    for kv_len in sorted({n for v, n in times.index if v == "naive_repeat"}):
        if ("naive", kv_len) not in times.index:
            continue
        a, b = times.loc[("naive_repeat", kv_len)], times.loc[("naive", kv_len)]
        value, low, high = a["value"] / b["value"], a["low"] / b["high"], a["high"] / b["low"]
        inside = system[system["case_id"] == a["case_id"]]["value"]
        why = "" if inside.empty or inside.iloc[0] < 0.1 else (
            f"; {100 * inside.iloc[0]:.0f} % of it inside the operating system, for memory that each call takes anew")
        found.append(Finding(
            f"repeat_cost:{kv_len}",
            f"Repeating K/V heads costs {value:.0f} × [{low:.0f}, {high:.0f}] the time of grouped attention "
            f"(group ratio {main_ratio(rows)}, kv_len {kv_len}){why}.", value, "ratio", low, high, "measured"))
    return found[::-1]


def _resolution(rows) -> list[Finding]:
    pair = aa_resolution(rows)
    if pair is None:
        return []
    value, low, high = pair
    return [Finding("resolution", f"Resolution: the same trial measured twice differs by a factor {value:.3f} "
                    f"[{low:.3f}, {high:.3f}]; smaller differences mean nothing.", value, "ratio", low, high,
                    "measured")]


def _crossover(table) -> list[Finding]:
    def of(metric):
        chosen = table[table["metric"] == metric]
        return None if chosen.empty else chosen.iloc[0]
    kv, weights, crossover = of("kv_bytes"), of("weight_bytes"), of("crossover_tokens")
    if kv is None or weights is None or crossover is None:
        return []
    size = f"{kv['model']}: KV of one sequence of {kv['kv_len']} tokens is {display(kv['value'], 'B')}"
    if weights["kind"] == "missing":
        return [Finding("crossover", f"{size}; {weights['note']}, so nothing can be said of its weights.", None,
                        "count", None, None, "missing")]
    size += f", its weights {display(weights['value'], 'B')}"
    if crossover["kind"] == "missing":
        return [Finding("crossover", f"{size}; the cache stops growing before it reaches them.", None, "count", None,
                        None, "missing")]
    context = catalogued(kv["model"]).context
    contexts = f", {crossover['value'] / context:.3g} full contexts of {context:,}" if context else ""
    return [Finding("crossover", f"{size}: KV outgrows them beyond {crossover['value']:,.0f} cached tokens{contexts}. "
                    "The article's “KV far exceeds the weights” needs more than that.", crossover["value"], "count",
                    None, None, "modelled")]
