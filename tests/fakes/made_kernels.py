"""Rows of a run of the study kernels whose every number is known beforehand. Tests only; never a result file.

Which question a row answers is told by its metrics: to_contiguous and to_head_order (paging), format_speedup and
format_bytes_ratio (formats), to_peer (variants side by side, formats too), peak_extra_bytes (memory), step_speedup and
batch_to_quoted (the article). The order of heads and tokens in memory is in the case's JSON alone: case["layout"].
"""
from dataclasses import asdict

from kvlab.attention import trial
from kvlab.kv.cache import Layout
from kvlab.record.reading import Reading, failed, missing, table
from kvlab.shapes import AttentionShape, Workload

RUN = "20261130T081500Z-ke4e15"
CPU = "A CPU, 2 logical cores"
NO_CUDA = "FlashInfer has CUDA kernels only, and this is device cpu; use sdpa or flash"
NO_TRITON = "triton_paged needs a GPU: a time of the interpreter is no number"
READ, MATMUL = 20e9, 130e9                              # the ceilings
RANDOM = Layout(block_size=16, page_order="random")
PAGED = {(None, "in_order", "head"): 1.0, (1, "in_order", "head"): 1.6, (1, "random", "head"): 2.0,
         (16, "in_order", "head"): 1.1, (16, "random", "head"): 1.2, (64, "in_order", "head"): 1.02,
         (64, "random", "head"): 1.04, (128, "random", "head"): 1.02, (256, "random", "head"): 1.01,
         (16, "random", "token"): 1.8}                   # layout -> time ÷ contiguous
FORMATS = {"fp32": (1.0, 1.0), "bf16": (1.9, 2.0), "int8/token": (3.1, 3.9), "fp8_e4m3/token": (2.6, 3.9),
           "int4/token/g32": (0.2, 6.4)}                 # format -> (speed-up over fp32, bytes of fp32 ÷ its own)
MEMORY = {"naive": 2.0, "flash": 0.9, "sdpa": 0.8}       # variant -> exponent
PREFILL = {"naive": (0.1, 2.0, 500e6), "flash": (0.4, 1.1, 8e6), "sdpa": (0.6, 1.0, 8e6)}
# variant -> (share of the matmul ceiling, executed ÷ useful flops, hbm_bytes)


def about(one, comparison):
    return dict(comparison_id=comparison, case_id=f"{comparison}-{one.case_id}", **one.columns(),
                format_path="native" if one.kv_format == one.dtype else "decoded")


def row(reading, **columns):
    return {"run_id": RUN, "study": "kernels", "hardware": CPU, **columns,
            **{k: v for k, v in asdict(reading).items() if k != "hardware"}}


def timed(one, comparison, seconds, *, rel=0.02, ideal=64e6, flops=1e9, executed=1.0, moved=None):
    """A trial's time, the ceilings' shares, and what it must move and compute."""
    columns, ends = about(one, comparison), lambda v: dict(low=v * (1 - rel), high=v * (1 + rel))
    modelled = dict(kind="modelled", source="roofline")
    values = {"ideal_bytes": (ideal, "B"), "hbm_bytes": (moved or ideal, "B"), "useful_flops": (flops, "flop"),
              "executed_flops": (executed * flops, "flop"), "read_amplification": ((moved or ideal) / ideal, "ratio")}
    found = [Reading("latency_s", seconds, "s", "measured", source="timer", n=9, **ends(seconds))]
    found += [Reading(metric, value, unit, **modelled) for metric, (value, unit) in values.items()]
    for metric, amount, ceiling, unit in (("effective_bandwidth", ideal, 1.0, "B/s"),
                                          ("bandwidth_share", ideal, READ, "ratio"),
                                          ("flops_share", flops, MATMUL, "ratio")):
        value = amount / seconds / ceiling
        found.append(Reading(metric, value, unit, **modelled, **ends(value)))
    return [row(reading, **columns) for reading in found]


