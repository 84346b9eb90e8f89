"""Texts that are there without a network: Python's own documentation, licences, manual pages, a user's file.

A text is named kind:name. The same name may be another text on another machine (pydoc topics differ between versions
of Python), so whoever scores one records its sha256.
"""
from __future__ import annotations

import gzip
import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvlab.registry import no_such

LICENCES = Path("/usr/share/common-licenses")               # Debian and its descendants
MANUALS = Path("/usr/share/man")
KINDS = ("pydoc:TOPIC", "licence:NAME", "man:PAGE", "file:PATH")
LARGEST = 32 * 2**20                                        # bytes of a file; a model reads some KiB of it
SHORTEST = 120                                              # characters; shorter paragraphs are headings and code


class TextSource(NamedTuple):
    """A text by name, and why it is not there (None: it is)."""
    name: str
    about: str
    why_not: str | None = None


def texts() -> list[TextSource]:
    """The texts of this machine.

    Manual pages and files are too many to list: one line each says how they are named.
    """
    found = [TextSource(f"pydoc:{topic}", f"Python {sys.version_info.major}.{sys.version_info.minor} documentation")
             for topic in sorted(_topics())]
    if not found:
        found = [TextSource("pydoc:TOPIC", "Python's documentation", "this Python was built without pydoc_data")]
    licences = sorted(_licences())
    found += [TextSource(f"licence:{name}", "licence text") for name in licences]
    if not licences:
        found.append(TextSource("licence:NAME", "licence text", f"there is no folder {LICENCES}"))
    pages = MANUALS.is_dir() and next(MANUALS.glob("man[1-9]*/*"), None)
    found.append(TextSource("man:PAGE", "manual page, such as man:bash",
                            None if pages else f"there are no pages in {MANUALS}"))
    return [*found, TextSource("file:PATH", "a text file of yours, in UTF-8")]


def text(name: str) -> str:
    """The text of that name as running prose.

    pydoc, licence, man: paragraphs are unwrapped, those shorter than 120 characters (headings, lines of code) left out.
    file: as it is, in UTF-8, 32 MiB at most. Raises KeyError for an unknown name (with a near match) and ValueError for
    what is no text.
    """
    if not isinstance(name, str):
        raise ValueError(f"a text is named {', '.join(KINDS)}; got {type(name).__name__}")
    if "\n" in name or len(name) > 4096:
        raise ValueError(f"a text is given by its name ({', '.join(KINDS)}), and this is {len(name):,} characters of "
                         "text; write it to a file and give file:PATH")
    kind, colon, rest = name.partition(":")
    if kind == "pydoc" and rest in (topics := _topics()):
        return unwrap(topics[rest])
    if kind == "licence" and rest in (licences := _licences()):
        return unwrap(_read(licences[rest]))
    if kind == "man" and colon:
        return unwrap(_plain(_read(_page(rest)), rest))
    if kind == "file" and colon:
        return _read(Path(rest))
    if kind in ("pydoc", "licence"):
        absent = [source.why_not for source in texts() if source.why_not and source.name.startswith(kind)]
        if absent:
            raise KeyError(f"no text {name!r}: {absent[0]}; take one of another kind: {', '.join(KINDS)}")
    if colon:
        raise no_such("text", name, [source.name for source in texts() if not source.why_not])
    raise KeyError(f"no text named {name!r}; texts are named {', '.join(KINDS)}")


def sha256(content: str) -> str:
    """Hash of a text's UTF-8 bytes, which says whether two machines scored the same one."""
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()


def unwrap(content: str, shortest: int = SHORTEST) -> str:
    """Paragraphs as one line each, with an empty line between them; those shorter than that are left out."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n[ \t\r]*\n", content))
    return "\n\n".join(paragraph for paragraph in paragraphs if len(paragraph) >= shortest)


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:                                         # some distributions leave it out
        return {}
    return topics


def _licences() -> dict[str, Path]:
    return {path.name: path for path in LICENCES.glob("*") if path.is_file()} if LICENCES.is_dir() else {}


def _read(path: Path) -> str:
    """A file as UTF-8, unpacked where its name ends in .gz."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            content = file.read(LARGEST + 1)
    except FileNotFoundError:
        raise KeyError(f"no text file {str(path)!r}; give the path of a file in UTF-8") from None
    except (OSError, EOFError) as error:
        raise ValueError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > LARGEST:
        raise ValueError(f"{str(path)!r} is larger than {LARGEST // 2**20} MiB; give a part of it")
    if b"\0" in content:
        raise ValueError(f"{str(path)!r} is not a text: it holds NUL bytes; give a file in UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} is not in UTF-8 (byte {error.start}); convert it, for example with "
                         "iconv -t UTF-8") from None


