"""The ledger as one self-contained page in two languages, and as a picture: how many claims stand, by section.

The page runs no script and loads nothing: a style sheet shows one language at a time. All that comes from claims and
runs is text in it, never markup.
"""
from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.claims._ledger import no_claim
from kvlab.claims._words import KIND_WORDS, QUOTED, VERDICTS, number, verdict_word
from kvlab.lang import LANGUAGES, Text, checked
from kvlab.record.export import atomic_file

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

COLORS = dict(zip(VERDICTS, ("#029e73", "#56b4e9", "#d55e00", "#de8f05", "#949494", "#dddddd")))
TITLE = Text("The article's claims, checked", "文章论断核对")
INTRO = Text("Each verdict follows from its evidence by a rule in kvlab's code: other evidence, another verdict.",
             "每条结论都由其下的证据按 kvlab 代码中的规则得出：证据变了，结论随之改变。")
HEADS = (Text("id", "编号"), Text("the article says", "文章说"), Text("verdict", "结论"), Text("number", "数值"),
         Text("evidence", "证据"))
NEEDS, AGAIN, MORE = Text("Needs", "需要"), Text("Reproduce", "复现"), Text("Figure", "图")
_STYLE = """
body { font: 15px/1.55 system-ui, "Noto Sans CJK SC", "Microsoft YaHei", sans-serif; color: #1a1a1a; max-width: 72rem;
  margin: 2rem auto; padding: 0 1rem; background: white; }
h1, h2, h3 { line-height: 1.25; } h2 { margin-top: 2.4rem; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .5rem; border-bottom: 1px solid #e5e5e5; text-align: left; vertical-align: top; }
th { background: #f4f4f4; } td { overflow-wrap: anywhere; }
td.id, td.verdict, td.number, th, td:last-child { white-space: nowrap; }
article { margin: 1.4rem 0; break-inside: avoid; } small { color: #555; } code { font-size: 12px; }
figure { margin: 1.2rem 0; break-inside: avoid; } img { max-width: 100%; }
label { cursor: pointer; padding: .2rem .7rem; border: 1px solid #bbb; border-radius: 3px; }
input[name=lang] { position: absolute; opacity: 0; }
#en:checked ~ nav label[for=en], #zh:checked ~ nav label[for=zh] { background: #1a1a1a; color: white; }
#en:focus-visible ~ nav label[for=en], #zh:focus-visible ~ nav label[for=zh] { outline: 2px solid #0173b2; }
#en:checked ~ main .zh, #zh:checked ~ main .en { display: none; }
@media (max-width: 40rem) { table { display: block; overflow-x: auto; } td { min-width: 6rem; } }
@media print { nav { display: none; } body { font-size: 11px; margin: 0; max-width: none; } }
"""


def write_page(rows: list[dict], path: Path, lang: str = "en", *,
               runs: Mapping[str, Path | None] | None = None) -> Path:
    """Write the page of a ledger's rows, opened in that language; returns its path.

    runs: study -> results that the figures are drawn from, None = no figure of it; default: what kvlab ships. Refused:
    a folder that cannot be written (StoreError).
    """
    with atomic_file(path) as file:                     # opened first: what cannot be written to costs no figures
        file.write(_page(rows, lang, runs or {}).encode())
    return path


def _page(rows: list[dict], lang: str, runs: Mapping[str, Path | None]) -> str:
    figures = {name: _pictures(name, runs) for name in dict.fromkeys(row["figure"] for row in rows) if name}
    checks = {one: " checked" if one == checked(lang) else "" for one in LANGUAGES}
    switch = "".join(f'<input type="radio" name="lang" id="{one}"{checks[one]}>' for one in LANGUAGES)
    labels = '<label for="en">English</label> <label for="zh" lang="zh">中文</label>'
    writer = _Writer(LANGUAGES)
    body = "\n".join([writer.say("h1", TITLE), writer.say("p", INTRO), writer.counts(rows),
                      *writer.summary(rows, link=True), *writer.claims(rows, figures), *_gallery(writer, figures)])
    return (f'<!doctype html><html lang="{lang}"><head><meta charset="utf-8">'
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
            'style-src \'unsafe-inline\'"><meta name="viewport" '
            f'content="width=device-width"><title>kvlab: {TITLE.of(lang)}</title><style>{_STYLE}</style></head><body>'
            f'{switch}<nav>{labels}</nav><main>{body}</main></body></html>\n')


