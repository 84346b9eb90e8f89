"""What does a higher group ratio cost and save? Recall trained from scratch, and time and bytes, per ratio.

Tests the article's claims that group_ratio must not exceed 16 and that 8 is safer beyond 8K tokens. Ratio is crossed
with head_dim, so that a narrow KV cache is not mistaken for a high ratio. Three kinds of cases: recall models trained
from scratch (quality), decode attention of the same heads (time, bytes), and a trained model whose KV heads are
expanded or pooled (conversion damage).
"""
from __future__ import annotations

import os
from collections.abc import Iterator

from kvlab.accuracy.recall import RecallCell
from kvlab.accuracy.recall import rows as recalled
from kvlab.attention import Comparison, VariantRef, trial
from kvlab.probes import measure
from kvlab.probes._base import Watch, hardware
from kvlab.probes.ceilings import Ceilings
from kvlab.probes.kernel_error import KernelError
from kvlab.probes.roofline import Roofline
from kvlab.probes.timer import Timer
from kvlab.record.recall import TIMES_LONGER
from kvlab.shapes import AttentionShape, Workload
from kvlab.studies._group_ratio_conversion import Conversion, converted
from kvlab.studies._group_ratio_findings import findings
from kvlab.studies._group_ratio_joined import joined
from kvlab.studies._run import Case

__all__ = ["SIZES", "Conversion", "cases", "findings", "joined", "run"]
SIZES = ("smoke", "small", "large")
Q_HEADS = 32                                                # so that ratio 32 exists
RATIOS = (1, 2, 4, 8, 16, 32)
ENDS = (1, 16, 32)
FORMATS = ("fp32", "int4/token", "int2/token/g32")         # what the trained models are scored under
MODEL = "smollm2-135m"
MODEL_HEADS = (9, 64, (9, 3, 1))                            # query heads, head_dim, KV heads after a conversion
DISTIL_STEPS = 12


def cases(size: str, *, device: str = "cpu", variants: tuple[VariantRef, ...] | None = None,
          model: str | None = None) -> Iterator[Case]:
    """Recall cells, then decode comparisons of the same heads, then conversions of SmolLM2 (or of `model`, a name or
    path that kvlab.load_decoder takes; its own heads are not measured as decode cases)."""
    grid = {"smoke": {4: (1, 16)}, "small": {4: RATIOS, 16: ENDS, 64: ENDS},
            "large": {4: RATIOS, 16: RATIOS, 64: RATIOS}}[size]
    common = dict(device=device, threads=1 if device != "cpu" or size == "smoke" else min(2, os.cpu_count() or 1))
    yield from {"smoke": _smoke, "small": _small, "large": _large}[size](grid, common)
    yield from _decode(size, grid, device, variants)
    yield from _conversions(size, device, model)


def _smoke(grid, common):
    """Few pairs, keys and values, so that something is learnt in some seconds."""
    for head_dim, ratios in grid.items():
        for ratio in ratios:
            yield RecallCell(Q_HEADS // ratio, head_dim, pairs=(4, 8), evaluated=(4, 8), num_keys=64, num_values=16,
                             steps=120, lr=8e-3, **common)


def _small(grid, common):
    """Five seeds where the curve is, three for the controls; one matched cell where the weights differ most."""
    for head_dim, ratios in grid.items():
        seeds = (0, 1, 2, 3, 4) if head_dim == 4 else (0, 1, 2)
        formats = FORMATS if head_dim < 64 else FORMATS[:1]
        for ratio in ratios:
            yield RecallCell(Q_HEADS // ratio, head_dim, seeds=seeds, kv_formats=formats, **common)
    yield RecallCell(1, 4, parameter_matched=True, **common)
    for heads in (Q_HEADS, 1):                          # what looks like capacity may be speed of learning
        yield RecallCell(heads, 4, longer=TIMES_LONGER, **common)


def _large(grid, common):
    """The grid with more steps and seeds, all ratios matched, the two-token task, and more than 8,192 tokens.

    Of the long cells, width and rate differ: 16,384 keys do not fit into 64 channels.
    """
    five = dict(seeds=(0, 1, 2, 3, 4), **common)
    for head_dim, ratios in grid.items():
        for ratio in ratios:
            yield RecallCell(Q_HEADS // ratio, head_dim, steps=1000, evaluated=(8, 16, 32, 64, 128, 256), num_keys=256,
                             kv_formats=FORMATS, **five)
    for ratio in RATIOS:
        heads = Q_HEADS // ratio
        yield RecallCell(heads, 4, steps=1000, parameter_matched=True, **five)
        yield RecallCell(heads, 4, steps=1000, longer=TIMES_LONGER, **five)
        yield RecallCell(heads, 64, task="two_token", steps=1500, lr=1.5e-3, **five)
        yield RecallCell(heads, 64, pairs=(64, 512, 4096, 9216), evaluated=(64, 512, 4096, 9216), num_keys=16_384,
                         width=128, steps=1000, lr=2e-3, batch_size=16, seeds=(0, 1, 2), **common)


def _decode(size, grid, device, variants) -> Iterator[Comparison]:
    """One decode step of one sequence over as many tokens for every (ratio, head_dim); one A/A pair among them."""
    kv_len = {"smoke": 1024, "small": 8192, "large": 131_072}[size]
    refs = (VariantRef("sdpa"),) if variants is None else variants
    shapes = [AttentionShape(Q_HEADS, Q_HEADS // ratio, head_dim) for head_dim, ratios in grid.items()
              for ratio in ratios]
    if size != "smoke":
        query_heads, head_dim, kv_heads = MODEL_HEADS
        shapes += [AttentionShape(query_heads, n, head_dim) for n in kv_heads]
    for i, shape in enumerate(shapes):
        workload = Workload.decode(shape, kv_len=kv_len)
        again = [trial(refs[0], workload, device=device, replica=1)] if i == 0 else []
        yield Comparison(tuple([trial(v, workload, device=device) for v in refs] + again))


def _conversions(size, device, model) -> Iterator[Conversion]:
    common = dict(model=model or MODEL, device=device, **{
        "smoke": dict(tokens=64), "small": dict(tokens=512),
        "large": dict(tokens=4096, text="pydoc:specialnames")}[size])    # execmodel has 1,833 tokens of SmolLM2
    yield Conversion("expand", 9, **common)
    if size == "smoke":
        return
    for method in ("mean", "first", "aligned"):
        yield Conversion(method, 1, **common)
    for method in ("mean", "aligned"):
        yield Conversion(method, 1, DISTIL_STEPS if size == "small" else 10 * DISTIL_STEPS, **common)


def run(case: Case, *, artifacts=None, watch: Watch | None = None) -> list[dict]:
    """A cell: training and recall. A comparison: correctness, ceilings, time, roofline. A conversion: scoring."""
    watch = watch or Watch()
    if isinstance(case, RecallCell):
        def step(i):
            watch.at("", f"training step {i}")
        return recalled(case, step, hardware=hardware(case.device))
    if isinstance(case, Conversion):
        return converted(case, lambda stage: watch.at("", stage), hardware(case.device))
    cap_s = 2.0 if case.device.startswith("cuda") else 0.4
    return measure(case, (KernelError(), Ceilings(), Timer(cap_s=cap_s), Roofline()), artifacts=artifacts, watch=watch)
