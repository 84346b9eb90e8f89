"""Why a vLLM line may differ from what its printed inputs predict: rules, each with a condition, arithmetic and bounds.

A rule changes a setting that the table does not print, and only within the values an engine can have. It counts where
ALL quantities of the line then meet in whole blocks; at most two rules together. The rules of the last resort (unequal
ranks, rounded figures) predict an interval instead, and say which.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from kvlab.serving._log_case import Case, Finding, GiB
from kvlab.serving._log_vllm import Fit, Setting, before, model_of

BATCHED = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)       # usual --max-num-batched-tokens
MOST_DRAFTED = 5                                                    # tokens of one speculative step
MOST_SWAP_GIB = 64
LEAST_OF_RANKS = 0.75           # the fullest rank holds at least that share of the pool that another rank printed
# Families whose checkpoints carry an MTP layer (num_nextn_predict_layers, mtp_num_hidden_layers in their config.json).
_MTP = ("Qwen/Qwen3.5", "Qwen/Qwen3-Next", "deepseek-ai/DeepSeek-V3", "zai-org/GLM-4.5", "zai-org/GLM-5",
        "XiaomiMiMo/MiMo", "moonshotai/Kimi-K3")

FP8_BY_ITSELF = "kv_dtype auto took fp8, as a checkpoint with an fp8 KV scheme makes it: half the bytes per token"

Rule = Callable[[Case, Setting], Iterator[Setting]]


def _because(setting: Setting, why: str, **changes) -> Setting:
    return replace(setting, **changes, because=(*setting.because, why))


def fp8_of_the_checkpoint(case: Case, setting: Setting) -> Iterator[Setting]:
    """kv_dtype "auto" (or none) follows a checkpoint with an fp8 KV scheme, a byte per number; not before late 2024."""
    if case.kv_dtype in ("", "auto") and setting.kv_format == "bf16" and (
            before(case.engine, (0, 6), (2024, 9)) is not True):
        yield _because(setting, FP8_BY_ITSELF, kv_format="fp8_e4m3")


def other_batched_tokens(case: Case, setting: Setting) -> Iterator[Setting]:
    """A window keeps the tokens in flight; max_num_batched_tokens is not printed and need not be the default."""
    if case.windows and setting.groups:
        for tokens in dict.fromkeys((*BATCHED, setting.max_len)):
            if tokens != setting.batched:
                yield _because(setting, f"max_num_batched_tokens {tokens:,} instead of the default "
                               f"{setting.batched:,}: a window keeps the tokens in flight", batched=tokens)


def speculation(case: Case, setting: Setting) -> Iterator[Setting]:
    """MTP adds a layer of attention, and to recurrent layers a state per drafted token and a longer convolution."""
    if not (case.spec.name.startswith(_MTP) or "mtp" in case.words or "eagle" in case.words):
        return
    for drafted in range(1, MOST_DRAFTED + 1) if "linear" in case.kinds else (1,):
        why = f"speculative decoding of {drafted} token{'s' * (drafted > 1)}: one layer of attention more"
        if "linear" in case.kinds:
            why += f", {drafted} more state{'s' * (drafted > 1)} per sequence"
        yield _because(setting, why, speculative=drafted, draft_layers=1)


def latent_twice(case: Case, setting: Setting) -> Iterator[Setting]:
    """Until March 2025 vLLM sized an MLA latent as K and V: twice the bytes (PR 14462)."""
    if "mla" in case.kinds and before(case.engine, (0, 8), (2025, 4)) is not False:
        yield _because(setting, "this version counted the MLA latent as K and V, twice the bytes (vLLM PR 14462)",
                       latents=2)


def no_groups(case: Case, setting: Setting) -> Iterator[Setting]:
    """A KV connector or --disable-hybrid-kv-cache-manager stores windows whole."""
    if case.windows and len(case.kinds) > 1 and setting.groups:
        yield _because(setting, "the hybrid KV cache manager was off: windows are stored whole", groups=False)


def other_state_dtype(case: Case, setting: Setting) -> Iterator[Setting]:
    """--mamba-ssm-cache-dtype: the recurrent state in 16 bits instead of 32, or the reverse."""
    if "linear" in case.kinds:
        for size in (2, 4):
            yield _because(setting, f"recurrent state of {size} bytes per number (--mamba-ssm-cache-dtype)",
                           state_dtype_bytes=size)


def other_swap(case: Case, setting: Setting) -> Iterator[Setting]:
    """--swap-space in whole GiB, where the table does not say: only where a GiB holds so many blocks that it tells."""
    block_bytes = model_of(case.spec, setting).block_bytes
    if case.swap is None and case.cpu_blocks and GiB / block_bytes >= 16:
        for gib in range(1, MOST_SWAP_GIB + 1):
            if gib * GiB // (block_bytes * setting.latents) != case.cpu_blocks:
                continue                                            # it would not meet, whatever else is changed
            yield _because(setting, f"swap space of {gib} GiB instead of the default 4", swap_gib=gib)


RULES: tuple[Rule, ...] = (fp8_of_the_checkpoint, other_batched_tokens, speculation, latent_twice, no_groups,
                           other_state_dtype, other_swap)


def settings(case: Case, bases: list[Setting], rules: int) -> Iterator[Setting]:
    """The bases changed by exactly so many different rules, 0 to 2."""
    if rules == 0:
        yield from bases
        return
    for base in bases:
        for at, rule in enumerate(RULES):
            for once in rule(case, base):
                if rules == 1:
                    yield once
                    continue
                for other in RULES[at + 1:]:
                    yield from other(case, once)


def sharp(case: Case, setting: Setting) -> bool:
    """Whether the printed quantities could contradict a setting: without pool or blocks, only whole blocks tell."""
    if case.pool is not None or case.blocks is not None or case.cpu_blocks is not None:
        return True
    model = model_of(case.spec, setting)
    if setting.wording == "concurrency":
        return model.max_len / model.blocks_per_request() >= 200    # tokens from one block to the next
    return model.block_size >= 200


def beyond_memory(case: Case, found: Fit) -> Finding | None:
    """Blocks that take more than the named GPU's memory, or the share of it that is printed: no setting allows that."""
    share = case.util.value if case.util and 0 < case.util.value <= 1 else 1.0
    columns = [column for column in ("gpu_blocks", "kv_tokens", "max_concurrency") if column in found.spans]
    if not columns or case.gpu_gib is None or "cpu" in case.gpu.lower():
        return None
    most = int(share * case.gpu_gib * GiB // (model_of(case.spec, found.setting).block_bytes * found.setting.latents))
    needed = max(found.spans[column][0] for column in columns)
    if needed <= most:
        return None
    predicted = most if columns[0] == "gpu_blocks" else found.predicted.get(columns[0])
    return Finding("unexplained", columns[0], _logged(case, columns[0]), predicted,
                   f"{needed:,} blocks are more than the {most:,} that {share:g} of {case.gpu_gib:g} GiB could hold")


def unequal_ranks(case: Case, found: Fit) -> Finding | None:
    """The GiB is one rank's, the blocks are the fewest of all ranks: fewer than the pool holds, down to 75 %."""
    ranks = found.setting.tp * found.setting.pp             # of one engine: replicas share nothing
    if ranks < 2 or "kv_cache_gib" not in found.spans or not set(found.failing) <= {"gpu_blocks", "kv_tokens",
                                                                                        "max_concurrency"}:
        return None
    spans = {column: span for column, span in found.spans.items() if column != "kv_cache_gib"}
    low, high = max(span[0] for span in spans.values()), min(span[1] for span in spans.values())
    holds = found.spans["kv_cache_gib"][0]
    if not spans or low > high or not LEAST_OF_RANKS * holds <= high < holds:
        return None
    what = next(column for column in ("gpu_blocks", "kv_tokens", "max_concurrency") if column in found.failing)
    need = low * model_of(case.spec, found.setting).block_bytes * found.setting.latents / GiB
    logged = _logged(case, what)
    return Finding("explained", what, logged, found.predicted[what],
                   f"least of {ranks} ranks: {logged:,} need {need:.2f} GiB per rank; the {case.pool.value:g} GiB "
                   "printed are another rank's, and all take the blocks of the fullest")


def rounded_figures(case: Case, found: Fit) -> Finding | None:
    """Figures told in round thousands (no line prints them): within half of their last digit that is not zero."""
    if found.failing != ("kv_tokens",) or case.tokens.half or case.tokens.value % 1000 or (
            case.pool is None or case.pool.half < 0.04):
        return None
    model, least, most = model_of(case.spec, found.setting), *found.spans["kv_cache_gib"]
    low, high = (model.tokens(blocks, found.setting.wording) for blocks in (least, most))
    if low - 500 <= case.tokens.value <= high + 500:
        return Finding("explained", "kv_tokens", _logged(case, "kv_tokens"), found.predicted["kv_tokens"],
                       f"figures told in round numbers: {case.pool.low:g} to {case.pool.high:g} GiB hold {low:,} to "
                       f"{high:,} tokens")
    if case.windows and found.setting.wording == "concurrency":
        ends = []
        for tokens in (2048, 8192):
            other = model_of(case.spec, replace(found.setting, batched=tokens, in_flight_batches=1))
            ends += [other.tokens(other.blocks(gib * GiB)) for gib in (case.pool.low, case.pool.high)]
        if min(ends) <= case.tokens.value <= max(ends):
            return Finding("explained", "kv_tokens", _logged(case, "kv_tokens"), found.predicted["kv_tokens"],
                           "figures told in round numbers, and max_num_batched_tokens not printed: 2,048 to 8,192 of "
                           f"them give {max(ends):,} to {min(ends):,} tokens")
    return None


def _logged(case: Case, column: str) -> float | int:
    if column == "gpu_blocks":
        return case.blocks
    value = (case.tokens if column == "kv_tokens" else case.concurrency).value
    return int(value) if column == "kv_tokens" else value