def _of(row: dict, name: str) -> Text:
    return Text(row[name], row[f"{name}_zh"])


def _word(row: dict) -> str:
    return row["verdict"].removesuffix(QUOTED)


def _by_section(rows: list[dict]) -> Iterator[tuple[Text, list[dict]]]:
    for section in dict.fromkeys(_of(row, "section") for row in rows):
        yield section, [row for row in rows if _of(row, "section") == section]


@dataclass(frozen=True)
class _Writer:
    """Writes rows as markup in these languages, each text in a tag of its language's class."""
    languages: tuple[str, ...]

    def say(self, tag: str, text: Text) -> str:
        return "".join(f'<{tag} class="{one}" lang="{one}">{escape(text.of(one))}</{tag}>' for one in self.languages)

    def span(self, text: Text) -> str:
        return self.say("span", text)

    def badge(self, label: str) -> str:
        words = Text(*(verdict_word(label, one) for one in LANGUAGES))
        color = COLORS[label.removesuffix(QUOTED)]
        return (f'<span style="border-left: .6rem solid {color}; padding: 0 .4rem; white-space: nowrap">'
                f'{self.span(words)}</span>')

    def number(self, row: dict) -> str:
        return self.span(Text(*(number(row, one) for one in LANGUAGES)))

    def counts(self, rows: list[dict]) -> str:
        words = [_word(row) for row in rows]
        told = " &ensp; ".join(f"{self.badge(word)} {words.count(word)}" for word in VERDICTS if word in words)
        return f"<p>{told}</p>"

    def summary(self, rows: list[dict], *, link: bool = False) -> Iterator[str]:
        """A table per section, one line a claim; link: ids lead to the claims below."""
        heads = "".join(f"<th>{self.span(head)}</th>" for head in HEADS)
        for section, mine in _by_section(rows):
            yield self.say("h2", section)
            lines = []
            for row in mine:
                name = escape(row["id"])
                name = f'<a href="#{name}">{name}</a>' if link else name
                lines.append(f'<tr><td class="id">{name}</td><td>{self.span(_of(row, "claim"))}</td>'
                             f'<td class="verdict">{self.badge(row["verdict"])}</td>'
                             f'<td>{self.number(row)} <small>{self.span(_of(row, "what"))}</small></td>'
                             f'<td>{self.span(KIND_WORDS[row["kind"]])}</td></tr>')
            yield f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"

    def claims(self, rows: list[dict], figures: Mapping[str, dict]) -> Iterator[str]:
        for section, mine in _by_section(rows):
            yield self.say("h2", section)
            for row in mine:
                yield from self.claim(row, figures)

    def claim(self, row: dict, figures: Mapping[str, dict]) -> Iterator[str]:
        """One claim: verdict, why, every piece of evidence with its source, what reproduces it."""
        name = escape(row["id"])
        yield (f'<article id="{name}"><h3>{name} {self.span(_of(row, "claim"))} '
               f'{self.badge(row["verdict"])}</h3>')
        yield self.say("p", _of(row, "because"))
        if row["needs"]:
            yield self.say("p", Text(f"{NEEDS.en}: {row['needs']}", f"{NEEDS.zh}：{row['needs_zh']}"))
        yield f"<table>{''.join(map(self.evidence, row['evidence']))}</table>"
        again = " ".join(f"<code>{escape(command)}</code>" for command in row["commands"])
        name = escape(row["figure"])
        drawn = f' <a href="#figure-{name}">{self.span(MORE)} {name}</a>' if figures.get(row["figure"]) else ""
        yield f"<p>{self.span(AGAIN)}: {again}{drawn}</p></article>" if again or drawn else "</article>"

    def evidence(self, one: dict) -> str:
        """A line of a table: what the number is and whose, the number, n and kind."""
        source = self.say("small", _of(one, "note")) if one["note"] else f"<small>{escape(one['source'])}</small>"
        n = f" <small>n = {one['n']:,}</small>" if one["n"] else ""
        return (f"<tr><td>{self.span(_of(one, 'about'))}<br>{source}</td><td class='number'>{self.number(one)}{n}</td>"
                f"<td>{self.span(KIND_WORDS[one['kind']])}</td></tr>")


