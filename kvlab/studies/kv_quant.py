"""What does storing the KV cache in fewer bits cost in quality, and what does it save in bytes and time?

Tests the article's claims that FP8 loses less than 0.1 %, that INT8 loses 0.1 to 0.3 % and is the worse of the two, and
that INT8 needs a calibration set. A real model scores real text with its cache in each format; one line per format
holds bytes, time, error and KL (see `per_format`). Error against context length, and layer by layer, stand beside.
Formats are ranked on the windows that all of them score. Size large scores most of them on all texts of the machine
beside that: some 200,000 tokens. To judge FP8's 0.1 % of perplexity took an estimated 260,000.
"""
from __future__ import annotations

from collections.abc import Iterator

from kvlab.accuracy.scoring import CALIBRATION
from kvlab.accuracy.texts import texts
from kvlab.attention import Comparison, VariantRef, trial
from kvlab.kv.formats import kv_format
from kvlab.probes import measure
from kvlab.probes._base import Watch
from kvlab.probes.ceilings import Ceilings
from kvlab.probes.format_error import FormatError
from kvlab.probes.kernel_error import KernelError
from kvlab.probes.roofline import Roofline
from kvlab.probes.timer import Timer
from kvlab.shapes import AttentionShape, Workload
from kvlab.studies import _kv_quant_rows as rows
from kvlab.studies._kv_quant_cases import MIXED, ContextCase, MixCase, ScoreCase, SensitivityCase
from kvlab.studies._kv_quant_findings import findings, per_format
from kvlab.studies._run import Case

__all__ = ["SIZES", "cases", "findings", "per_format", "run"]
SIZES = ("smoke", "small", "large")
MODEL, MODEL_SHAPE = "smollm2-135m", AttentionShape(9, 3, 64)
# static scales of a range that was guessed instead of calibrated: one that clips, one about right, one too wide
GUESSED = ("range:8", "range:16", "range:32")
# what INT8 is held against: FP8 with a scale per tensor or token likewise, and FP8 without scales
AGAINST = {"int8/tensor": ("fp8_e4m3/tensor", "fp8_e4m3"), "int8/token": ("fp8_e4m3/token", "fp8_e4m3"),
           "int8/head": ("fp8_e4m3",), "int8/channel": ("fp8_e4m3",)}
FORMATS = ("fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e4m3/token", "fp8_e4m3/tensor", "fp8_e5m2", "int8/token",
           "int8/tensor", "int8/head", "int8/channel", "int4/token/g32", "kivi4/g32/r32", "kivi2/g32/r32",
           "int8/token+int4/token/g32")
SMOKE = ("fp32", "bf16", "fp8_e4m3", "int8/token", "int8/tensor")
# scored token by token over a cache of their own each, which takes four times as long; `large` gives them less text
SLOW = tuple(name for name in FORMATS if name.startswith("kivi"))
LONG = ("fp8_e4m3", "int8/token")
LONG_TEXT = "pydoc:specialnames"                    # the longest topic of every Python: 12,000 tokens
DOCUMENTS = ("pydoc:execmodel", "licence:GPL-3", "pydoc:types")
LARGE = ("pydoc:execmodel", "pydoc:compound", "pydoc:specialnames", "pydoc:types", "pydoc:formatstrings",
         "pydoc:string-methods", "pydoc:typesseq", "pydoc:assignment", "pydoc:calls", "pydoc:strings", "licence:GPL-3",
         "licence:LGPL-2.1", "licence:GFDL-1.3", "licence:Apache-2.0", "licence:MPL-2.0", "man:bash", "man:gcc",
         "man:curl", "man:git-config", "man:ffmpeg-all", "man:rsync", "man:tar")


