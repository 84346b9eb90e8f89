"""A figure as pgf: a picture that LaTeX reads as source, so that its text is set in the document's own font."""
from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.figures._style import drawing
from kvlab.record._tex import escaped, one_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvlab.figures._caption import Caption

ENGINES = ("pdflatex", "xelatex", "lualatex")                # in the order in which they are tried: journals' own first


def engine() -> str:
    """The LaTeX that measures the text of a pgf picture; ValueError where there is none."""
    found = next(filter(shutil.which, ENGINES), None)
    if found is None:
        raise ValueError(f"format pgf has its text measured by LaTeX, and none of {', '.join(ENGINES)} is on the PATH; "
                         "install TeX Live (Debian, Ubuntu: apt install texlive-latex-recommended texlive-pictures; "
                         "macOS: brew install --cask mactex), or choose --format pdf")
    return found


def pgf(figure: Figure, name: str, caption: Caption | None = None) -> dict[str, bytes]:
    """File name -> content: the picture `<name>.pgf` for LaTeX's \\input, and the bitmaps it names, if it has some.

    The document's own font is used. Refused (ValueError): no LaTeX here, text that LaTeX cannot set.
    """
    import matplotlib
    about = "".join(f"%% {one_line(line)}\n" for line in (caption.title, *caption.lines)) if caption else ""
    with tempfile.TemporaryDirectory() as folder, drawing(getattr(figure, "venue", None)), _escaping(), _light(
            figure):
        matplotlib.rcParams.update({"pgf.texsystem": engine(), "pgf.rcfonts": False})
        path = Path(folder) / f"{name}.pgf"
        try:
            figure.savefig(path, format="pgf", backend="pgf")
        except (ValueError, RuntimeError) as error:
            reason = re.search(r"^! .*", str(error), re.M)
            raise ValueError(f"LaTeX ({engine()}) cannot set the text of figure {name}: "
                             f"{reason.group()[2:] if reason else str(error).splitlines()[0]}; choose --format pdf"
                             ) from None
        made = {one.name: one.read_bytes() for one in sorted(Path(folder).iterdir())}
    made[path.name] = about.encode() + re.sub(rb"^%% Matplotlib used the following preamble\n(%%.*\n)*", b"",
                                              made[path.name], flags=re.M)
    return made


@contextlib.contextmanager
def _light(figure: Figure) -> Iterator[None]:
    """Sparse dots instead of dense ones: LaTeX draws each anew, which took it a minute."""
    from matplotlib.patches import Patch
    dense = [(patch, patch.get_hatch()) for patch in figure.findobj(Patch) if ".." in (patch.get_hatch() or "")]
    for patch, _ in dense:
        patch.set_hatch(".")
    try:
        yield
    finally:
        for patch, hatch in dense:
            patch.set_hatch(hatch)


@contextlib.contextmanager
def _escaping() -> Iterator[None]:
    """matplotlib's pgf backend takes text for LaTeX source; here it is text, as everywhere else in a figure."""
    from matplotlib.backends import backend_pgf
    plain: Any = backend_pgf.RendererPgf

    class Escaping(plain):
        def draw_text(self, gc, x, y, s, prop, angle, ismath=False, mtext=None):
            super().draw_text(gc, x, y, escaped(s), prop, angle, ismath, mtext)

        def get_text_width_height_descent(self, s, prop, ismath):
            return super().get_text_width_height_descent(escaped(s), prop, ismath)
    setattr(backend_pgf, "RendererPgf", Escaping)  # noqa: B010
    try:
        yield
    finally:
        setattr(backend_pgf, "RendererPgf", plain)  # noqa: B010
