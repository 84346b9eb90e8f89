"""From a start-up log to a plan: the pool that it prints, and the settings that it was started with.

Only vLLM's pools are planned: the blocks of other engines are not those of `kvlab plan`.
"""
from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from kvlab.kv.sizing import BLOCK_SIZE
from kvlab.serving._budget import UTIL
from kvlab.serving._log_case import kv_format, read
from kvlab.serving._log_cells import number
from kvlab.serving._settings import Settings
from kvlab.shapes import ModelSpec


@dataclass(frozen=True, slots=True)
class LoggedPool:
    """What a plan takes of a log. settings: with its blocks or pool; why_not: "" where there is a plan."""
    spec: ModelSpec | None
    settings: Settings | None
    why_not: str = ""

    def command(self, gpu: str = "GPU") -> str:
        """The plan with this pool as a command; GPU stands for what no log names."""
        s, tp = self.settings, self.settings.tp if self.settings.tp > 1 else None
        values = dict(gpu=gpu, gpus=tp, tp=tp, blocks=s.blocks, pool_gib=s.pool_gib,
                      util=s.util, block_size=s.block_size, max_len=s.max_len, kv_format=s.kv_format,
                      weights_gib=s.weights_gib)
        usual = Settings()
        flags = [f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in values.items()
                 if value is not None and value != getattr(usual, name, None)]
        return " ".join(["kvlab plan", shlex.quote(self.spec.name), *flags])


def logged_pool(row: Mapping, spec: ModelSpec | None = None) -> LoggedPool:
    """The pool of a row as `startup_log.from_log` reads it; blocks where they are printed, else GiB of one GPU.

    spec: the model where the log does not name one that is catalogued. weights_gib: of all ranks, as logged × tp.
    """
    case = read(row)
    spec = spec or case.spec
    if spec is None:
        return LoggedPool(None, None, "the log names no catalogued model: give it behind the log, as MODEL")
    if case.engine.name != "vllm":
        return LoggedPool(spec, None, "`kvlab plan` models the blocks of vLLM, and this log is another engine's")
    format_name, tp = kv_format(case), case.tp or 1
    if format_name is None:
        return LoggedPool(spec, None, f"the KV format {case.kv_dtype!r:.60} is not known here")
    if case.blocks is None and (case.pool is None or case.pool.value <= 0):
        return LoggedPool(spec, None, "the log names neither blocks nor a pool to plan with")
    weights, util = number(row, "weights_gib"), case.util and case.util.value
    try:
        return LoggedPool(spec, Settings(
            tp=tp, util=util or UTIL, block_size=int(case.block_size.value) if case.block_size else BLOCK_SIZE,
            max_len=case.max_len, kv_format=format_name, blocks=case.blocks,
            pool_gib=case.pool.value if case.blocks is None else None,
            weights_gib=weights.value * tp if weights else None))
    except ValueError as error:
        return LoggedPool(spec, None, f"the log's settings cannot be: {error}")
