"""vLLM's lines against the block model: every printed quantity says how many blocks there may be, and they must meet.

pool: floor(GiB ÷ block), within the printed rounding. gpu_blocks: itself. kv_tokens and max_concurrency: turned round,
by what the line means in that version. Swap space gives cpu_blocks exactly.

Source: vLLM 0.32 v1/core/kv_cache_utils.py; PR 12569 and PR 13596 (V1's first words), PR 17996 (groups), issue 43308
and issue 54662 (tokens became concurrency × max_model_len), PR 4454 (V0's CPU blocks).
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, floor

from kvlab.kv.sizing import BLOCK_SIZE
from kvlab.serving._log_case import Case, GiB, kv_format
from kvlab.serving._log_cells import Engine, Number
from kvlab.serving.block_model import BlockModel, block_model
from kvlab.shapes import ModelSpec

SWAP_GIB = 4.0                  # V0's default swap space per GPU
_NO_LENGTH = 4096               # where no length is printed and none is needed


@dataclass(frozen=True, slots=True)
class Setting:
    """All that a prediction rests on. latents: how often an MLA latent is counted. because: what is not as printed."""
    kv_format: str
    block_size: int
    tp: int
    pp: int
    max_len: int
    batched: int
    in_flight_batches: int
    wording: str
    groups: bool
    prefix_caching: bool
    latents: int = 1
    speculative: int = 0
    draft_layers: int = 0
    state_dtype_bytes: int | None = None
    swap_gib: float | None = None
    because: tuple[str, ...] = ()


def before(engine: Engine, release: tuple[int, ...], month: tuple[int, int]) -> bool | None:
    """Whether the engine is older than a release or a month; None where it says too little."""
    if engine.release:
        return engine.release < release if len(engine.release) >= len(release) or (
            engine.release != release[:len(engine.release)]) else None
    if engine.month is None or engine.month[0] == month[0] and engine.month[1] == 0:
        return None
    return engine.month < month


def wordings(engine: Engine) -> tuple[str, ...]:
    """What "KV cache size: N tokens" may mean, likeliest first.

    Groups came with 0.9 (May to July 2025), concurrency × length between 0.20.0 and 0.21 (April to June 2026).
    """
    if engine.generation == "0" or before(engine, (0, 9), (2025, 5)):
        return ("blocks",)
    if before(engine, (0, 9), (2025, 5)) is None:
        return ("concurrency", "grouped", "blocks")
    if before(engine, (0, 10), (2025, 8)):
        return ("grouped", "blocks")
    if before(engine, (0, 20, 0), (2026, 4)):
        return ("grouped",)
    if before(engine, (0, 21), (2026, 7)) is False:
        return ("concurrency",)
    return ("grouped", "concurrency")


def batched_tokens(case: Case) -> tuple[int, ...]:
    """Default tokens of one step of the server: 8,192 on GPUs of at least 70 GiB but the A100, else 2,048."""
    memory = case.gpu_gib
    if memory is None:
        return (8192, 2048)
    big = memory >= 70 and "a100" not in case.gpu.lower()
    huge = memory >= 160 and before(case.engine, (0, 27), (2026, 8)) is not True
    return ((16384, 8192) if huge else (8192,)) if big else (2048,)


def baselines(case: Case) -> Iterator[Setting]:
    """Settings that the printed inputs and the version's defaults leave open; none of them is a deviation."""
    name = kv_format(case)
    if name is None:
        return
    pages = case.block_size.value if case.block_size else BLOCK_SIZE
    # A hybrid's printed block may be the enlarged one: the setting that it grew from is the default then.
    block = int(pages) if not ("linear" in case.kinds and pages > 128) else BLOCK_SIZE
    tp = case.tp or case.ranks
    spread = case.n_gpus // tp if case.n_gpus and case.n_gpus > tp and case.n_gpus % tp == 0 else 1
    flights = (2, 1) if before(case.engine, (0, 26), (2026, 8)) is False and case.windows else (1,)
    states = ((True, False) if before(case.engine, (0, 20), (2026, 5)) is False else (False, True)
              ) if "linear" in case.kinds else (True,)
    for wording in wordings(case.engine):
        for pp in dict.fromkeys((1, spread)):
            for batched in batched_tokens(case) if case.windows else (8192,):
                for flight in flights:
                    for prefix in states:
                        yield Setting(name, block, tp, pp, case.max_len or case.spec.context or _NO_LENGTH, batched,
                                      flight, wording, wording != "blocks", prefix)


