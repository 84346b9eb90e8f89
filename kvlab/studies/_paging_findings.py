"""What a run of paging says, in words."""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvlab.record.asked import asked
from kvlab.studies import kernels
from kvlab.studies._run import Finding

if TYPE_CHECKING:
    import pandas as pd

# What the PagedAttention paper reports of KV memory that held tokens, before it and with it.
# Source: Kwon et al., SOSP 2023 (arXiv 2309.06180), section 1 and figure 2.
QUOTED_BEFORE, QUOTED_WASTE = (0.204, 0.382), 0.04
WITHIN, LEAST = 0.1, 16         # by how much waste may miss the rule of half a block, and from which block size on


def findings(table: pd.DataFrame) -> list[Finding]:
    """Waste of pages, the rule of half a block, waste of reservations, what fits, what a kernel pays."""
    ok = table[(table["status"] == "ok") & (table["kind"] != "missing")]
    timed = kernels.findings(table[table["variant"] != ""])
    found = [*_pages(ok), *_reserved(ok), *(one for one in timed if one.name.startswith("pages:"))]
    return found or [Finding("none", "no finding: the run holds no reading of this study", None, "ratio", None, None,
                             "missing")]


def _pages(ok) -> Iterator[Finding]:
    pages = asked(ok, "waste")
    if pages.empty:
        return
    pages = pages[(pages["reserved"] == "") & (pages["metric"] == "waste_of_tokens")]
    counted, rule = (pages[pages["kind"] == kind].set_index("block_size") for kind in ("simulated", "modelled"))
    if counted.empty:
        return
    off = counted["value"] / rule["value"] - 1
    off = off[off.index >= LEAST]
    if 16 in counted.index:
        row = counted.loc[16]
        yield Finding("waste at 16", f"Blocks of 16 leave room unused for {row['value']:.2%} [{row['low']:.2%}, "
                      f"{row['high']:.2%}] of the tokens (the PagedAttention paper: less than {QUOTED_WASTE:.0%}).",
                      float(row["value"]), "ratio", float(row["low"]), float(row["high"]), "simulated")
    if off.empty:
        return
    worst = off.loc[off.abs().idxmax()]
    verdict = "holds" if abs(worst) <= WITHIN else "does not hold"
    yield Finding("half a block", f"The rule that a sequence wastes half a block {verdict} within {WITHIN:.0%} from "
                  f"blocks of {LEAST} on: the largest difference is {worst:+.1%}, at {off.abs().idxmax():.0f} (half a "
                  "token less than the rule is wasted, which weighs more in smaller blocks).", float(worst), "ratio",
                  None, None, "simulated")


def _reserved(ok) -> Iterator[Finding]:
    rows = asked(ok, "waste")
    if rows.empty:
        return
    held = rows[rows["metric"] == "sequences_held"]
    pages = held[(held["reserved"] == "") & (held["block_size"] == 16)]
    for reserved in [one for one in rows["reserved"].unique() if one]:
        share = rows[(rows["metric"] == "used_share") & (rows["reserved"] == reserved)].iloc[0]
        fits = held[held["reserved"] == reserved].iloc[0]
        more = "" if pages.empty else (f"; {fits['value']:.0f} sequences fit where {pages.iloc[0]['value']:.0f} do in "
                                       "blocks of 16")
        low, high = QUOTED_BEFORE
        yield Finding(f"reserved: {reserved}", f"Reserving one piece per sequence ({reserved}), {share['value']:.1%} "
                      f"[{share['low']:.1%}, {share['high']:.1%}] of the room holds tokens (the paper, of other "
                      f"engines and traces: {low:.1%} to {high:.1%}){more}.", float(share["value"]), "ratio",
                      float(share["low"]), float(share["high"]), "simulated")