def ratio(one, comparison, metric, value, *, rel=0.04, kind="measured", note=""):
    ends = dict(low=value * (1 - rel), high=value * (1 + rel)) if rel else {}
    return row(Reading(metric, value, "ratio", kind, method="derived" if kind == "measured" else "formula:bytes",
                       source="kernels", note=note, **ends), **about(one, comparison))


def skipped(one, comparison, why):
    return [row(failed(metric, unit, why, status="skipped", source=source), **about(one, comparison))
            for metric, unit, source in (("latency_s", "s", "timer"), ("bandwidth_share", "ratio", "roofline"),
                                         ("flops_share", "ratio", "roofline"))]


def decode(heads=4, kv_len=8192, batch_size=1):
    return Workload.decode(AttentionShape(32, heads, 128), kv_len=kv_len, batch_size=batch_size)


def device(on):
    return dict(device=on, threads=1 if on == "cuda" else 2)


def share(shares, *, heads=4, kv_len=8192, on="cpu", absent=None, peer="sdpa", kv_format=None):
    """Decode, variants side by side: `shares` of the read ceiling, by variant. absent: variant -> why."""
    comparison, rows = f"share-{on}-{heads}-{kv_len}", []
    for variant, reached in shares.items():
        one = trial(variant, decode(heads, kv_len), kv_format=kv_format, **device(on))
        rows += timed(one, comparison, 64e6 / READ / reached)
        rows.append(ratio(one, comparison, "to_peer", shares[peer] / reached, note=f"to {peer}"))
    for variant, why in (absent or {}).items():
        rows += skipped(trial(variant, decode(heads, kv_len), **device(on)), comparison, why)
    return rows


def paging(by_layout=None, *, variant="paged", on="cpu", again=None):
    """Layouts of one variant. again: the contiguous cache's second time ÷ its first, an A/A pair."""
    comparison, rows, by_layout = f"paging-{on}", [], by_layout or PAGED
    if again:
        one = trial(variant, decode(), layout=Layout(), replica=1, **device(on))
        rows += timed(one, comparison, 4e-3 * again)
    for (block_size, page_order, order), value in by_layout.items():
        one = trial(variant, decode(), layout=Layout(block_size, page_order, order), **device(on))
        rows += timed(one, comparison, 4e-3 * value)
        if block_size:
            rows.append(ratio(one, comparison, "to_contiguous", value))
        if order == "token":
            rows.append(ratio(one, comparison, "to_head_order", value / by_layout[block_size, page_order, "head"]))
    return rows


def formats(by_format=None, *, kv_lens=(2048, 8192, 32768), variant="paged", on="cpu", peer=0.9):
    """Formats over context. peer: the fastest library's time in the dtype's own format ÷ this variant's."""
    rows = []
    for kv_len in kv_lens:
        comparison = f"formats-{on}-{kv_len}"
        for name, (faster, fewer) in (by_format or FORMATS).items():
            one = trial(variant, decode(kv_len=kv_len), kv_format=name, layout=RANDOM, **device(on))
            own, base = name == one.dtype, 8192 * kv_len
            rows += timed(one, comparison, base / READ / 0.5 / faster, ideal=base / fewer)
            rows.append(ratio(one, comparison, "to_peer", 1 / faster / peer, note="to sdpa"))
            if not own:
                rows += [ratio(one, comparison, "format_speedup", faster),
                         ratio(one, comparison, "format_bytes_ratio", fewer, rel=0, kind="modelled")]
    return rows


def memory(exponents=None, *, lengths=(2048, 4096, 8192, 16384), on="cpu"):
    rows = []
    for n in lengths:
        for variant, power in (exponents or MEMORY).items():
            one = trial(variant, Workload.prefill(AttentionShape(1, 1, 128), q_len=n), **device(on))
            value = 8 * 2**20 * (n / lengths[0])**power
            rows.append(row(Reading("peak_extra_bytes", value, "B", "measured", method="counter:VmHWM", n=1,
                                    low=value - 2**18, high=value + 2**18, source="memory"),
                            **about(one, f"memory-{on}-{n}")))
    return rows


