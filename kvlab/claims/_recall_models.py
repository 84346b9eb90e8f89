"""What the recall models of group_ratio lose between two group ratios, as evidence. Read from rows; no torch."""
from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from kvlab.claims._base import Evidence
from kvlab.claims._results import Results
from kvlab.lang import Text

if TYPE_CHECKING:
    from kvlab.record.statistics import Estimate
    from kvlab.studies._group_ratio_grid import Grid

STUDY = "group_ratio"
MARGIN = 0.01                   # nat: 1 % of the right answer's probability; the study's own, named before any run
NARROW, WIDE = 4, 64            # head_dim: few channels per KV head; as many as small models that are served have
TEXT = Text("NLL at group ratio {many} minus at {few}, head_dim {head_dim}, {n} tokens",
            "group_ratio 从 {few} 升到 {many} 时 NLL 的增量，head_dim {head_dim}，{n} 个 token")


@lru_cache(maxsize=4)
def grid(results: Results, longer: bool = False) -> Grid | None:
    """The pair task's models with an exact cache; longer: those of several times the steps; None: no rows."""
    from kvlab.record.recall import LONGER, TASK, main_cells, recall_rows
    from kvlab.studies._group_ratio_grid import Grid
    table = results.rows(STUDY)
    rows = None if table is None else main_cells(recall_rows(table, TASK + LONGER if longer else TASK))
    return None if rows is None or rows.empty else Grid(rows)


def nll_rise(results: Results, name: str, head_dim: int, few: int, many: int, n: int = 0, *,
             longer: bool = False) -> Evidence:
    """By how much NLL is higher at ratio `many` than at `few`, paired by seed, with its 90 % interval (nat).

    n: tokens in the context; 0 = the longest that was trained. longer: of the models trained for longer.
    """
    from kvlab.accuracy.seeds import difference
    from kvlab.record.recall import TIMES_LONGER
    found = grid(results, longer)
    n = n or (found.trained if found else 64)
    about = Text(*(text.format(few=few, many=many, head_dim=head_dim, n=n) for text in (TEXT.en, TEXT.zh)))
    if longer:
        about = Text(f"{about.en}, trained {TIMES_LONGER} × as long", f"{about.zh}，训练步数 {TIMES_LONGER} 倍")
    scores = found.scores(head_dim, n, "nll") if found else None
    if scores is None or not {few, many} <= set(scores.columns) or len(scores) < 2:
        return results.lacking(STUDY, name, about)
    return over_seeds(results, name, about, difference(scores[many], scores[few]))


def over_seeds(results: Results, name: str, about: Text, mean: Estimate, unit: str = "nat") -> Evidence:
    """A mean over seeds of the study's models as evidence."""
    return Evidence(name, about, mean.value, unit, "measured", mean.low, mean.high, mean.n, results.source(STUDY))


def shown(one: Evidence) -> str:
    """A difference in nat with its interval, the same in both languages."""
    return f"{one.value:+.4f} nat" + ("" if one.low is None else f" [{one.low:+.4f}, {one.high:+.4f}]")
