"""The scores of one task's recall models as frames over ratios, and the words that every finding about them uses."""
from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from kvlab.accuracy.statistics import Estimate, equivalence
from kvlab.record.recall import TASK, TWO_TOKEN, main_cells, recall_rows, tokens_per_pair, trained_length

# named before any run: what would matter
MARGIN = 0.01                   # recall: one question in a hundred; NLL (nat): 1 % of the right answer's probability
KNEE_MARGIN = {"recall": 0.02, "nll": 0.1}      # per doubling of the ratio, beyond what each doubling cost before
LIMIT, SAFE, LONG = 16, 8, 8192                 # the article's: ratio not above 16, 8 safer beyond 8K tokens
CEILING = 0.99


@dataclass(frozen=True)
class Grid:
    """Rows of one task with one cache format, every cell trained alike."""
    rows: pd.DataFrame
    task: str = TASK

    @property
    def dims(self) -> list[int]:
        return sorted(int(d) for d in self.rows["head_dim"].unique())

    @property
    def lengths(self) -> list[int]:
        return sorted(int(n) for n in self.rows["pairs"].unique())

    @property
    def case(self) -> dict:
        return json.loads(self.rows["case"].iloc[0])

    @property
    def trained(self) -> int:
        """The longest N that was both trained and evaluated."""
        return trained_length(self.rows) // tokens_per_pair(self.case)

    @property
    def chance(self) -> float:
        return 1 / self.case["num_values"]

    def name(self, what: str, head_dim: int) -> str:
        return f"{what}{'' if self.task == TASK else ':two_token'}:head_dim{head_dim}"

    def label(self, head_dim: int) -> str:
        return f"head_dim {head_dim}" + ("" if self.task == TASK else ", two-token task")

    def scores(self, head_dim: int, n: int, metric: str = "recall") -> pd.DataFrame:
        """A frame [seeds, ratios] of one head_dim at N = n; seeds that failed anywhere are left out."""
        return self._scores.get((metric, head_dim, n), pd.DataFrame())

    @cached_property
    def _scores(self) -> dict[tuple, pd.DataFrame]:
        of = ["metric", "head_dim", "pairs"]
        mean = self.rows.groupby([*of, "seed", "group_ratio"])["value"].mean().unstack("group_ratio").astype(float)
        return {key: cells.droplevel(of).dropna(axis=1, how="all").dropna() for key, cells in mean.groupby(level=of)}

    def unlearned(self, recall: pd.DataFrame) -> str:
        """Why models that hardly beat a guess show neither a loss nor that there is none; "" where they can."""
        best = float(recall.mean().max())
        return "" if best >= 10 * self.chance or best >= 0.5 else (
            f"the best of these models recalls {best:.3f}, near the chance of {self.chance:.3f}: they were trained too "
            "shortly to show anything")

    def edges(self, recall: pd.DataFrame) -> str:
        """A sentence on where recall can hardly move: at its ceiling, and near a guess."""
        mean = recall.mean()
        top, bottom = (listed(mean.index[at]) for at in (mean >= CEILING, mean <= 3 * self.chance))
        if len(mean) and (mean >= CEILING).all():
            return " Recall alone cannot tell: all are at this task's ceiling, and a harder one may differ."
        said = [*([f"at its ceiling at ratio {top}"] if top else []),
                *([f"near a guess ({self.chance:.3f}) at ratio {bottom}"] if bottom else [])]
        return f" Recall is {' and '.join(said)}, where it can hardly move." if said else ""


def grids(table: pd.DataFrame) -> list[Grid]:
    """The grids of both tasks with an exact cache, those without a row left out."""
    every = [Grid(main_cells(recall_rows(table, task)), task) for task in (TASK, TWO_TOKEN)]
    return [grid for grid in every if len(grid.rows)]


def ends(estimate: Estimate) -> list[float | None]:
    """low and high of a Finding: None where one value tells no spread."""
    return [None if math.isnan(x) else float(x) for x in (estimate.low, estimate.high)]


def shown(estimate: Estimate, sign: bool = False) -> str:
    form = "{:+.3f}" if sign else "{:.3f}"
    between = "no interval" if math.isnan(estimate.low) else f"{form}, {form}".format(estimate.low, estimate.high)
    return f"{form.format(estimate.value)} [{between}]"


def loss(estimate: Estimate, unit: str = "") -> str:
    """What a 90 % interval of a loss allows to be said, against MARGIN."""
    return {"below": f"no loss of {MARGIN:g}{unit} or more", "inconclusive": "inconclusive",
            "above": "a loss" if estimate.value > 0 else "a gain"}[equivalence(estimate, MARGIN)]


def listed(ratios) -> str:
    return ", ".join(str(int(r)) for r in ratios)
