"""Flash attention in Triton: kvlab's own kernel for prompts on a GPU, small enough to read and to change."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvlab.attention._native import capability, triton_why_not
from kvlab.attention._oracle import least_cost
from kvlab.attention._stored import checked_table, stored_sides
from kvlab.attention._variant import Cost
from kvlab.kernels.triton_tuning import Config, pick, power, told
from kvlab.libraries import library

TILE_BYTES = 20                         # what a tile is told of its place


@dataclass(frozen=True)
class TritonFlash:
    """Tiled attention with an online softmax; a tile's rows are query tokens times the query heads of one KV head.

    Reads contiguous caches, and paged ones through their block table, in head or token order. tune: configurations are
    measured while planning, and the fastest is kept; without it the default one runs. Source: arXiv 2307.08691.
    """
    tune: bool = True
    name: ClassVar[str] = "triton_flash"

    def why_not(self, trial):
        s = trial.workload.shape
        if why := triton_why_not(self.name, capability(trial.device), library, "flash or sdpa"):
            return why
        if trial.format_path != "native":
            return (f"triton_flash reads K and V in the trial's own dtype only, and {trial.kv_format} would have to be "
                    f"decoded first; use flash or sdpa, or kv_format {trial.dtype}")
        from kvlab.kernels.triton_flash import WIDEST
        if max(s.head_dim, s.v_dim) > WIDEST:
            return (f"triton_flash takes heads of up to {WIDEST} channels, got head_dim={s.head_dim} with v_head_dim="
                    f"{s.v_dim}; use sdpa, or for decoding triton_paged")
        return None

    def prepare(self, trial, inputs):
        import torch

        from kvlab.kernels import triton_flash as kernel
        w, s = trial.workload, trial.workload.shape
        (k, v), block_table = stored_sides(inputs.cache), checked_table(inputs)

        def launch(config: Config):
            q_TQD = inputs.q_TQD
            out_TQE = torch.empty(*q_TQD.shape[:2], s.v_dim, dtype=q_TQD.dtype, device=q_TQD.device)
            kernel.flash_prefill(q_TQD, k, v, block_table, w.q_lens, w.kv_lens, window=s.window,
                                 softcap=s.softcap, out_TQE=out_TQE, config=config)
            return out_TQE

        choice = candidates(trial.dtype, max(s.head_dim, s.v_dim), capability(trial.device) or (8, 0),
                            paged=block_table.shape[1] > 1)
        with torch.cuda.device_of(inputs.q_TQD):
            config = pick(self._key(trial), choice, launch, self.tune)
        kernel.tiles(w.q_lens, w.kv_lens, s.group_ratio, config.rows, inputs.q_TQD.device)      # not in the first call
        return lambda: launch(config)

    def ran(self, trial) -> str:
        return told(self._key(trial))

    def _key(self, trial):
        w, block = trial.workload, trial.layout.block_size
        paged = block is not None and max(w.kv_lens) > block        # other candidates
        return (self, trial.device, trial.dtype, w.shape, trial.layout, w.batch_size, power(w.q_lens), power(w.kv_lens),
                paged)

    def cost(self, trial, cache_bytes=0) -> Cost:
        """K and V are read once per tile of rows, head by head; of the masked cells those in a tile are computed."""
        w, s = trial.workload, trial.workload.shape
        rows = max(config.rows for config in candidates(trial.dtype, max(s.head_dim, s.v_dim), (9, 0)))
        blocks = sum(-(-n // (trial.layout.block_size or n)) for n in w.kv_lens)
        cost, flops, count = least_cost(trial, cache_bytes), 0, 0
        for b, (q_len, kv_len) in enumerate(zip(w.q_lens, w.kv_lens)):
            per_token = (s.head_dim + (0 if s.v_in_k else s.v_dim)) * trial.itemsize            # of one head
            seen = 0
            for start in range(0, q_len * s.group_ratio, rows):
                stop = min(start + rows, q_len * s.group_ratio)
                first = kv_len - q_len + start // s.group_ratio + 1             # tokens up to the first row's own
                last = kv_len - q_len + (stop - 1) // s.group_ratio + 1
                tokens = last - (0 if s.window is None else max(0, first - s.window))
                seen += tokens
                flops += 2 * s.num_kv_heads * (s.head_dim + s.v_dim) * (stop - start) * tokens
                count += 1
            visible = kv_len - w.first_visible(b)
            if visible * per_token > cache_bytes:
                cost = cost.plus(read=(seen - visible) * per_token * s.num_kv_heads)
        return cost.plus(read=4 * blocks + TILE_BYTES * count)._replace(executed_flops=flops)


def candidates(dtype: str, width: int, capability: tuple[int, int], paged: bool = False) -> tuple[Config, ...]:
    """Configurations for heads of that width on that GPU, the default first.

    Found by compiling: the default spills no registers and fits the shared memory of every GPU of its generation (99
    KiB in 8.6, 8.9 and 12.0; 227 KiB in 9.0 and 10.0). Behind a block table, every other stage only fetches its ids.
    """
    found = _contiguous(dtype, width, capability)
    return tuple(config._replace(stages=2 * config.stages - 1) for config in found) if paged else found


def _contiguous(dtype: str, width: int, capability: tuple[int, int]) -> tuple[Config, ...]:
    if dtype == "fp32":                                         # no matrix units: sums of products in registers
        return (Config(32, 32, 8, 1),)
    if 9 <= capability[0] < 12:                                 # WGMMA, tcgen05
        if width <= 64:
            return Config(128, 128, 8, 3), Config(128, 64, 8, 3), Config(64, 64, 4, 3)
        if width <= 128:
            return Config(128, 64, 8, 3), Config(128, 128, 8, 2), Config(64, 64, 4, 2)
        return (Config(128, 64, 8, 2),) if width <= 192 else (Config(128, 32, 8, 2), Config(64, 64, 8, 2))
    if width <= 64:
        return Config(128, 64, 8, 3), Config(128, 128, 8, 3)
    if width <= 128:
        return Config(128, 32, 8, 3), Config(64, 64, 8, 3)
    return (Config(64, 32, 8, 2),)