def _gallery(writer: _Writer, figures: Mapping[str, dict]) -> Iterator[str]:
    if any(figures.values()):
        yield writer.say("h2", Text("Figures", "图"))
    for name, pictures in figures.items():
        name = escape(name)
        if pictures:
            shown = "".join(f'<img class="{one}" alt="{name}" src="data:image/png;base64,{data}">'
                            for one, data in pictures.items())
            caption = f"<figcaption><code>kvlab figure {name}</code></figcaption>"
            yield f'<figure id="figure-{name}">{shown}{caption}</figure>'


def _pictures(name: str, runs: Mapping[str, Path | None]) -> dict[str, str]:
    """language -> the figure in base64; empty where the results do not allow it."""
    from kvlab.figures import figures, make
    from kvlab.figures._style import image
    study = figures[name].STUDY
    if study in runs and runs[study] is None:
        return {}
    try:
        return {one: base64.b64encode(_small(image(make(name, runs.get(study), lang=one), "png"))).decode()
                for one in LANGUAGES}
    except ValueError:                                   # a smoke run has not the rows of every figure
        return {}


def _small(png: bytes) -> bytes:
    """The picture in 64 colours: a third of the bytes, and a figure of lines and markers has no more."""
    from PIL import Image
    made = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(64).save(made, "png", optimize=True)
    return made.getvalue()


class Html(str):
    """Markup that a notebook shows as it is meant."""

    def _repr_html_(self) -> str:
        return str(self)


def summary(rows: pd.DataFrame, lang: str = "en") -> Html:
    """The ledger as tables, one a section, for a notebook."""
    return Html("".join(_Writer((checked(lang),)).summary(rows.to_dict("records"))))


def claim(rows: pd.DataFrame, name: str, lang: str = "en") -> Html:
    """One claim of a ledger with its verdict and all its evidence, for a notebook.

    Refused: an id it has not.
    """
    found = rows[rows["id"] == name].to_dict("records")
    if not found:
        raise no_claim(name, rows["id"])
    return Html("".join(_Writer((checked(lang),)).claim(found[0], {})))


def overview(rows: pd.DataFrame, lang: str = "en") -> Figure:
    """How many claims of each section stand, hold under conditions, or fall: one bar a section."""
    from kvlab.figures._language import usable
    from kvlab.figures._style import Style, drawing
    lang = usable(lang)                                 # English where no font has the characters, which is said
    sections = list(_by_section(rows.to_dict("records")))
    with drawing(lang=lang):
        figure, (ax,) = Style(lang=lang).figure(0.5 + 0.28 * len(sections))
        left = [0] * len(sections)
        for word, text in VERDICTS.items():
            counts = [sum(_word(row) == word for row in mine) for _, mine in sections]
            bars = ax.barh(range(len(sections)), counts, left=left, color=COLORS[word], label=text.of(lang))
            ax.bar_label(bars, [str(n) if n else "" for n in counts], label_type="center", fontsize=7)
            left = [a + b for a, b in zip(left, counts)]
        ax.set_yticks(range(len(sections)), [section.of(lang) for section, _ in sections])
        ax.invert_yaxis()
        ax.set_xlabel(Text("claims", "论断数").of(lang))
        figure.legend(loc="outside upper left", ncols=6, handlelength=1)
    return figure
