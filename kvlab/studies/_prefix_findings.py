"""What a run of prefix_sharing says, in words."""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvlab.record.asked import asked
from kvlab.studies._run import Finding

if TYPE_CHECKING:
    import pandas as pd

QUOTED = (0.3, 0.5)             # the article, section 5: of the memory, in dialogues
WITHIN = 0.01                   # by how much counted memory may miss the formula


def findings(table: pd.DataFrame) -> list[Finding]:
    """The formula, a real model's prompts, hit rates over pool sizes, memory and computing in an engine."""
    ok = table[(table["status"] == "ok") & (table["kind"] != "missing")]
    found = [*_formula(asked(ok, "sharers")), *_prefill(asked(ok, "prefill")), *_pools(asked(ok, "pool")),
             *_engine(asked(ok, "engine"))]
    return found or [Finding("none", "no finding: the run holds no reading of this study", None, "ratio", None, None,
                             "missing")]


def _formula(rows) -> Iterator[Finding]:
    if rows.empty:
        return
    counted, said = (rows[rows["kind"] == kind].set_index("case_id")["value"] for kind in ("simulated", "modelled"))
    off = (counted - said).abs().max()
    verdict = "as" if off <= WITHIN else "not as"
    yield Finding("formula", f"R live requests with a share f of their prompt in common hold less memory, {verdict} "
                  f"f(R − 1)/R says: counted, it differs by {off:.4f} at most in {len(counted)} cases (blocks are "
                  "shared whole or not at all). One alone saves nothing, and no number of sharers saves more than f.",
                  float(off), "ratio", None, None, "simulated")


def _prefill(rows) -> Iterator[Finding]:
    for shared, mine in rows.groupby("shared") if len(rows) else ():
        by = {row["metric"]: row for _, row in mine.iterrows()}
        if not {"prefill_time_saved", "tokens_found", "memory_saved", "logits_difference"} <= set(by):
            continue
        row, found, saved = by["prefill_time_saved"], by["tokens_found"]["value"], by["memory_saved"]["value"]
        same = by["logits_difference"]["value"]
        answer = ("the next token's logits are the same" if same == 0 else
                  f"the next token's logits differ by {same:.1g} of the largest one")
        yield Finding(f"prefill: {shared:g}", f"Measured on {row['model']}: a prompt of {row['kv_len']} tokens that "
                      f"finds {found:.1%} of them in the cache saves {row['value']:.0%} [{row['low']:.0%}, "
                      f"{row['high']:.0%}] of its time, and {row['batch_size']} such prompts alive together save "
                      f"{saved:.1%} of their blocks; {answer}.", float(row["value"]), "ratio", float(row["low"]),
                      float(row["high"]), "measured")


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
        kind, _, name = data.partition(":")
        ends = "" if most["n"] < 2 else f" [{most['low']:.1%}, {most['high']:.1%}]"
        yield Finding(f"hit rate: {name}", f"Of {name}{' (the trace itself)' if kind == 'trace' else ''}, "
                      f"{most['value']:.1%}{ends} of the prompt blocks are found in an endless pool and "
                      f"{smallest['value']:.1%} in one of {smallest['num_blocks']:,}; {enough}.", float(most["value"]),
                      "ratio", *(float(most[end]) if ends else None for end in ("low", "high")), "simulated")


def _engine(rows) -> Iterator[Finding]:
    rates = sorted(rows["rate"].unique()) if len(rows) else []
    if len(rates) < 2:
        return
    few, many = ({row["metric"]: row for _, row in rows[rows["rate"] == rate].iterrows()}
                 for rate in (rates[0], rates[-1]))
    low, high = few["live_memory_saved"], many["live_memory_saved"]
    sooner = [f"{side['ttft_mean_s_ratio']['value']:.2g}" for side in (few, many)]
    held = rows[rows["metric"] == "live_memory_saved"]
    inside = held[held["value"].between(*QUOTED)]["rate"].sort_values()
    met = f"is met at {', '.join(f'{rate:g}' for rate in inside)}" if len(inside) else "is met at none of the rates"
    spared = [side["prefill_saved"]["value"] for side in (few, many)]
    yield Finding("engine", f"In one simulated engine the prefix cache spares {spared[0]:.0%} of the prompts' "
                  f"computing at {rates[0]:g} requests/s and {spared[1]:.0%} at {rates[-1]:g}, but {low['value']:.0%} "
                  f"[{low['low']:.0%}, {low['high']:.0%}] and {high['value']:.0%} [{high['low']:.0%}, "
                  f"{high['high']:.0%}] of the memory per running request: memory is saved only among those alive "
                  f"together. The mean time to first token is {sooner[0]} × and {sooner[1]} × that without. The "
                  f"article's {QUOTED[0]:.0%} to {QUOTED[1]:.0%} of memory {met} (of {rates[0]:g} to {rates[-1]:g} "
                  "requests/s).", float(high["value"]), "ratio", float(high["low"]), float(high["high"]), "simulated")
