"""Every figure from shipped rows, side by side: files, a page of them, and what each shows and takes."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from kvlab.figures._make import _table, figures, save, shows
from kvlab.record.export import atomic_write

WIDTH = 560                            # pixels of a small picture
_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>kvlab: figures</title>
<style>body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#222}
figure{margin:2.5rem 0;border-top:1px solid #ddd;padding-top:1rem}img{max-width:100%;height:auto}
code{background:#f3f3f3;padding:.1em .3em}figcaption{color:#444}</style>
"""


class Entry(NamedTuple):
    """One figure: its name, what it shows, how to draw it, of which study, and the kinds of its numbers."""
    name: str
    shows: str
    command: str
    study: str
    kinds: tuple[str, ...]

    @property
    def words(self) -> str:
        """Where its rows are from, and of which kinds they are."""
        origin = f"study {self.study}" if self.study else "from the catalogue"
        return f"{origin}; {', '.join(self.kinds)}"


def entries(more: str = "") -> Iterator[Entry]:
    """Every figure by name. more: what stands behind its name in the command."""
    from kvlab.record.reading import KINDS
    for name in figures:
        module = figures[name]
        there = set(module.select(_table(name, module.STUDY, None))["kind"])
        kinds = tuple(kind for kind in KINDS if kind in there)
        yield Entry(name, f"{shows(name)}.", f"kvlab figure {name}{more}", module.STUDY or "", kinds)


def write_all(out: Path, formats: Sequence[str], *, venue: str | None = None, columns: int = 1,
              anonymous: bool = False, lang: str = "en") -> Iterator[Path]:
    """Draw every figure from shipped rows into the folder, then `index.html`, a page of them; the paths as they come.

    Refused: what `save` refuses.
    """
    more = (f" --venue {venue}" if venue else "") + (f" --columns {columns}" if columns > 1 else "")
    more += f" --lang {lang}" if lang != "en" else ""
    for name in figures:
        yield from save(name, None, out, formats, venue=venue, columns=columns, anonymous=anonymous, lang=lang)
    parts = [_HEAD, f"<h1>Figures{f' for {venue}' if venue else ''}</h1>"]
    for one in entries(more):
        made = [wanted for wanted in formats if (out / f"{one.name}.{wanted}").exists()]
        shown = next((wanted for wanted in ("png", "svg") if wanted in made), None)
        picture = f'<img loading="lazy" alt="{escape(one.shows)}" src="{one.name}.{shown}">' if shown else ""
        files = " ".join(f'<a href="{one.name}.{wanted}">{wanted}</a>' for wanted in (*made, "csv"))
        parts.append(f'<figure id="{one.name}">{picture}<figcaption><b>{escape(one.shows)}</b> {escape(one.words)}.<br>'
                     f"<code>{escape(one.command)}</code> {files}</figcaption></figure>")
    atomic_write(out / "index.html", "\n".join([*parts, "</html>\n"]).encode())
    yield out / "index.html"


def thumbnail(picture: bytes) -> bytes:
    """A small png of a png: WIDTH pixels wide, of 64 colours, which is enough for lines on white."""
    import io

    from PIL import Image
    with Image.open(io.BytesIO(picture)) as full:
        small = full.convert("RGB").resize((WIDTH, round(full.height * WIDTH / full.width)), Image.Resampling.LANCZOS)
    content = io.BytesIO()
    small.quantize(64, dither=Image.Dither.NONE).save(content, "png", optimize=True)
    return content.getvalue()
