"""Step times of a GPU that kvlab has not measured: the data sheet times shares that a real engine reached.

`rates(gpu)` gives the named constants of data/engine_rates.csv, each with the run it was derived from; `Parts` is the
step time that uses them. They are of one engine (vLLM), one sort of GPU each, and say so.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path

from kvlab.catalog import number, rows
from kvlab.catalog.gpus import GPUSpec
from kvlab.registry import no_such
from kvlab.serving import _links
from kvlab.serving.step_time import Batch, Work

SHEET = "sheet"


@dataclass(frozen=True, slots=True)
class Rates:
    """How much of a data sheet an engine's kernels reach, and what a step costs besides.

    weights_share: of the memory's bandwidth while weights are read; kv_share: while K and V are. flops_share: of the
    dense rate in matrix products; attention_share: in prefill's attention; experts_share: in the products of a
    mixture's experts, each with the few tokens that chose it. step_s: per step, for launch and sampling;
    sequence_s: per sequence in it. reduce_s, reduce_rate: latency (s) and rate (B/s) of an all-reduce between ranks;
    nccl_s, nccl_rate: of NCCL's collectives, which replicas of a mixture exchange tokens by.
    fitted_on: models of the runs on this GPU that they were derived from. source: which runs, how; brief: in a line.
    """
    weights_share: float
    kv_share: float
    flops_share: float
    attention_share: float
    experts_share: float
    step_s: float
    sequence_s: float
    reduce_s: float
    reduce_rate: float
    nccl_s: float
    nccl_rate: float
    fitted_on: tuple[str, ...]
    source: str
    brief: str


AT_SHEET = Rates(1, 1, 1, 1, 1, 0, 0, 0, float("inf"), 0, float("inf"), (),
                 "the data sheet's bandwidth and dense rate alone", "data sheet alone, no constants")


# Column of data/engine_rates.csv -> field, and its unit in SI.
_COLUMNS = {**{name: (name, 1.0) for name in ("weights_share", "kv_share", "flops_share", "attention_share",
                                             "experts_share")},
            "step_us": ("step_s", 1e-6), "sequence_us": ("sequence_s", 1e-6), "reduce_us": ("reduce_s", 1e-6),
            "reduce_gb_s": ("reduce_rate", 1e9), "nccl_us": ("nccl_s", 1e-6), "nccl_gb_s": ("nccl_rate", 1e9)}


@cache
def _table() -> dict[str, dict[str, float | None]]:
    """GPU -> constant -> value, None where its runs do not tell it."""
    return {row["gpu"]: {name: number(row[column], scale) for column, (name, scale) in _COLUMNS.items()}
            for row in rows("engine_rates.csv")}


def rates(gpu: str) -> Rates:
    """The constants of that GPU; each that no run on it tells is the geometric mean over the GPUs whose runs do.

    gpu: a name of the catalogue, or "sheet" for the data sheet alone.
    """
    if gpu == SHEET:
        return AT_SHEET
    own = _table().get(gpu, {})
    values: dict[str, float] = {}
    lent = []
    for name, _ in _COLUMNS.values():
        if (mine := own.get(name)) is not None:
            values[name] = mine
        else:
            known = [value for other in _table().values() if (value := other[name]) is not None]
            values[name] = prod(known) ** (1 / len(known))
            lent.append(name)
    row = next((row for row in rows("engine_rates.csv") if row["gpu"] == gpu), None)
    others = ", ".join(name for name in _table() if name != gpu)
    said = [row["source"]] if row else []
    if lent:
        said.append(f"{', '.join(lent) if row else 'every constant'} from {others}: no run on {gpu} tells "
                    f"{'them' if len(lent) > 1 else 'it'}")
    fitted_on = tuple(row["fitted_on"].split(";")) if row else ()
    brief = f"data sheet and constants of runs of it with {', '.join(fitted_on)}" if row else (
        f"data sheet and constants of {others}, for want of a run on it")
    return replace(AT_SHEET, **values, fitted_on=fitted_on, source="; ".join(said), brief=brief)


def chosen_rates(gpu: str, constants: str | None = None, *, nccl_only: bool = False, ranks: int = 1) -> Rates:
    """A GPU's own constants, or those that are asked for by name: of another GPU, or "sheet". KeyError: neither.

    nccl_only: tensor-parallel ranks reduce by NCCL alone, as with vLLM's disable_custom_all_reduce. ranks: that many
    exchange; no run on the GPU telling what that costs, NVLink's constants (kvlab/serving/_links.py) stand for those
    of the runs, which were over PCIe. Of constants of another GPU none counts as fitted on runs of this one.
    """
    if constants is not None and constants not in known_rates():
        raise no_such("set of constants", constants, known_rates())
    of = rates(constants or gpu)
    if ranks > 1 and constants is None and not _tells_reduce(gpu):
        of = _over_link(of, gpu, ranks)
    if nccl_only:
        of = replace(of, reduce_s=of.nccl_s, reduce_rate=of.nccl_rate)
    return of if constants in (None, gpu) else replace(of, fitted_on=(), brief=of.brief if constants == SHEET else
                                                       f"data sheet and constants of {constants}, as asked")


def _tells_reduce(gpu: str) -> bool:
    return _table().get(gpu, {}).get("reduce_s") is not None


def _over_link(of: Rates, gpu: str, ranks: int) -> Rates:
    """The constants with collectives over the link that joins so many ranks, and with that said."""
    link = _links.nvlink(gpu, ranks)
    if link is None:
        runs = ", ".join(name for name in _table() if _tells_reduce(name))
        said = f"all-reduce over PCIe as between two {runs}, assumed, not fitted"
        return replace(of, source=f"{of.source}; {said}", brief=f"{of.brief}; {said}")
    said = "all-reduce over NVLink, assumed, not fitted"
    source = (f"{of.source}; but {said}: {1e6 * _links.REDUCE_S:g} µs and {100 * _links.REDUCE_SHARE:g} % of the data "
              f"sheet's {link.bandwidth / 1e9:g} GB/s a direction, by {_links.SOURCE}")
    return replace(of, reduce_s=_links.REDUCE_S, reduce_rate=_links.REDUCE_SHARE * link.bandwidth,
                   nccl_s=_links.NCCL_S, nccl_rate=_links.NCCL_SHARE * link.bandwidth, source=source,
                   brief=f"{of.brief}; {said}")


def known_rates() -> list[str]:
    """GPUs that have constants of their own, and the data sheet alone."""
    return [*_table(), SHEET]


@dataclass(frozen=True, slots=True)
class Parts:
    """A step as its kernels one after another: weights, experts, cache, prefill's attention, collectives, overhead.

    Weights take the longer of reading them and multiplying by them. The cache is read on top: a step that prefills
    cannot hide it behind its products, which one roofline of the whole step would claim. Experts are read and then
    multiplied with few tokens each, in padded tiles, so that both times add up.
    bandwidth (B/s) and peak (flop/s): the data sheet's. scale: one factor on all of it, 1 = not fitted.
    Source: Williams, Waterman, Patterson, Roofline (CACM 2009), kernel by kernel; ring all-reduce, 2(p-1)/p of the
    bytes each way, for collectives.
    """
    work: Work
    bandwidth: float
    peak: float
    rates: Rates
    device: str
    source: str
    scale: float = 1.0
    kind: str = "modelled"

    def __post_init__(self):
        if not (self.bandwidth > 0 and self.peak > 0 and self.scale > 0):
            raise ValueError("bandwidth, peak and scale must be above 0")

    def __call__(self, batch: Batch) -> float:
        return sum(self.parts(batch).values())

    def parts(self, batch: Batch) -> dict[str, float]:
        """Seconds of each part."""
        work, rates = self.work, self.rates
        reading, flops = self.bandwidth * rates.weights_share, self.peak * rates.flops_share
        found = dict(
            weights=max(work.weight_bytes / reading, work.dense_flops(batch) / flops),
            experts=(work.read_expert_bytes(batch) / reading
                     + work.expert_flops(batch) / (self.peak * rates.experts_share)),
            cache=work.kv_bytes(batch) / (self.bandwidth * rates.kv_share),
            prefill_attention=work.flops_per_pair * batch.prefill_pairs / (self.peak * rates.attention_share),
            collectives=self._collectives(batch),
            overhead=rates.step_s + rates.sequence_s * batch.sequences)
        return {name: self.scale * seconds for name, seconds in found.items()}

    def _collectives(self, batch: Batch) -> float:
        work, rates = self.work, self.rates
        seconds = 0.0
        if work.reductions:
            sent = 2 * (work.tp - 1) / work.tp * work.reduced_bytes_per_token * batch.tokens
            seconds += work.reductions * (rates.reduce_s + sent / rates.reduce_rate)
        if work.exchanges:
            tokens = batch.tokens + batch.peer_tokens
            sent = (work.dp - 1) / work.dp * work.exchanged_bytes_per_token * tokens
            seconds += work.exchanges * (rates.nccl_s + sent / rates.nccl_rate)
        return seconds

    def scaled(self, scale: float, source: str) -> Parts:
        """The same model times a factor that was fitted; source says on what."""
        return replace(self, scale=self.scale * scale, source=f"{self.source}; {source}")


def parts(gpu: GPUSpec, work: Work, of: Rates | None = None, dtype: str = "bf16") -> Parts:
    """The step time of a GPU by its data sheet and by constants: its own, or those given.

    ValueError where the sheet's bandwidth or dense rate is not in the catalogue.
    """
    of = of or rates(gpu.name)
    peak = gpu.flops.get(dtype) or gpu.flops.get("bf16") or gpu.flops.get("fp16")
    if not gpu.bandwidth or not peak:
        missing = " and ".join(what for what, has in (("bandwidth", gpu.bandwidth), ("dense rate", peak)) if not has)
        raise ValueError(f"the {missing} of {gpu.name} is not in the catalogue, so that no step time can be modelled")
    return Parts(work, gpu.bandwidth, peak, of, gpu.name, f"{gpu.name}'s data sheet; {of.source}")


def rates_of_kernels(results: Path | str, variant: str | None = None) -> tuple[Rates, str, float, float, int]:
    """What a kvlab run measured on its own machine: constants, machine, read rate (B/s), product rate (flop/s), bytes
    of an element.

    From the medians of read_ceiling and matmul_ceiling, and of effective_bandwidth in decode of one variant (default:
    the fastest). Launch, sampling and scheduling were not measured and are left out: 0. Such constants are of that
    machine alone. results: readings.parquet of a run that measured one machine, such as study memory_wall's.
    ValueError: a file without those rows, of several machines or dtypes, an unknown variant.
    """
    from kvlab.record.tables import read_table
    path = Path(results)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file; give readings.parquet of a run, such as `kvlab run memory_wall`'s")
    table = read_table(path)
    table = table[(table["status"] == "ok") & table["value"].notna()]
    ceilings = {name: table[table["metric"] == name] for name in ("read_ceiling", "matmul_ceiling")}
    decode = table[(table["metric"] == "effective_bandwidth") & (table["phase"] == "decode")
                   & (table["kv_format"] == table["dtype"])]
    if decode.empty or any(rows.empty for rows in ceilings.values()):
        raise ValueError(f"{path} has not all of read_ceiling, matmul_ceiling and effective_bandwidth in decode; those "
                         "come from `kvlab study memory_wall`")
    machines = sorted(set(decode["hardware"]))
    dtypes, threads = sorted(set(decode["dtype"])), sorted({int(count) for count in decode["threads"]})
    if len(machines) != 1 or len(dtypes) != 1 or dtypes[0] not in ("fp32", "bf16", "fp16") or len(threads) != 1:
        counts = ", ".join(map(str, threads))
        raise ValueError(f"{path} is of {', '.join(machines)} in {', '.join(dtypes)} with {counts} threads; one "
                         "machine, dtype and number of threads is needed")
    by = decode.groupby("variant")["value"].median()
    if variant is not None and variant not in by.index:
        raise no_such("variant measured there", variant, list(by.index))
    name = variant or by.idxmax()
    read, product = (float(rows["value"].median()) for rows in ceilings.values())
    source = (f"measured on {machines[0]}, {dtypes[0]}, {threads[0]} thread{'s' * (threads[0] != 1)}: medians of "
              f"read_ceiling {read / 1e9:.3g} GB/s, matmul_ceiling {product / 1e9:.3g} Gflop/s and decode attention of "
              f"{name} {by[name] / 1e9:.3g} GB/s; composed by kvlab, launch and scheduling left out")
    return (Rates(1, float(by[name]) / read, 1, 1, 1, 0, 0, 0, float("inf"), 0, float("inf"), (), source,
                  f"kernels measured on it, {dtypes[0]}; launch and scheduling left out"), machines[0], read, product,
            4 if dtypes[0] == "fp32" else 2)