def prefill(by_variant=None, *, on="cpu", n=2048, absent=None, flops=20e9):
    """Prompts side by side: the same useful flops, other flops executed and bytes moved."""
    comparison, rows = f"prefill-{on}", []
    work = Workload.prefill(AttentionShape(8, 2, 128), q_len=n)
    for variant, (reached, executed, moved) in (by_variant or PREFILL).items():
        one = trial(variant, work, **device(on))
        rows += timed(one, comparison, flops / MATMUL / reached, flops=flops, ideal=8e6, executed=executed, moved=moved)
    for variant, why in (absent or {}).items():
        rows += skipped(trial(variant, work, **device(on)), comparison, why)
    return rows


def steps(*, model="Qwen/Qwen2-72B", weights=145.4e9, per_token=327680, batches=(1, 4, 16, 64, 256),
          kv_lens=(2048, 8192, 32768)):
    """The article's two numbers, quoted, and what the bytes of a whole step allow, modelled."""
    rows = []
    for name, quoted, claim in (("fp8_e4m3", 1.08, "C47"), ("int8/token", 1.05, "C48")):
        case = dict(comparison_id=f"step-{name}", case_id=f"step-{name}", model=model, kv_format=name, replica=None)
        rows.append(row(Reading("step_speedup", quoted, "ratio", "quoted", method=f"cite:{claim}", source="article",
                                note="the article's table, section 5: no model, batch or context is given"), **case))
        rows.append(row(Reading("weight_bytes", weights, "B", "modelled"), **case))
        for kv_len in kv_lens:
            need = next(b for b in range(1, 10**6) if _faster(weights, b * kv_len * per_token) >= quoted)
            rows.append(row(Reading("batch_to_quoted", need, "count", "modelled"), **case, kv_len=kv_len))
            for batch in batches:
                kv = batch * kv_len * per_token
                rows += [row(Reading("step_speedup", _faster(weights, kv), "ratio", "modelled",
                                     method="formula:(W + K) ÷ (W + K')"), **case, kv_len=kv_len, batch_size=batch),
                         row(Reading("kv_bytes", kv, "B", "modelled"), **case, kv_len=kv_len, batch_size=batch)]
    return rows


def _faster(weights, kv):
    return (weights + kv) / (weights + kv / 2)


def unknown_weights(model="someone/unknown"):
    case = dict(comparison_id="step-fp8_e4m3", case_id="step-fp8_e4m3", model=model, kv_format="fp8_e4m3")
    return [row(missing("step_speedup", "ratio", f"the parameter count of {model} is not in the catalogue"), **case)]


def on_cpu():
    """A CPU's run: own kernels and torch's; what needs a GPU is skipped with its reason."""
    absent = {"flashinfer": NO_CUDA, "flash_attn": NO_CUDA.replace("FlashInfer", "FlashAttention")}
    return [*share({"naive": 0.3, "sdpa": 0.55, "sdpa_enable_gqa": 0.5, "paged": 0.8}, heads=32, kv_len=4096,
                   absent=absent),
            *share({"naive": 0.3, "sdpa": 0.45, "sdpa_enable_gqa": 0.1, "paged": 0.6}, absent=absent),
            *paging(), *formats(), *memory(), *prefill(), *steps()]


def on_gpu():
    """A GPU's run: the libraries are there."""
    return [*share({"sdpa": 0.4, "flash_attn": 0.86, "flashinfer": 0.88, "paged": 0.3}, on="cuda", peer="flashinfer"),
            *paging(on="cuda"), *formats({"bf16": (1.0, 1.0), "int8/token": (1.7, 1.9), "fp8_e4m3/token": (1.65, 1.9)},
                                         on="cuda"),
            *memory(on="cuda"), *prefill({"sdpa": (0.5, 1.0, 8e6), "naive": (0.05, 2.0, 500e6)}, on="cuda"), *steps()]


def made(rows):
    return table(rows)
