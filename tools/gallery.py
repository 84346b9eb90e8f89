"""Write docs/gallery.md and its pictures: `python tools/gallery.py`; `--page` leaves the pictures as they are."""
from __future__ import annotations

import sys
from pathlib import Path

from kvlab.figures import make
from kvlab.figures._gallery import Entry, entries, thumbnail
from kvlab.figures._style import image

DOCS = Path(__file__).parents[1] / "docs"
PICTURES = Path("figures", "gallery")
INTRO = """# Gallery

Every figure that kvlab draws, from the results it ships: `kvlab ls figures` lists them, `kvlab figure NAME` draws one
here, and `kvlab figure --all --out DIR` all of them with a page to look through. A figure is drawn from stored rows and
never measures; the CSV beside it holds exactly the rows that it shows. `--run RUN` takes your own results instead,
`--venue neurips` (icml, iclr, acl, ieee, acm, slides) sets it for a paper, `--lang zh` in Chinese. This page is written
by `python tools/gallery.py`.
"""


def page(found: list[Entry]) -> str:
    """The gallery in Markdown: the figures of each study, those of the catalogue first."""
    parts = [INTRO]
    for study in dict.fromkeys(["", *sorted(one.study for one in found)]):
        parts.append(f"## {study or 'From the catalogue'}\n")
        parts += [f"### {one.name}\n\n![{one.shows}]({(PICTURES / one.name).as_posix()}.png)\n\n{one.shows}  \n"
                  f"`{one.command}`; {', '.join(one.kinds)}\n" for one in found if one.study == study]
    return "\n".join(parts)


def main(pictures: bool) -> None:
    found = list(entries())
    (DOCS / "gallery.md").write_text(page(found), encoding="utf-8")
    if pictures:
        (DOCS / PICTURES).mkdir(parents=True, exist_ok=True)
        for one in found:
            (DOCS / PICTURES / f"{one.name}.png").write_bytes(thumbnail(image(make(one.name), "png")))
            print(one.name)


if __name__ == "__main__":
    main("--page" not in sys.argv[1:])
