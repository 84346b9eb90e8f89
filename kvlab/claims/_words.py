"""Words of the ledger in each language, and numbers as a reader sees them."""
from __future__ import annotations

from kvlab.claims._base import WORDS
from kvlab.lang import Text
from kvlab.record.reading import KINDS
from kvlab.units import display

QUOTED = " (quoted)"            # after the word of a verdict behind which there are only others' facts
VERDICTS = dict(zip(WORDS, (Text(word, zh) for word, zh in zip(
    WORDS, ("成立", "有条件成立", "不成立", "已过时", "证据不足", "此处无法检验")))))
KIND_WORDS = dict(zip(KINDS, (Text(kind, zh) for kind, zh in zip(KINDS, ("实测", "仿真", "推算", "引用", "缺失")))))
_YES = {1: Text("yes", "是"), 0: Text("no", "否")}


def verdict_word(label: str, lang: str) -> str:
    """A row's verdict, "(quoted)" included, in that language."""
    word, quoted, _ = label.partition(QUOTED)
    return VERDICTS[word].of(lang) + (f"（{KIND_WORDS['quoted'].zh}）" if quoted and lang == "zh" else quoted)


def shown(value: float | None, unit: str, lang: str = "en") -> str:
    """A number of the ledger: shares per cent, yes or no, counts in full, all else as kvlab prints that unit.

    A share just below 1 is not rounded up to it.
    """
    if value is None:
        return "–"
    if unit == "yes/no":
        return _YES[round(value)].of(lang)
    if unit == "share":
        digits = 4 if 0.9995 <= value < 1 else 3
        return f"{100 * value:.{digits}g} %" if abs(value) < 9.995 else f"{100 * value:,.0f} %"
    if unit == "year":
        return f"{value:.0f}"
    if unit == "token":
        return f"{value:,.0f} token"
    if unit in ("count", "ratio"):
        return f"{value:,.0f}" if value == round(value) or abs(value) >= 1e4 else f"{value:.3g}"
    return display(value, unit)


def number(row: dict, lang: str = "en") -> str:
    """A row's value with its interval and its n."""
    text = shown(row["value"], row["unit"], lang)
    if row["low"] is not None and row["high"] is not None:
        text += f" [{shown(row['low'], row['unit'], lang)}, {shown(row['high'], row['unit'], lang)}]"
    return text