def cases(size: str, *, device: str = "cpu", variants: tuple[VariantRef, ...] | None = None,
          model: str | None = None) -> Iterator[Case]:
    """Each format on the texts, decode attention in each format, one long window, one layer at a time, a mix."""
    name = model or MODEL
    there = {source.name for source in texts() if not source.why_not}
    documents = _there(DOCUMENTS, there)[:1 if size == "smoke" else 2]
    every = _there(LARGE, there) if size == "large" else ()
    window, formats = (128, SMOKE) if size == "smoke" else (512, FORMATS)

    def scored(fmt, calibration=CALIBRATION):
        against = tuple(one for one in AGAINST.get(fmt, ()) if one in formats and calibration == CALIBRATION)
        common = dict(calibration=calibration, device=device, against=against)
        if size != "large" or fmt in SLOW:
            return ScoreCase(name, fmt, documents, window, **common)
        return ScoreCase(name, fmt, every, window, None, common=documents, **common)
    yield from map(scored, formats)
    for guess in GUESSED[:1] if size == "smoke" else GUESSED:
        yield scored("int8/tensor", guess)
    shape = _shape(name)
    if shape is not None:
        workload = Workload.decode(shape, kv_len={"smoke": 1024, "small": 2048, "large": 8192}[size])
        yield from _timed(workload, formats, variants or (VariantRef("sdpa"),), device)
    common, sensed = dict(documents=documents, device=device), 64 if size == "small" else 512
    if size == "smoke":
        yield SensitivityCase(name, MIXED[0], window=64, **common)
        yield ContextCase(name, "fp8_e4m3", (LONG_TEXT,), 512, device=device)
        return
    uniform = "int8/token+int4/token/g32"
    mix = MixCase(name, uniform, window=window, sensed=sensed, against=(uniform,), **common)
    for one in MIXED:
        yield SensitivityCase(name, one, window=sensed, start=mix.start + window, **common)
    yield mix
    for one in LONG:
        yield ContextCase(name, one, (LONG_TEXT,), 8192, device=device, every=4 if size == "small" else 1)


def _timed(workload, formats, refs, device) -> Iterator[Comparison]:
    """Decode attention, formats of about the same size together.

    Input copies are as many as the smallest needs to be read from memory: beside it, fp32 would take eight times that.
    """
    size = {name: kv_format(name).nbytes(max(workload.kv_lens), workload.shape) for name in formats}
    groups: list[list[str]] = []
    for name in sorted(formats, key=size.__getitem__):
        if groups and size[name] <= 2 * size[groups[-1][0]]:
            groups[-1].append(name)
        else:
            groups.append([name])
    for group in groups:
        yield Comparison(tuple(trial(ref, workload, kv_format=one, dtype="fp32", device=device)
                               for ref in refs for one in group))


def run(case: Case, *, artifacts=None, watch: Watch | None = None) -> list[dict]:
    """Decode attention: correctness, error, time, roofline. Text: scores, as rows; per-token frames as artifacts."""
    if isinstance(case, Comparison):
        chosen = (KernelError(), FormatError(), Ceilings(), Timer(cap_s=0.3), Roofline())
        return measure(case, chosen, artifacts=artifacts, watch=watch)
    of = {ScoreCase: rows.scored, ContextCase: rows.by_position, SensitivityCase: rows.by_layer, MixCase: rows.mixed}
    return of[type(case)](case, artifacts, watch or Watch())


def _there(names: tuple[str, ...], there: set[str]) -> tuple[str, ...]:
    """Those of the texts that this machine has; a manual page is tried, since pages are not listed."""
    from kvlab.accuracy.texts import text
    found = []
    for name in names:
        if name.startswith("man:"):
            try:
                text(name)
            except (KeyError, ValueError):
                continue
        elif name not in there:
            continue
        found.append(name)
    return tuple(found)


def _shape(model: str) -> AttentionShape | None:
    """The attention of the model's first layer; None where the model is not there, which its other cases say."""
    if model == MODEL:
        return MODEL_SHAPE
    from kvlab.model.load import load_decoder
    try:
        return load_decoder(model, tokenizer=False).config.shape(0)
    except (KeyError, ValueError, OSError):
        return None
