"""Claims of section 3 about the group ratio in long contexts: above 16 accuracy drops, and 8 is safer beyond 8K tokens.

Both are judged by models that were scored beyond 8,192 tokens and by nothing else.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator

from kvlab.claims._base import (
    Claim,
    Evidence,
    Found,
    Verdict,
    absent,
    conditional,
    inconclusive,
    refuted,
    supported,
    untestable,
)
from kvlab.claims._ratio_census import LIMIT, LONG, SAFE, census
from kvlab.claims._recall_models import MARGIN, NARROW, STUDY, WIDE, grid, nll_rise, over_seeds, shown
from kvlab.claims._results import Results
from kvlab.claims.group_ratio import LARGE
from kvlab.lang import Text

SECTION = 3
NEEDS = Text(f"run on a GPU: {LARGE} --device cuda; it trains small models on more than {LONG:,} tokens. Language "
             "models that differ in nothing but the ratio would tell more; kvlab knows of none",
             f"请在 GPU 上运行：{LARGE} --device cuda，它用超过 {LONG:,} token 训练小模型；"
             "仅组比不同的语言模型更有说服力，但 kvlab 尚未见到")


def _tried(results: Results) -> Evidence:
    about = Text("Longest context in which a trained recall model was scored", "训练出的召回模型评测过的最长上下文")
    found = grid(results)
    if found is None:
        return results.lacking(STUDY, "tried", about)
    from kvlab.record.recall import recall_rows
    return Evidence("tried", about, float(recall_rows(results.rows(STUDY))["kv_len"].max()), "token", "measured",
                    source=results.source(STUDY))


def _beyond(results: Results, name: str, few: int, many: int, *, against_short: bool = False) -> Evidence:
    """NLL at ratio `many` minus at `few` beyond 8,192 tokens, or how much more that is than in a short context."""
    from kvlab.accuracy.seeds import difference
    from kvlab.record.recall import recall_rows
    from kvlab.studies._group_ratio_grid import Grid
    more = (", more than in a short one", "，比短上下文多出的部分") if against_short else ("", "")
    about = Text(f"NLL at ratio {many} minus at {few} in contexts beyond {LONG:,} tokens{more[0]}",
                 f"上下文超过 {LONG:,} token 时组比 {few} 升到 {many} 的 NLL 增量{more[1]}")
    table = results.rows(STUDY)
    rows = None if table is None else recall_rows(table)
    if rows is None or rows.empty:
        return results.lacking(STUDY, name, about)
    long = rows[rows["kv_len"] > LONG]
    cells = Grid(rows[rows["num_keys"].isin(long["num_keys"]) & (rows["head_dim"] == WIDE)]) if len(long) else None
    ends = [cells.scores(WIDE, cells.lengths[at], "nll") for at in (-1, 0)] if cells else []
    if not ends or not all({few, many} <= set(scores.columns) and len(scores) > 1 for scores in ends):
        return absent(name, about, f"no model of this run has more than {LONG:,} tokens at both ratios; "
                      f"{NEEDS.en}", f"这次运行没有超过 {LONG:,} token 且两种组比俱全的模型；{NEEDS.zh}")
    far, near = (scores[many] - scores[few] for scores in ends)
    return over_seeds(results, name, about, difference(far, near[far.index] if against_short else 0 * far))


def _long_texts(results: Results) -> Iterator[Evidence]:
    yield _beyond(results, "beyond", LIMIT, 2 * LIMIT)
    yield _tried(results)
    yield nll_rise(results, "narrow_short", NARROW, LIMIT, 2 * LIMIT, 8)
    yield nll_rise(results, "narrow_longer", NARROW, LIMIT, 2 * LIMIT, 128)
    yield nll_rise(results, "wide_longer", WIDE, LIMIT, 2 * LIMIT, 128)
    yield from census()


def _long(found: Found, tell: Callable[[Found], Text]) -> Verdict:
    """By what was measured beyond 8,192 tokens and by nothing else: shorter contexts are told, and decide nothing."""
    tried, beyond = found["tried"], found.get("beyond")
    if beyond is None:
        told = tell(found)
        return untestable(f"no context here is longer than {tried.value:,.0f} tokens. {told.en}",
                          f"这里最长的上下文只有 {tried.value:,.0f} token。{told.zh}", NEEDS)
    text = (f"{shown(beyond)} beyond {LONG:,} tokens (margin {MARGIN:g}, n = {beyond.n}, small recall models)",
            f"超过 {LONG:,} token 时 {shown(beyond)}（界限 {MARGIN:g}，n = {beyond.n}，小型召回模型）")
    if beyond.above(MARGIN):
        return supported(*text)
    return refuted(*text) if beyond.below(MARGIN) else inconclusive(
        *text, Text(f"more seeds: {LARGE}", f"更多随机种子：{LARGE}"))


def _told_of_16(found: Found) -> Text:
    short, longer, wide = found["narrow_short"], found["narrow_longer"], found["wide_longer"]
    return Text(
        f"Within that, going from {LIMIT} to {2 * LIMIT} costs {shown(short)} at 8 and {shown(longer)} at 128 tokens "
        f"with head_dim {NARROW}, {shown(wide)} with {WIDE}",
        f"在此范围内从 {LIMIT} 到 {2 * LIMIT}：head_dim {NARROW} 时 8 token {shown(short)}、128 token {shown(longer)}，"
        f"head_dim {WIDE} 时 {shown(wide)}")


def _safer(results: Results) -> Iterator[Evidence]:
    yield _beyond(results, "beyond", SAFE, LIMIT)
    yield _beyond(results, "more", SAFE, LIMIT, against_short=True)
    yield _tried(results)
    yield nll_rise(results, "short", NARROW, SAFE, LIMIT, 8)
    yield nll_rise(results, "longer", NARROW, SAFE, LIMIT, 128)
    yield from census()


def _told_of_8(found: Found) -> Text:
    short, longer = found["short"], found["longer"]
    below, safe, up_to, above = (found[f"ships_{name}"] for name in ("below", "safe", "up_to_limit", "above"))
    return Text(
        f"Within that, {LIMIT} costs {shown(short)} against {SAFE} at 8 tokens, {shown(longer)} at 128, "
        f"head_dim {NARROW}. Of {below.n} GQA models for more than {LONG:,} tokens {below.value:.0f} have a ratio "
        f"below {SAFE}, "
        f"{safe.value:.0f} have {SAFE}, {up_to.value + above.value:.0f} more; that is no measure of accuracy",
        f"在此范围内 {LIMIT} 相对 {SAFE}：8 token {shown(short)}，128 token {shown(longer)}（head_dim {NARROW}）。"
        f"上下文超过 {LONG:,} token 的 {below.n} 个 GQA 模型中，组比小于 {SAFE} 的 {below.value:.0f} 个，"
        f"等于 {SAFE} 的 {safe.value:.0f} 个，更大的 {up_to.value + above.value:.0f} 个；这不是精度的度量")


def _is_safer(found: Found) -> Verdict:
    """Safer beyond 8,192 tokens if 16 loses there; a threshold at 8,192 only if it loses more than in a short one."""
    verdict, more = _long(found, _told_of_8), found.get("more")
    if verdict.word == "supported" and more is not None and not more.above(MARGIN):
        return conditional(f"{verdict.because.en}; no more than in a short context is shown: {shown(more)}",
                           f"{verdict.because.zh}；但没有显示比短上下文更多：{shown(more)}")
    return verdict


CLAIMS = (
    Claim("C24", Text("Above a ratio of 16, accuracy on long texts clearly drops", "组比超过 16，长文本精度明显下降"),
          "> 16", _long_texts, lambda found: _long(found, _told_of_16), studies=(STUDY,), figure="group_ratio"),
    Claim("C25", Text("For prompts of more than 8K tokens a ratio of 8 is the safer one",
                      "prompt 超过 8K token 时，组比取 8 更稳妥"), "8 at > 8K", _safer, _is_safer, studies=(STUDY,),
          figure="ratio_census"),
)
