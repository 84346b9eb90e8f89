"""The claim of section 3 that the group ratio should not be above 16.

What a ratio costs comes from small recall models trained from scratch. Who ships which ratio and what kernels take
stands beside it and decides nothing.
"""
from __future__ import annotations

from collections.abc import Iterator

from kvlab.claims._base import Claim, Evidence, Found, Verdict, conditional, inconclusive, refuted, supported
from kvlab.claims._ratio_census import LIMIT, SAFE, census, served
from kvlab.claims._recall_models import MARGIN, NARROW, STUDY, WIDE, grid, nll_rise, over_seeds, shown
from kvlab.claims._results import Results
from kvlab.lang import Text

SECTION = 3
LARGE = "kvlab run group_ratio --size large"


def _knee(results: Results, name: str, metric: str) -> Evidence:
    """By how much more a doubling of the ratio costs beyond 16 than before it, with its 95 % interval."""
    from kvlab.accuracy.seeds import knee
    from kvlab.studies._group_ratio_grid import KNEE_MARGIN
    found, unit = grid(results), {"recall": "ratio", "nll": "nat"}[metric]
    about = Text(f"What a doubling of the ratio costs more beyond {LIMIT} than before, {metric}, head_dim {NARROW}",
                 f"组比过 {LIMIT} 之后每翻倍多付的代价（{metric}，head_dim {NARROW}）")
    scores = found.scores(NARROW, found.trained, metric) * (1 if metric == "recall" else -1) if found else None
    got = None if scores is None or scores.empty else knee(list(scores.columns), scores.to_numpy(), at=LIMIT,
                                                           margin=KNEE_MARGIN[metric])
    if got is None or got.change.value != got.change.value:
        return results.lacking(STUDY, name, about, got.why if got else "")
    change = got.change
    return over_seeds(results, name, about, type(change)(-change.value, -change.high, -change.low, change.n), unit)


def _knees(results: Results) -> Evidence:
    """At how many context lengths the study's test finds a knee at 16, by recall or by NLL."""
    from kvlab.accuracy.seeds import knee
    from kvlab.studies._group_ratio_grid import KNEE_MARGIN
    found = grid(results)
    some = f"{found.lengths[0]}–{found.lengths[-1]}" if found else "…"
    about = Text(f"Context lengths ({some} tokens) at which losses have a knee at {LIMIT}, head_dim {NARROW}",
                 f"损失在组比 {LIMIT} 处有拐点的上下文长度个数（{some} token，head_dim {NARROW}）")
    if found is None:
        return results.lacking(STUDY, "knees", about)
    count = lengths = 0
    for n in found.lengths:
        both = {metric: found.scores(NARROW, n, metric) * sign for metric, sign in (("recall", 1), ("nll", -1))}
        if any(scores.empty for scores in both.values()):
            continue
        lengths += 1
        tested = [knee(list(scores.columns), scores.to_numpy(), at=LIMIT, margin=KNEE_MARGIN[metric])
                  for metric, scores in both.items()]
        count += any(one.verdict == "knee" for one in tested)
    if not lengths:
        return results.lacking(STUDY, "knees", about)
    return Evidence("knees", about, count, "count", "measured", n=lengths, source=results.source(STUDY))


def _same_width(results: Results) -> Evidence:
    """As many KV floats per token in fewer, wider heads: does the higher ratio lose then?"""
    from kvlab.accuracy.seeds import difference
    found = grid(results)
    about = Text("NLL at head_dim 16 and ratio 32 minus at head_dim 4 and ratio 8: 32 KV floats per token in both",
                 "head_dim 16、组比 32 与 head_dim 4、组比 8 的 NLL 之差：两者每 token 都是 32 个 KV 浮点数")
    wide, narrow = (found.scores(head_dim, found.trained, "nll").get(ratio) if found else None
                    for head_dim, ratio in ((16, 32), (NARROW, 8)))
    if wide is None or narrow is None or len(seeds := wide.index.intersection(narrow.index)) < 2:
        return results.lacking(STUDY, "same_width", about)
    return over_seeds(results, "same_width", about, difference(wide[seeds], narrow[seeds]))


