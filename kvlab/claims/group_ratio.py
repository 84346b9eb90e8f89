"""Claims of section 3 about the group ratio: not above 16, and 8 beyond 8K tokens.

What a ratio costs comes from small recall models trained from scratch; who ships which ratio, from the catalogue. The
latter tells what builders do and never what it costs them.
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
from kvlab.claims._recall_models import MARGIN, NARROW, STUDY, WIDE, grid, nll_rise, over_seeds, shown
from kvlab.claims._results import Results, catalogue
from kvlab.lang import Text

SECTION = 3
LIMIT, SAFE, LONG = 16, 8, 8192         # the article's: ratio not above 16, 8 safer beyond 8K tokens
CSV = "data/models.csv"
LARGE = "kvlab run group_ratio --size large"
NEEDS = Text(f"run on a GPU: {LARGE} --device cuda; it trains small models on more than {LONG:,} tokens. Language "
             "models that differ in nothing but the ratio would tell more; kvlab knows of none",
             f"请在 GPU 上运行：{LARGE} --device cuda，它用超过 {LONG:,} token 训练小模型；"
             "仅组比不同的语言模型更有说服力，但 kvlab 尚未见到")


def _shipped() -> dict[str, tuple[int, int]]:
    """model -> (group ratio of the layers that keep every token, context), of GQA models with more than 8K tokens."""
    from kvlab.catalog.models import models
    found = {}
    for spec in models().values():
        kept = [layer for layer in spec.layers if layer.shape is not None]
        full = [layer for layer in kept if layer.kind == "full"] or kept
        most = max(full, key=lambda layer: layer.heads.group_ratio)
        grouped = all(layer.kind != "mla" for layer in kept) and 1 < most.num_kv_heads < most.num_q_heads
        if grouped and spec.context and spec.context > LONG:
            found[spec.name] = (most.heads.group_ratio, spec.context)
    return found


def _census() -> Iterator[Evidence]:
    shipped = _shipped()
    for name, en, zh, chosen in (
            ("ships_below", f"below {SAFE}", f"小于 {SAFE} ", [r for r, _ in shipped.values() if r < SAFE]),
            ("ships_safe", f"{SAFE}", f"等于 {SAFE} ", [r for r, _ in shipped.values() if r == SAFE]),
            ("ships_up_to_limit", f"{SAFE + 1} to {LIMIT}", f"为 {SAFE + 1} 到 {LIMIT} ",
             [r for r, _ in shipped.values() if SAFE < r <= LIMIT]),
            ("ships_above", f"above {LIMIT}", f"大于 {LIMIT} ", [r for r, _ in shipped.values() if r > LIMIT])):
        yield catalogue(name, Text(f"GQA models with contexts beyond {LONG:,} tokens whose ratio is {en}",
                                   f"上下文超过 {LONG:,} token 的 GQA 模型中组比{zh}的数量"), len(chosen), "count", CSV,
                        n=len(shipped))


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
    about = Text(f"Context lengths (8 to 128 tokens) at which losses have a knee at {LIMIT}, head_dim {NARROW}",
                 f"损失在组比 {LIMIT} 处有拐点的上下文长度个数（8 到 128 token，head_dim {NARROW}）")
    if (found := grid(results)) is None:
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


def _served() -> Evidence:
    """How narrow heads are in models that are served, beside those of the recall models."""
    from kvlab.catalog.models import models
    widths = [spec.head_dim for spec in models().values()]
    about = Text("Narrowest heads of the catalogue's models, head_dim", "目录中各模型最小的 head_dim")
    return catalogue("served", about, min(widths), "count", CSV, n=len(widths))


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
    yield _served()
    yield from _census()
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
    small = (", in small recall models of at most 128 tokens", "，均为不超过 128 token 的小型召回模型")
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
    yield from _census()


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
        f"There, going from {LIMIT} to {2 * LIMIT} costs {shown(short)} at 8 and {shown(longer)} at 128 tokens with "
        f"head_dim {NARROW}, {shown(wide)} with {WIDE}",
        f"在此范围内从 {LIMIT} 到 {2 * LIMIT}：head_dim {NARROW} 时 8 token {shown(short)}、128 token {shown(longer)}，"
        f"head_dim {WIDE} 时 {shown(wide)}")


def _safer(results: Results) -> Iterator[Evidence]:
    yield _beyond(results, "beyond", SAFE, LIMIT)
    yield _beyond(results, "more", SAFE, LIMIT, against_short=True)
    yield _tried(results)
    yield nll_rise(results, "short", NARROW, SAFE, LIMIT, 8)
    yield nll_rise(results, "longer", NARROW, SAFE, LIMIT, 128)
    yield from _census()


def _told_of_8(found: Found) -> Text:
    short, longer = found["short"], found["longer"]
    below, safe, up_to, above = (found[f"ships_{name}"] for name in ("below", "safe", "up_to_limit", "above"))
    return Text(
        f"There, {LIMIT} costs {shown(short)} against {SAFE} at 8 tokens, {shown(longer)} at 128, head_dim {NARROW}. "
        f"Of {below.n} GQA models for more than {LONG:,} tokens {below.value:.0f} have a ratio below {SAFE}, "
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
    Claim("C23", Text("The group ratio should not go above 16", "group_ratio 不宜超过 16"), "≤ 16", _limit,
          _not_above_16, studies=(STUDY,), figure="group_ratio"),
    Claim("C24", Text("Above a ratio of 16, accuracy on long texts clearly drops", "组比超过 16，长文本精度明显下降"),
          "> 16", _long_texts, lambda found: _long(found, _told_of_16), studies=(STUDY,), figure="group_ratio"),
    Claim("C25", Text("For prompts of more than 8K tokens a ratio of 8 is the safer one",
                      "prompt 超过 8K token 时，组比取 8 更稳妥"), "8 at > 8K", _safer, _is_safer, studies=(STUDY,),
          figure="ratio_census"),
)