def model_of(spec: ModelSpec | None, setting: Setting) -> BlockModel:
    return _model(spec, setting.kv_format, setting.block_size, setting.tp, setting.pp, setting.max_len, setting.batched,
                  setting.in_flight_batches, setting.speculative, setting.draft_layers, setting.prefix_caching,
                  setting.state_dtype_bytes, setting.groups)


@lru_cache(maxsize=4096)
def _model(spec, kv_format, block_size, tp, pp, max_len, batched, in_flight, speculative, draft_layers, prefix_caching,
           state_dtype_bytes, groups) -> BlockModel:
    """The blocks of what of a setting changes them: hundreds of settings of a line share a few models."""
    return block_model(spec, kv_format=kv_format, block_size=block_size, tp=tp, pp=pp, max_len=max_len,
                       max_batched_tokens=batched, in_flight_batches=in_flight, speculative_tokens=speculative,
                       draft_layers=draft_layers, prefix_caching=prefix_caching, state_dtype_bytes=state_dtype_bytes,
                       hybrid=groups)


@dataclass(frozen=True, slots=True)
class Fit:
    """How the printed quantities fit a setting. spans: blocks that each allows, by column; failing: those that do not
    meet the others; predicted: what each column should be, from the strongest of the others."""
    setting: Setting
    spans: dict[str, tuple[int, int]]
    failing: tuple[str, ...]
    predicted: dict[str, float | int]


def fit(case: Case, setting: Setting) -> Fit:
    """Compare all that is printed under one setting."""
    model = model_of(case.spec, setting)
    spans, predicted, failing = {}, {}, []
    if case.pool is not None:
        spans["kv_cache_gib"] = tuple(_pool_blocks(model, gib, setting) for gib in (case.pool.low, case.pool.high))
    if case.blocks is not None:
        spans["gpu_blocks"] = (case.blocks, case.blocks)
    if case.tokens is not None:
        spans["kv_tokens"] = _token_span(model, case.tokens, setting.wording)
    if case.concurrency is not None and (case.max_len or case.windows or "linear" in case.kinds):
        spans["max_concurrency"] = _concurrency_span(model, case.concurrency, setting.wording)
    anchor = next(iter(spans), None)
    if anchor:
        low, high = spans[anchor]
        middle = _pool_blocks(model, case.pool.value, setting) if anchor == "kv_cache_gib" else low
        for column, (least, most) in list(spans.items())[1:]:
            predicted[column] = _shown(model, column, min(max(middle, least), most) if max(low, least) <= min(
                high, most) and least <= most else middle, setting.wording)
            if max(low, least) > min(high, most) or least > most:
                failing.append(column)
            else:
                low, high = max(low, least), min(high, most)
                middle = min(max(middle, low), high)
    if case.cpu_blocks is not None:
        swap = setting.swap_gib or (case.swap.value if case.swap else SWAP_GIB)
        predicted["cpu_blocks"] = int(swap * GiB // (model.block_bytes * setting.latents))
        if predicted["cpu_blocks"] != case.cpu_blocks:
            failing.append("cpu_blocks")
    return Fit(setting, spans, tuple(failing), predicted)


def _pool_blocks(model: BlockModel, gib: float, setting: Setting) -> int:
    return model.blocks(gib * GiB / setting.latents)


def _shown(model: BlockModel, column: str, blocks: int, wording: str) -> float | int:
    if column == "gpu_blocks":
        return blocks
    return model.tokens(blocks, wording) if column == "kv_tokens" else round(blocks / _per_request(model, wording), 2)


def _token_span(model: BlockModel, tokens: Number, wording: str) -> tuple[int, int]:
    """Blocks whose line would print that many tokens; the first above the second where none would."""
    if wording == "concurrency":
        per = model.blocks_per_request()
        # int(n ÷ per × length) may be one less than the fraction where that is whole: the upper end is included.
        return ceil(tokens.low * per / model.max_len - 1e-9), floor((tokens.high + 1) * per / model.max_len + 1e-9)
    least, most = ceil(tokens.low / model.block_size), floor(tokens.high / model.block_size)
    many = len(model.groups) if wording == "grouped" else 1
    return least * many, most * many + many - 1


def _per_request(model: BlockModel, wording: str) -> float:
    """Blocks of one request of the longest length; before there were groups, without rounding them up."""
    return model.max_len / model.block_size if wording == "blocks" else model.blocks_per_request()


def _concurrency_span(model: BlockModel, printed: Number, wording: str) -> tuple[int, int]:
    per = _per_request(model, wording)
    return ceil(per * printed.low - 1e-9), floor(per * printed.high + 1e-9)
