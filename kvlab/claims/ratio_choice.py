"""The claim of section 3 on who chooses the group ratio: settings of engines, and converting a trained model."""
from __future__ import annotations

import re
from collections.abc import Iterator

from kvlab.claims._base import Claim, Evidence, Found, Verdict, conditional, inconclusive, refuted, supported
from kvlab.claims._recall_models import STUDY
from kvlab.claims._results import Results, catalogue
from kvlab.lang import Text

SECTION = 3
DAMAGE = 0.1                            # nat of KL: 10 % off the right answer's probability
KV_HEADS = re.compile(r"(key[-_]?value|kv)[-_]?heads?|heads?[-_]?kv|group[-_]?ratio|gqa", re.IGNORECASE)
ANY_FIELD = ("--hf-overrides", "--json-model-override-args", "--override-kv")


def _choice(results: Results) -> Iterator[Evidence]:
    from kvlab.serving.names import tables
    settings = {(engine, one.kind, one.name) for engine, table in tables().items() for one in table.names
                if one.kind in ("env", "flag", "kwarg") and one.exists(table.newest)}
    source = "data/engine_names, each engine's newest release"
    yield catalogue("setters", Text("Settings of serving engines that name KV heads or a group ratio",
                                    "推理引擎中设置 KV head 数或组比的参数个数"),
                    sum(bool(KV_HEADS.search(name)) for *_, name in settings), "count", source, n=len(settings))
    yield catalogue("any_field", Text("Flags that replace any field of a model's config, and no weights",
                                      "可改写模型 config 任意字段（不改权重）的启动参数个数"),
                    len({name for *_, name in settings} & set(ANY_FIELD)), "count", source)
    table = results.rows(STUDY)
    for name, data, metric, en, zh in (
            ("pooled", "mean", "kl", "KL to the model as it was once trained KV heads are averaged, ratio 3 to 9",
             "把训练好的 KV head 取平均、组比从 3 改到 9 后与原模型的 KL"),
            ("repaired", "aligned, distilled 12 steps a layer", "kl",
             "The same after alignment and 12 steps of distillation per layer", "对齐并逐层蒸馏 12 步之后的 KL"),
            ("repaired_top1", "aligned, distilled 12 steps a layer", "top1_agreement",
             "Top-1 agreement then with the model as it was", "此时与原模型的 top-1 一致率"),
            ("expanded", "expand", "kl", "KL once KV heads are copied, ratio 3 to 1: three times the cache",
             "复制 KV head、组比从 3 改到 1（缓存变为三倍）后的 KL")):
        yield results.lacking(STUDY, name, Text(en, zh)) if table is None else results.reading(
            STUDY, name, Text(en, zh), table[(table["data"] == f"conversion:{data}") & (table["metric"] == metric)],
            unit="share" if metric == "top1_agreement" else "")


def _whose_choice(found: Found) -> Verdict:
    """A choice at deployment needs a setting for it, or a conversion that leaves the model what it was."""
    setters, repaired = found["setters"], found["repaired"]
    damage = (f"a trained model converted to ratio 9 is at KL {repaired.value:.2f} nat after a short repair (n = "
              f"{repaired.n} tokens, SmolLM2-135M)",
              f"把训练好的模型改成组比 9，短暂修复后 KL 仍为 {repaired.value:.2f} nat"
              f"（n = {repaired.n} token，SmolLM2-135M）")
    settings = (f"{setters.value:.0f} of {setters.n:,} settings of engines name KV heads",
                f"引擎的 {setters.n:,} 个参数中有 {setters.value:.0f} 个涉及 KV head 数")
    en, zh = f"{settings[0]}; {damage[0]}", f"{settings[1]}；{damage[1]}"
    if setters.value and repaired.below(DAMAGE):
        return supported(en, zh)
    if setters.value or repaired.below(DAMAGE):
        return conditional(en, zh)
    if repaired.above(DAMAGE) is None:
        return inconclusive(en, zh, Text("more tokens of text", "更多文本 token"))
    return refuted(f"the ratio is fixed when a model is trained: {en}", f"组比在训练时就已定下：{zh}")


CLAIMS = (
    Claim("C26", Text("The group ratio is chosen in the practice of prompt engineering",
                      "组比可在 Prompt 工程实践中选择"), "prompt engineering", _choice,
          _whose_choice, studies=(STUDY,)),
)