def _limit(results: Results) -> Iterator[Evidence]:
    yield nll_rise(results, "narrow", NARROW, LIMIT, 2 * LIMIT)
    yield nll_rise(results, "wide", WIDE, LIMIT, 2 * LIMIT)
    yield nll_rise(results, "before", NARROW, SAFE, LIMIT)
    yield _knee(results, "knee", "recall")
    yield _knee(results, "knee_nll", "nll")
    yield nll_rise(results, "whole", WIDE, 1, 2 * LIMIT)
    yield nll_rise(results, "trained", NARROW, 1, 2 * LIMIT)
    yield nll_rise(results, "trained_longer", NARROW, 1, 2 * LIMIT, longer=True)
    yield _same_width(results)
    yield _knees(results)
    yield served()
    yield from census()
    yield results.quoted("c23_rocm_max_ratio", name="rocm_max_ratio")
    yield results.quoted("c23_tgi_rocm_max_ratio", name="tgi_rocm_max_ratio")


def _not_above_16(found: Found) -> Verdict:
    """A limit shows as a loss that starts, or grows, at 16. How much of one matters was named by the study."""
    from kvlab.studies._group_ratio_grid import KNEE_MARGIN
    narrow, wide, knees = found["narrow"], found["wide"], found["knees"]
    bends = {metric: found[name] for metric, name in (("recall", "knee"), ("nll", "knee_nll"))}
    excluded = all(bend.above(KNEE_MARGIN[metric]) is False for metric, bend in bends.items())
    at_limit = True if knees.value > (knees.n or 0) / 2 else False if excluded else None
    numbers = (f"from {LIMIT} to {2 * LIMIT}, NLL {shown(narrow)} at head_dim {NARROW} (n = {narrow.n}) and "
               f"{shown(wide)} at {WIDE} (n = {wide.n})",
               f"从 {LIMIT} 到 {2 * LIMIT}，NLL 在 head_dim {NARROW} 时 {shown(narrow)}（n = {narrow.n}），"
               f"{WIDE} 时 {shown(wide)}（n = {wide.n}）")
    small = (", in small recall models", "，均为小型召回模型")
    if at_limit and wide.above(MARGIN):
        return supported(f"losses begin to grow at {LIMIT}: {numbers[0]}{small[0]}",
                         f"损失从 {LIMIT} 起加剧：{numbers[1]}{small[1]}")
    if narrow.below(MARGIN) and wide.below(MARGIN):
        return refuted(f"no loss of {MARGIN:g} nat: {numbers[0]}{small[0]}",
                       f"没有 {MARGIN:g} nat 的损失：{numbers[1]}{small[1]}")
    if narrow.above(MARGIN) and wide.above(MARGIN) is not None:
        place = {True: (f"{LIMIT} is where it begins", f"{LIMIT} 是转折点"),
                 False: (f"{LIMIT} is no threshold: a doubling beyond it loses no more recall than "
                         f"one before (change {bends['recall'].value:+.3f}), and {knees.value:.0f} of "
                         f"{knees.n} lengths show a knee",
                         f"{LIMIT} 不是门槛：越过它之后每翻倍的召回损失没有加剧（变化 {bends['recall'].value:+.3f}），"
                         f"{knees.n} 种长度中 {knees.value:.0f} 种有拐点"),
                 None: (f"whether {LIMIT} is a threshold is open", f"{LIMIT} 是否为门槛尚无定论")}[at_limit]
        where = (("where KV heads are narrow and not where they are wide", "KV head 窄时成立，宽时不成立")
                 if wide.below(MARGIN) else ("in both widths of KV heads", "两种 KV head 宽度下都有损失"))
        return conditional(f"{where[0]}: {numbers[0]}; {place[0]}{small[0]}",
                           f"{where[1]}：{numbers[1]}；{place[1]}{small[1]}")
    return inconclusive(f"the intervals hold {MARGIN:g} nat: {numbers[0]}", f"区间包含 {MARGIN:g} nat：{numbers[1]}",
                        Text(f"more seeds: {LARGE}", f"更多随机种子：{LARGE}"))


CLAIMS = (
    Claim("C23", Text("The group ratio should not go above 16", "group_ratio 不宜超过 16"), "≤ 16", _limit,
          _not_above_16, studies=(STUDY,), figure="group_ratio"),
)
