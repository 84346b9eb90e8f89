"""What a run of prefix_sharing says, in words."""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvlab.record.asked import asked
from kvlab.studies._run import Finding

if TYPE_CHECKING:
    import pandas as pd

QUOTED = (0.3, 0.5)             # the article, section 5: of the memory, in dialogues


def findings(table: pd.DataFrame) -> list[Finding]:
    """The formula, hit rates over pool sizes, memory and computing in an engine."""
    ok = table[(table["status"] == "ok") & (table["kind"] != "missing")]
    found = [*_formula(asked(ok, "sharers")), *_pools(asked(ok, "pool")), *_engine(asked(ok, "engine"))]
    return found or [Finding("none", "no finding: the run holds no reading of this study", None, "ratio", None, None,
                             "missing")]


def _formula(rows) -> Iterator[Finding]:
    if rows.empty:
        return
    counted, said = (rows[rows["kind"] == kind].set_index("case_id")["value"] for kind in ("simulated", "modelled"))
    off = (counted - said).abs().max()
    exact = "to the block" if off < 1e-9 else f"within {off:.3f}"
    yield Finding("formula", "R live requests with a share f of their prompt in common hold f(R − 1)/R less memory: "
                  f"counted {exact} in {len(counted)} cases; one alone saves nothing, and no number of sharers saves "
                  "more than f.", float(off), "ratio", None, None, "simulated")


def _pools(rows) -> Iterator[Finding]:
    for data, mine in rows.groupby("data"):
        rates = mine.sort_values("num_blocks")
        endless, smallest = rates[rates["endless"]], rates.iloc[0]
        if endless.empty or len(rates) < 2:
            continue
        most = endless.iloc[0]
        near = rates[~rates["endless"] & (rates["value"] >= 0.9 * most["value"])]
        enough = ("no pool that was tried reaches 90 % of that" if near.empty else
                  f"90 % of that takes {near.iloc[0]['num_blocks']:,} blocks of {most['block_size']} tokens")
        name = data.removeprefix("workload:")
        yield Finding(f"hit rate: {name}", f"Of {name}, {most['value']:.1%} [{most['low']:.1%}, {most['high']:.1%}] of "
                      f"the prompt blocks are found in an endless pool and {smallest['value']:.1%} in one of "
                      f"{smallest['num_blocks']:,}; {enough}.", float(most["value"]), "ratio", float(most["low"]),
                      float(most["high"]), "simulated")


def _engine(rows) -> Iterator[Finding]:
    rates = sorted(rows["rate"].unique()) if len(rows) else []
    if len(rates) < 2:
        return
    few, many = ({row["metric"]: row for _, row in rows[rows["rate"] == rate].iterrows()}
                 for rate in (rates[0], rates[-1]))
    low, high = few["live_memory_saved"], many["live_memory_saved"]
    inside = QUOTED[0] <= high["low"] and high["high"] <= QUOTED[1]
    spared = [side["prefill_saved"]["value"] for side in (few, many)]
    verdict = "holds at the higher rate" if inside else "is one part of that curve"
    yield Finding("engine", f"In one engine the prefix cache spares {spared[0]:.0%} of the prompts' computing at "
                  f"{rates[0]:g} requests/s and {spared[1]:.0%} at {rates[-1]:g}, but {low['value']:.0%} "
                  f"[{low['low']:.0%}, {low['high']:.0%}] and {high['value']:.0%} [{high['low']:.0%}, "
                  f"{high['high']:.0%}] of the memory per running request: memory is saved only among those alive "
                  f"together. The article's {QUOTED[0]:.0%} to {QUOTED[1]:.0%} {verdict}.",
                  float(high["value"]), "ratio", float(high["low"]), float(high["high"]), "simulated")
