"""What fills a GPU's memory while a model is served: weights, KV cache and a reserve against the memory of chosen GPUs.

Bears on the article's claim that sixteen requests of 4096 tokens and the weights of Qwen2-72B overfill a machine of
eight A100 80GB. Exact arithmetic on the catalogue's layer kinds; the GPUs' memory is quoted from data sheets.
"""
from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kvlab.catalog.gpus import GPUSpec, gpu
from kvlab.catalog.models import model
from kvlab.figures._rows import with_rows
from kvlab.figures._style import GREY, PALETTE, Style, above, sized, ticks_at
from kvlab.kv.sizing import Size, size, weight_bytes
from kvlab.shapes import ModelSpec
from kvlab.units import GiB, display

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

STUDY = None
# part of the memory -> colour, hatch, name; in the order in which they are stacked
PARTS = {"reserve_bytes": (GREY, "....", "reserve"), "weight_bytes_per_rank": (PALETTE[0], "////", "weights"),
         "state_bytes_per_rank": (PALETTE[2], "xxxx", "constant state"),
         "kv_bytes_per_rank": (PALETTE[1], "\\\\\\\\", "KV cache")}
RULE: dict[str, Any] = dict(ls="none", ms=4.5, marker="^", mfc="white", mec="black")


@dataclass(frozen=True)
class KVBudget:
    """A model serving `batch_size` sequences of `kv_len` tokens on `tp` tensor-parallel GPUs of each kind in `gpus`.

    weight_bits: bits of every parameter, 16 or 8. reserve: share of a GPU's memory that is kept for activations,
    workspaces and the driver. Weights and constant state are taken to split evenly over the GPUs; the KV cache splits
    by heads, which are copied once there are fewer than GPUs; what paging adds is not counted. Refused (ValueError): a
    tp that does not fit the heads, a GPU whose memory is unknown, a reserve outside 0 … 0.9.
    Source: kvlab.kv.sizing; data/gpus.csv for the memory.
    """
    figure: ClassVar[str] = "kv_budget"
    model: str = "Qwen/Qwen2-72B-Instruct"
    kv_len: int = 4096
    batch_size: int = 16
    kv_format: str = "bf16"
    tp: int = 8
    weight_bits: int = 16
    reserve: float = 0.1
    gpus: tuple[str, ...] = ("A100 SXM4 80GB", "H100 SXM5 80GB", "H200 SXM 141GB")

    def __post_init__(self):
        object.__setattr__(self, "gpus", tuple(dict.fromkeys(gpu(name).name for name in self.gpus)))
        if not self.gpus:
            raise ValueError("no GPU is chosen; choose at least one of: kvlab ls gpus")
        if self.weight_bits not in (8, 16):
            raise ValueError(f"weight_bits={self.weight_bits!r}; allowed: 8, 16")
        if not 0 <= self.reserve <= 0.9:
            raise ValueError(f"reserve={self.reserve!r} must be a share of the memory between 0 and 0.9")
        unknown = [spec.name for spec in map(gpu, self.gpus) if spec.memory_bytes is None]
        if unknown:
            raise ValueError(f"the catalogue does not know the memory of {', '.join(unknown)}; choose other GPUs")

    @cached_property
    def spec(self) -> ModelSpec:
        return model(self.model)

    @cached_property
    def size(self) -> Size:
        return size(self.spec, self.kv_len, self.batch_size, self.kv_format, self.tp)

    @cached_property
    def weights(self) -> int | None:
        """Bytes of weights on one GPU, rounded up; None where the catalogue has no parameter count."""
        total = weight_bytes(self.spec, self.weight_bits // 8)
        return None if total is None else -(-total // self.tp)

    @property
    def state(self) -> int:
        """Bytes of constant recurrent state on one GPU, rounded up."""
        return -(-self.size.state_bytes // self.tp)

    def fits(self, one: GPUSpec) -> int | None:
        """Sequences of kv_len tokens that the memory left beside weights and reserve holds; None = weights unknown."""
        if self.weights is None:
            return None
        left = (one.memory_bytes or 0) - self._reserved(one) - self.weights
        return max(0, left * self.batch_size // (self.size.kv_bytes_per_rank + self.state))

    def rows(self) -> Iterator[dict]:
        """Readings of the cache and the weights, then of every GPU."""
        s, known = self.size, self.weights is not None
        about = dict(model=s.model, batch_size=s.batch_size, kv_len=s.kv_len, kv_format=s.kv_format, case=json.dumps(
            asdict(self)), unit="B", kind="modelled", source="kv.sizing", hardware="none")
        beyond = "" if not self.spec.context or s.kv_len <= self.spec.context else (
            f"beyond the model's own context of {self.spec.context:,} tokens; ")
        yield dict(about, metric="kv_bytes", value=s.kv_bytes, method=s.method, note=beyond + s.note)
        yield dict(about, metric="kv_bytes_per_rank", value=s.kv_bytes_per_rank, method=s.method, note="on one GPU")
        yield dict(about, metric="article_formula_bytes", value=s.article_formula_bytes,
                   method="formula:2 · layers · KV heads · head_dim · 2 · tokens · sequences")
        yield dict(about, metric="state_bytes_per_rank", value=self.state, note="taken to split evenly",
                   method="formula:count × LayerSpec.state_bytes ÷ tp")
        yield dict(about, metric="weight_bytes_per_rank", value=self.weights, note="taken to split evenly",
                   method=f"formula:parameters · {self.weight_bits // 8} bytes ÷ tp") | (
            {} if known else dict(kind="missing", note="the catalogue has no parameter count of this model"))
        for one in map(gpu, self.gpus):
            card = dict(about, hardware=one.name)
            yield dict(card, metric="memory_bytes", value=one.memory_bytes, kind="quoted", method="cite:data_sheet",
                       source=one.source)
            yield dict(card, metric="reserve_bytes", value=self._reserved(one), note="a choice",
                       method=f"formula:{self.reserve:g} × memory_bytes")
            yield dict(card, metric="sequences_that_fit", value=self.fits(one), unit="count",
                       method="formula:(memory − reserve − weights) ÷ (KV + state of one sequence)") | (
                {} if known else dict(kind="missing", note="the weights are unknown"))

    def _reserved(self, one: GPUSpec) -> int:
        return round(self.reserve * (one.memory_bytes or 0))


def select(table: pd.DataFrame, choice: KVBudget | None = None) -> pd.DataFrame:
    """The bytes of every part and GPU for a choice (default: the article's case); nothing is measured."""
    return with_rows(table, list((choice or KVBudget()).rows()))


def draw(rows: pd.DataFrame, style: Style) -> Figure:
    """One bar per GPU; what stands beside it is what is needed and how many such sequences its memory holds."""
    choice = KVBudget(**json.loads(rows["case"].iloc[0]))
    values = {name: dict(zip(some["metric"], some["value"])) for name, some in rows.groupby("hardware")}
    whole = values.pop("none")
    right = 1.5 * max(mine["memory_bytes"] for mine in values.values())     # what needs more runs out of the figure
    figure, (ax,) = style.figure(1 + 0.38 * len(choice.gpus))
    for y, name in enumerate(choice.gpus):
        mine = whole | values[name]
        needs = _bar(ax, y, mine)
        rule = needs - mine["kv_bytes_per_rank"] + _by_the_rule(mine)
        if rule < right:
            ax.plot([rule / GiB], [y + 0.34], **RULE)
        ax.plot([mine["memory_bytes"] / GiB] * 2, [y - 0.4, y + 0.4], color="black", lw=1)
        ax.plot([mine["memory_bytes"] / GiB], [y], ls="none", ms=4, **style.marker("quoted"))
        _verdict(ax, y, needs, mine, choice)
    ticks_at(ax.yaxis, range(len(choice.gpus)), choice.gpus)
    ax.set(xlim=(0, right / GiB), ylim=(len(choice.gpus) - 0.4, -0.6),
           xlabel=f"memory of {f'each of {choice.tp} GPUs' if choice.tp > 1 else 'one GPU'} (GiB)")
    ax.grid(axis="y", visible=False)
    ax.set_title(_title(choice), loc="left", fontsize=sized(8))
    above(figure, [*_legend(choice, whole), Line2D([], [], lw=1, ms=4, label="memory of a GPU by its data sheet",
                                                   **style.marker("quoted"))], columns=1)
    return figure


def _bar(ax, y, mine) -> float:
    """The parts one after the other; returns the bytes they need together. An unknown part is left out."""
    start = 0.0
    for part, (color, hatch, _) in PARTS.items():
        if mine[part] == mine[part]:
            ax.barh(y, mine[part] / GiB, left=start / GiB, height=0.5, fc="white", ec=color, hatch=hatch, lw=1)
            start += mine[part]
    return start


def _verdict(ax, y, needs, mine, choice) -> None:
    """Right of the bar, in red where the memory is too small."""
    fits, has = mine["sequences_that_fit"], mine["memory_bytes"]
    known = fits == fits
    bad = fits < choice.batch_size if known else needs > has
    held = (f"{f'{choice.tp} hold' if choice.tp > 1 else 'holds'} {'only ' if bad else ''}{fits:,.0f} "
            f"sequence{'' if fits == 1 else 's'}")
    ax.text(1.01, y, f"{'' if known else 'at least '}{display(needs, 'B')} of {display(has, 'B')}\n"
                     f"{held if known else 'the weights are unknown'}", transform=ax.get_yaxis_transform(), va="center",
            fontsize=sized(7), linespacing=1.3, color=PALETTE[3] if bad else "black")


def _by_the_rule(mine) -> float:
    """The article's formula on one GPU: split as the exact bytes are, for the formula knows no ranks."""
    return mine["article_formula_bytes"] * mine["kv_bytes_per_rank"] / max(mine["kv_bytes"], 1)


def _title(choice) -> str:
    beyond = choice.spec.context and choice.kv_len > choice.spec.context
    return (f"{choice.spec.name}: {choice.batch_size:,} × {choice.kv_len:,} tokens in {choice.size.kv_format}, "
            f"tensor parallel {choice.tp}" + (f"\nbeyond the model's own context of {choice.spec.context:,} tokens"
                                              if beyond else ""))


def _legend(choice, whole) -> Iterator[Line2D | Patch]:
    """One line per part with its exact bytes, and the article's formula."""
    for part, (color, hatch, name) in reversed(PARTS.items()):
        bytes_ = whole.get(part)
        if part == "reserve_bytes":
            said = f"reserve: {choice.reserve:.0%} of the memory"
        elif bytes_ is None or bytes_ != bytes_:
            said = f"{name}: unknown, left out"
        else:
            said = f"{name}: {bytes_:,.0f} B = {display(bytes_, 'B', 4)} a GPU"
            said += f", {choice.weight_bits} bit" if part == "weight_bytes_per_rank" else ""
        if bytes_ != 0:                                          # a model without constant state has no line for it
            yield Patch(fc="white", ec=color, hatch=hatch, label=said)
    rule, exact = whole["article_formula_bytes"], whole["kv_bytes"]
    yield Line2D([], [], **RULE, label=f"KV by the article's formula: {display(rule, 'B', 4)} in all, "
                                       f"{rule / max(exact, 1):.3g} × the exact {display(exact, 'B', 4)}")