def _page(name: str) -> Path:
    """The file of a manual page, of the lowest section unless the name says one: bash or bash.1."""
    if not re.fullmatch(r"[\w.+:\[-]+", name):
        raise KeyError(f"no manual page {name!r}; give its name, as in man:bash or man:bash.1")
    for section in sorted(MANUALS.glob("man[1-9]*")):
        for path in sorted(section.iterdir()):
            file = path.name.removesuffix(".gz")
            if file == name or file.startswith(name + ".") and re.fullmatch(r"[1-9]\w*", file[len(name) + 1:]):
                return path
    known = {path.name.removesuffix(".gz").rpartition(".")[0] for path in MANUALS.glob("man[1-9]*/*")
             if path.name[:1].lower() == name[:1].lower()}
    if not known:
        raise KeyError(f"no manual page {name!r} in {MANUALS}")
    raise no_such("text", f"man:{name}", [f"man:{page}" for page in known])


_ESCAPES = {"\\-": "-", "\\e": "\\", "\\ ": " ", "\\~": " ", "\\&": "", "\\|": "", "\\^": "", "\\/": "", "\\c": "",
            "\\'": "'", "\\`": "`", "\\.": ".", "\\:": "", "\\%": "", "\\0": " "}
_NAMED = {"aq": "'", "dq": '"', "lq": "“", "rq": "”", "oq": "‘", "cq": "’", "em": "—", "en": "–", "bu": "•",
          "co": "©", "rs": "\\", "ti": "~", "ha": "^", "ga": "`", "hy": "-", "bv": "|"}
_BREAKS = {"PP", "P", "LP", "TP", "IP", "HP", "SH", "SS", "sp", "br", "RS", "RE", "TQ"}
_SHOWN = {"B", "I", "SM", "SB", "R"}
_JOINED = {"BR", "BI", "IB", "IR", "RB", "RI"}
_CODE = {"nf": "fi", "EX": "EE", "TS": "TE", "EQ": "EN", "PS": "PE", "ig": "."}


def _plain(roff: str, page: str) -> str:
    """A manual page in the macros of man(7) as plain text; headings, tables and code are left out.

    A page that only points to another one, or that is written in mdoc(7), is refused (ValueError).
    """
    return "\n".join(_lines(roff, page))


def _lines(roff: str, page: str) -> Iterator[str]:
    until = None                                                # the request that ends what is being left out
    for line in roff.splitlines():
        if not line.startswith((".", "'")):
            if until is None:
                yield _unescaped(line)
            continue
        macro, _, rest = line[1:].strip().partition(" ")
        if until is not None:
            until = None if macro == until else until
        elif macro == "so" or macro in ("Dd", "Sh"):
            why = f"it only points to {rest.strip()}" if macro == "so" else "it is written in mdoc, not in man macros"
            raise ValueError(f"kvlab cannot read the manual page {page!r}: {why}; take another, such as man:bash")
        elif macro in ("de", "de1", "am"):
            until = "."
        elif macro in _CODE:
            until = _CODE[macro]
            yield ""
        elif macro in _BREAKS:
            yield ""
        elif macro in _SHOWN | _JOINED and rest:
            words = [a or b for a, b in re.findall(r'"([^"]*)"|(\S+)', rest)]
            yield _unescaped(("" if macro in _JOINED else " ").join(words))


def _unescaped(line: str) -> str:
    """The line without roff's escapes for fonts, sizes and special characters."""
    line = re.sub(r'\\".*', "", line)
    line = re.sub(r"\\f(?:\(..|\[[^]]*\]|.)|\\s[-+]?\d+|\\[mFY]\[[^]]*\]|\\[hvw]'[^']*'", "", line)
    line = re.sub(r"\\[(*](?:\((..)|(..))|\\\[(\w+)\]", lambda m: _NAMED.get(m[1] or m[2] or m[3], ""), line)
    return re.sub(r"\\.", lambda m: _ESCAPES.get(m[0], m[0][1]), line)
