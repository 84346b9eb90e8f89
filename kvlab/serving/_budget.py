"""What one GPU's memory goes to before the KV cache gets the rest, term by term, each with its interval and its kind.

Pool = util × VRAM − weights − non-torch − activation peak − CUDA graphs, in bytes of one tensor-parallel rank.

It models vLLM, which profiles one step at start-up and gives the pool what that step leaves of util × VRAM. SGLang's
mem-fraction-static covers weights and pool and leaves the activations outside; TensorRT-LLM's fraction is of the memory
that is FREE once weights and workspaces are loaded: neither is modelled.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import median

from kvlab.catalog import rows
from kvlab.catalog.gpus import GPUSpec
from kvlab.shapes import ModelSpec
from kvlab.units import GiB

UTIL = 0.92                     # vLLM 0.32 vllm/config/cache.py; 0.9 before
# Constants are value, low, high. Bytes of the profiled sampler per sampled sequence and entry of the vocabulary (logits
# in fp32 too, sorted values and indices, probabilities): 38.4, 39.2 and 41.2 in the three logs that print the peak
# (data/engine_budgets.csv); what the other logs leave is 22 and more.
SAMPLER = (38, 22, 42)
# Bytes of one forward step per token and (hidden + FFN) channel: gate, up and their product, three hidden states, of 2
# bytes each. Two logs of Llama-3.1-8B (20,000 and 29,000 tokens) leave 1 % beside it; one with tp 2 has a third more.
FORWARD = (6, 6, 8)
NON_TORCH_GIB = {False: (0.16, 0.01, 0.5), True: (0.3, 0.2, 0.6)}       # by tp > 1
NON_TORCH_SOURCE = ("logs since vLLM 0.7: 0.16 (vllm#12126), 0.03 (#13882), 0.01 GiB with one GPU; 0.20 (#14447), 0.25 "
                    "(#13061), 0.34 … 0.43 (#16570) with several")
GRAPHS_GIB = (0.3, 0.14, 0.75)
GRAPHS_SOURCE = ("estimates that vLLM 0.21 and later logs: 0.14, 0.17 (club-3090#127), 0.26 (vllm#30515), 0.36 "
                 "(gpustack/runner#251), 0.49 (club-3090#104), 0.73 GiB (vllm#39559); one model has shown 2.4; before "
                 "0.21 or with --enforce-eager: 0")
VOCAB = (152_064, 32_000, 262_144)              # where it is not known: Qwen2.5's, Llama 2's, Gemma 3's
# A card that software sees as several GPUs, of which each engine process drives one. Source: data/gpus.csv (conflicts).
DIES = {"MI250X": 2}


@dataclass(frozen=True, slots=True)
class Term:
    """One part of the budget in bytes of one GPU. low, high: between what it may lie. how: the arithmetic in words."""
    name: str
    value: int
    low: int
    high: int
    kind: str
    how: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class Load:
    """What the profiled step looks like. sampled: sequences whose next token is drawn (max_num_seqs)."""
    tp: int
    sampled: int
    batched_tokens: int


def _exact(name: str, value: float, how: str, kind: str = "quoted", source: str = "") -> Term:
    return Term(name, round(value), round(value), round(value), kind, how, source)


def given(name: str, gib: float) -> Term:
    """A term that the user knows better."""
    return _exact(name, gib * GiB, "given", source="the user")


@cache
def _reports() -> dict[str, dict[str, str]]:
    return {row["gpu"]: row for row in rows("device_memory.csv")}


@cache
def _sheet_ratio() -> tuple[float, float, float]:
    """Reported bytes ÷ (the sheet's GB × 2³⁰), over the GPUs with a report: median, least; and 1, the most."""
    from kvlab.catalog.gpus import gpus
    known = gpus()
    ratios = [float(row["gib"]) * GiB / (known[name].memory_bytes / 10**9 * GiB) for name, row in _reports().items()]
    return median(ratios), min(ratios), 1.0


def device_memory(gpu: GPUSpec) -> Term:
    """The bytes that the device itself reports, of which util is a share.

    Quoted where data/device_memory.csv has a report. Else modelled: a sheet's GB are GiB less what firmware and ECC
    take; of one die where a card is several GPUs to software (DIES). Refuses a GPU whose memory is unknown.
    """
    report = _reports().get(gpu.name)
    if report:
        how = f"reported by {report['reported_by']}"
        return _exact("VRAM", float(report["gib"]) * GiB, how, source=report["source"])
    if gpu.memory_bytes is None:
        raise ValueError(f"the memory of {gpu.name} is not known; give --vram-gib")
    dies = DIES.get(gpu.name, 1)
    sheet = gpu.memory_bytes / 10**9 / dies
    value, low, high = (round(sheet * GiB * ratio) for ratio in _sheet_ratio())
    return Term("VRAM", value, low, high, "modelled", f"the sheet's {sheet:g} GB{f' of one die of {dies}' * (dies > 1)}"
                f" as GiB × {_sheet_ratio()[0]:.3f}, the median of {len(_reports())} devices' reports",
                "data/gpus.csv and data/device_memory.csv")


@dataclass(frozen=True, slots=True)
class Widths:
    """Channels of the residual stream and of the FFN (of all experts that a token visits), and the vocabulary."""
    hidden: int
    ffn: int
    vocab: tuple[int, int, int]
    source: str
    known: bool


@cache
def _widths() -> dict[str, dict[str, str]]:
    return {row["model"]: row for row in rows("model_widths.csv")}


def widths(spec: ModelSpec) -> Widths:
    """From data/model_widths.csv; else assumed: hidden = query heads × head_dim, FFN 3.5 times that, any vocabulary."""
    row = _widths().get(spec.name)
    if row:
        return Widths(int(row["hidden"]), int(row["ffn"]), (int(row["vocab"]),) * 3, row["source"], True)
    hidden = spec.num_q_heads * spec.head_dim
    return Widths(hidden, round(3.5 * hidden), VOCAB, "assumed: hidden = query heads × head_dim, FFN 3.5 × hidden, "
                  "vocabulary 32,000 … 262,144", False)


def activation(of: Widths, load: Load) -> Term:
    """The peak of the step that vLLM profiles: the larger of a forward pass over all batched tokens and of the sampler.

    Source: vLLM 0.32 v1/worker/gpu_model_runner.py (profile_run, _dummy_sampler_run); constants fitted as SAMPLER and
    FORWARD say. That it is the larger and not the sum: vllm#9003 (1.71, 1.10, 1.10 GiB for 256, 128, 1 sequences).
    Encoders of images and adapters are not counted.
    """
    width = of.hidden + of.ffn // load.tp
    forward = [load.batched_tokens * width * per for per in FORWARD]
    sampler = [load.sampled * vocab * per for vocab, per in zip(of.vocab, SAMPLER)]
    value, low, high = map(max, forward, sampler)
    how = (f"sampler: {load.sampled:,} sequences × {of.vocab[0]:,} vocabulary × {SAMPLER[0]} B"
           if sampler[0] > forward[0] else
           f"forward: {load.batched_tokens:,} tokens × {width:,} channels × {FORWARD[0]} B")
    how += "" if of.known else ", widths assumed"
    return Term("activation peak", value, low, high, "modelled", how, of.source)


def non_torch(tp: int) -> Term:
    value, low, high = (round(gib * GiB) for gib in NON_TORCH_GIB[tp > 1])
    how = "NCCL, libraries' buffers: as logs have it"
    return Term("non-torch", value, low, high, "modelled", how, NON_TORCH_SOURCE)


def graphs() -> Term:
    value, low, high = (round(gib * GiB) for gib in GRAPHS_GIB)
    return Term("CUDA graphs", value, low, high, "modelled", "as logs of vLLM 0.21 and later have it", GRAPHS_SOURCE)


def pool(util: float, vram: Term, taken: list[Term]) -> Term:
    """What is left of util × VRAM, negative where nothing is; from every term at its worst to every one at its best."""
    value = int(util * vram.value) - sum(term.value for term in taken)
    low = int(util * vram.low) - sum(term.high for term in taken)
    high = int(util * vram.high) - sum(term.low for term in taken)
    return Term("KV pool", value, low, high, "modelled", f"{util:g} × VRAM − " + " − ".join(t.name for t in taken))


def check_logs() -> list[dict]:
    """The model's pool against that of every start-up log in data/engine_budgets.csv: GiB, and relative errors.

    fitted: whether a constant of the model was read off this very log. inside: whether the logged pool lies in the
    model's interval. error: of the pool (None where it was not positive); of_util: the difference as a share of the
    GPU's budget, which exists for all. Graphs count 0: none of these versions took them off.
    """
    from kvlab.catalog.gpus import gpu as gpu_named
    found = []
    for row in rows("engine_budgets.csv"):
        tp, util, logged = int(row["tp"]), float(row["util"]), float(row["pool_gib"])
        vram = given("VRAM", float(row["device_gib"])) if row["device_gib"] else device_memory(gpu_named(row["gpu"]))
        of = Widths(int(row["hidden"]), int(row["ffn"]), (int(row["vocab"]),) * 3, row["source"], True)
        peak = activation(of, Load(tp, int(row["sampled"]), int(row["batched"])))
        left = pool(util, vram, [given("weights", float(row["weights_gib"])), non_torch(tp), peak])
        found.append(dict(id=row["id"], model=row["model"], engine=row["engine"], fitted=row["fitted"] == "yes",
                          logged_gib=logged, vram_gib=vram.value / GiB, weights_gib=float(row["weights_gib"]),
                          pool_gib=left.value / GiB, low_gib=left.low / GiB, high_gib=left.high / GiB,
                          inside=left.low <= logged * GiB <= left.high,
                          error=(left.value / GiB - logged) / logged if logged > 0 else None,
                          of_util=(left.value / GiB - logged) / (util * vram.value / GiB),
                          activation_gib=peak.value / GiB,
                          logged_activation_gib=float(row["activation_gib"]) if row["activation_gib"] else None,
                          source=row["source"], note=row["note"]))
    return found
