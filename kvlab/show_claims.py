"""What `kvlab claims` prints: the ledger as a table, and one claim with all its evidence, in either language."""
from __future__ import annotations

import sys
from collections import Counter
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text as Cell

from kvlab.claims._words import KIND_WORDS, QUOTED, VERDICTS, number, verdict_word
from kvlab.lang import Text
from kvlab.show import printable

TITLES = {"id": Text("id", "编号"), "verdict": Text("verdict", "结论"), "kind": Text("kind", "证据"),
          "number": Text("number", "数值"), "what": Text("of what", "指标"),
          "claim": Text("the article says", "文章说")}
SAID = {"because": Text("because", "理由"), "needs": Text("needs", "需要"), "evidence": Text("evidence", "证据"),
        "figure": Text("figure", "图"), "again": Text("reproduce", "复现"), "counts": Text("claims", "条论断")}


def of(row: dict, name: str, lang: str) -> str:
    """A text of a ledger row in that language."""
    return row[name if lang == "en" else f"{name}_zh"]


def print_ledger(rows: list[dict], lang: str) -> None:
    """One line a claim under its section's title; the counts of verdicts at the end."""
    for section in dict.fromkeys(row["section"] for row in rows):
        mine = [row for row in rows if row["section"] == section]
        table = Table(title=of(mine[0], "section", lang), title_justify="left", title_style="bold", box=None,
                      pad_edge=False, header_style="bold")
        for title in TITLES.values():
            table.add_column(title.of(lang), overflow="fold")
        for row in mine:
            table.add_row(*(Cell(printable(text)) for text in (
                row["id"], verdict_word(row["verdict"], lang), KIND_WORDS[row["kind"]].of(lang), number(row, lang),
                of(row, "what", lang), of(row, "claim", lang))))
        Console(width=None if sys.stdout.isatty() else 200).print(table)
        print()
    counts = Counter(row["verdict"].removesuffix(QUOTED) for row in rows)
    told = [f"{counts[word]} {'条' * (lang == 'zh')}{text.of(lang)}" for word, text in VERDICTS.items() if counts[word]]
    if lang == "zh":
        print(f"{len(rows)} {SAID['counts'].zh}：{'，'.join(told)}")
    else:
        print(f"{len(rows)} {'claim' if len(rows) == 1 else SAID['counts'].en}: {', '.join(told)}")


def print_claim(row: dict, lang: str) -> None:
    """A claim with its verdict, what it rests on, and what reproduces it. A source is printed below all that is its."""
    zh = lang == "zh"
    colon, comma, left, right = ("：", "，", "（", "）") if zh else (": ", ", ", " (", ")")

    def say(title: Text, text: str) -> None:
        print(printable(f"{title.of(lang)}{colon}{text}"))

    print(f"{row['id']}  {of(row, 'section', lang)}")
    say(TITLES["claim"], f"{of(row, 'claim', lang)}{left}{row['said']}{right}")
    word = verdict_word(row["verdict"].removesuffix(QUOTED), lang)
    say(TITLES["verdict"], f"{word}{left}{KIND_WORDS[row['kind']].of(lang)}{right}")
    say(SAID["because"], of(row, "because", lang))
    if row["needs"]:
        say(SAID["needs"], of(row, "needs", lang))
    print(f"{SAID['evidence'].of(lang)}{colon.rstrip()}")
    for source, group in groupby(row["evidence"], key=lambda one: of(one, "note", lang) or one["source"]):
        for one in group:
            n = f"{comma}n = {one['n']:,}" if one["n"] else ""
            print(printable(f"  {of(one, 'about', lang)}{colon}{number(one, lang)}{n}{left}"
                            f"{KIND_WORDS[one['kind']].of(lang)}{right}"))
        print(printable(f"      {source}"))
    for command in row["commands"]:
        say(SAID["again"], command)
    if row["figure"]:
        say(SAID["figure"], f"kvlab figure {row['figure']}")
