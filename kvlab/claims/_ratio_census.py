"""Who ships which group ratio, of the catalogue's models: what builders do, and never what it costs them."""
from __future__ import annotations

from collections.abc import Iterator

from kvlab.claims._base import Evidence
from kvlab.claims._results import catalogue
from kvlab.lang import Text

LIMIT, SAFE, LONG = 16, 8, 8192         # the article's: ratio not above 16, 8 safer beyond 8K tokens
CSV = "data/models.csv"


def shipped() -> dict[str, tuple[int, int]]:
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


def census() -> Iterator[Evidence]:
    found = shipped()
    for name, en, zh, chosen in (
            ("ships_below", f"below {SAFE}", f"小于 {SAFE} ", [r for r, _ in found.values() if r < SAFE]),
            ("ships_safe", f"{SAFE}", f"等于 {SAFE} ", [r for r, _ in found.values() if r == SAFE]),
            ("ships_up_to_limit", f"{SAFE + 1} to {LIMIT}", f"为 {SAFE + 1} 到 {LIMIT} ",
             [r for r, _ in found.values() if SAFE < r <= LIMIT]),
            ("ships_above", f"above {LIMIT}", f"大于 {LIMIT} ", [r for r, _ in found.values() if r > LIMIT])):
        yield catalogue(name, Text(f"GQA models with contexts beyond {LONG:,} tokens whose ratio is {en}",
                                   f"上下文超过 {LONG:,} token 的 GQA 模型中组比{zh}的数量"), len(chosen), "count", CSV,
                        n=len(found))


def served() -> Evidence:
    """How narrow heads are in models that are served, beside those of the recall models."""
    from kvlab.catalog.models import models
    widths = [spec.head_dim for spec in models().values()]
    about = Text("Narrowest heads of the catalogue's models, head_dim", "目录中各模型最小的 head_dim")
    return catalogue("served", about, min(widths), "count", CSV, n=len(widths))
