"""Reading what a person points the name linter at, and taking it apart by kind. Content is data: nothing is run.

Folders are walked without following links; of what lies in them only files of the kinds in SUFFIXES are read.
"""
from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from kvlab.serving._lint_mention import STRAIGHT, Mention, environment, moved
from kvlab.serving._lint_metrics import metrics
from kvlab.serving._lint_python import calls_in_text, python
from kvlab.serving._lint_shell import commands, dockerfile
from kvlab.serving._lint_yaml import listed

SUFFIXES = {".py", ".ipynb", ".md", ".mdx", ".rst", ".txt", ".sh", ".bash", ".env", ".yaml", ".yml", ".json", ".toml",
            ".dockerfile", ".service", ".tpl"}
NAMES = {"Dockerfile", "Containerfile", "Makefile", ".env"}
SKIPPED = {"node_modules", "__pycache__", "site-packages"}
MAX_BYTES = 4 * 2**20
MAX_FILES = 10_000
MAX_NAMES = 5_000
TIMED = re.compile(r"^([ \t]*)%(?:time|timeit|prun)[ \t]+(?!-)", re.M)                   # magics before a statement
FENCE = re.compile(r"^[ \t>]*(```+|~~~+)[ \t]*\{?\.?([\w+-]*)[^\n]*$")


def files(place: Path) -> Iterator[Path]:
    """The file itself, or the files of a folder in order; ValueError for what is neither."""
    try:
        mode = os.stat(place).st_mode
    except OSError as error:
        raise ValueError(f"cannot read {place}: {error.strerror}; give a file or a folder") from None
    if stat.S_ISREG(mode):
        yield place
    elif stat.S_ISDIR(mode):
        count = 0
        for folder, folders, found in os.walk(place):
            folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in SKIPPED)
            for name in sorted(found):
                path = Path(folder, name)
                wanted = path.suffix.lower() in SUFFIXES or name in NAMES or name.startswith("Dockerfile.")
                if wanted and path.is_file() and not path.is_symlink():
                    count += 1
                    if count > MAX_FILES:
                        raise ValueError(f"{place} holds more than {MAX_FILES:,} files; give a folder further down")
                    yield path
    else:
        raise ValueError(f"{place} is neither a file nor a folder")


def text_of(path: Path) -> str:
    """A file's text; ValueError with one sentence for one that is too large, binary or not UTF-8."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise ValueError(f"{path} is larger than {MAX_BYTES // 2**20} MiB; split it, or lint the part with the names")
    if b"\0" in data:
        raise ValueError(f"{path} is binary; give source, text, YAML or JSON")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start:,}); convert it, for example with iconv") from None


def broken_json(path: Path, text: str) -> str:
    """One sentence if a file that is called .json is none; its names are still found as in any text."""
    if path.suffix.lower() != ".json":
        return ""
    try:
        json.loads(text)
    except RecursionError:
        return f"{path} is nested too deeply for JSON; it was read as text"
    except ValueError as error:
        return f"{path} is broken JSON ({error}); it was read as text, and names may be missed"
    return ""


def mentions(path: Path, text: str) -> list[Mention]:
    """Every name in a file, by its kind; sorted by line."""
    suffix = path.suffix.lower()
    known: dict[str, str] = {}
    if suffix == ".ipynb":
        found = _notebook(path, text)
    elif suffix == ".py":
        found = python(text, 1, known)
        found = _plain(text, 1, known) if found is None else found
    elif suffix in (".yaml", ".yml", ".json", ".tpl"):
        rules = bool(re.search(r"[\"']?\bexpr[\"']?\s*:", text))
        found = environment(text, 1) + metrics(text, 1, promql_file=rules) + commands(text, 1) + listed(text, 1)
    else:
        found = _document(text, known) + (dockerfile(text) if "dockerfile" in path.name.lower() else [])
    if len(found) > MAX_NAMES:
        raise ValueError(f"{path} holds more than {MAX_NAMES:,} names of engines; split it")
    return sorted(dict.fromkeys(found), key=lambda mention: mention.line)


def _plain(text: str, line: int, known: dict[str, str]) -> list[Mention]:
    """Prose, shell and code that does not parse. Curly quotes are read as the straight ones they were."""
    text = text.translate(STRAIGHT)
    return environment(text, line) + metrics(text, line) + commands(text, line) + calls_in_text(text, line, known)


def _document(text: str, known: dict[str, str]) -> list[Mention]:
    """Markdown and plain text: fenced Python by its syntax tree, the rest as text."""
    found: list[Mention] = []
    rows, rest = text.split("\n"), []
    index = 0
    while index < len(rows):
        opened = FENCE.match(rows[index])
        rest.append(rows[index] if not opened else "")
        index += 1
        if not opened:
            continue
        body, first = [], index + 1
        while index < len(rows) and not rows[index].lstrip(" \t>").startswith(opened[1]):
            body.append(rows[index])
            index += 1
        code = _dedented(body)
        taken = None
        if opened[2].lower() in ("", "python", "python3", "py", "pycon"):
            taken = python(code.translate(STRAIGHT), first, known)
        elif opened[2].lower() in ("yaml", "yml"):
            found += listed(code, first)
        if taken is None:
            rest += body
        else:
            found += taken
            rest += [""] * len(body)
        rest += [""] * (index < len(rows))
        index += 1
    return found + _plain("\n".join(rest), 1, known)


def _dedented(rows: list[str]) -> str:
    margin = min((len(row) - len(row.lstrip()) for row in rows if row.strip()), default=0)
    return "\n".join(row[margin:] for row in rows)


def _notebook(path: Path, text: str) -> list[Mention]:
    """Source cells of a notebook, with lines counted in the file. ValueError if it is no notebook."""
    try:
        cells = json.loads(text)["cells"]
        sources = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{path} is no notebook: it is not JSON with cells that have a source; "
                         "save it again in Jupyter") from None
    found, known, rows, at = [], {}, text.split("\n"), 0
    for kind, source in sources:
        first = json.dumps(source.split("\n")[0], ensure_ascii=False)[1:-1]
        while first and at < len(rows) and first not in rows[at]:
            at += 1
        line = at + 1 if at < len(rows) else 1
        at = at if at < len(rows) else 0
        if kind != "code":
            found += [moved(m, line) for m in _document(source, known)]
            continue
        shell = "\n".join(row.lstrip()[1:] if row.lstrip()[:1] in "!%" else "" for row in source.split("\n"))
        code = TIMED.sub(r"\1", source)
        code = "\n".join("pass" if row.lstrip()[:1] in ("!", "%") else row for row in code.split("\n"))
        found += environment(shell, line) + commands(shell, line)
        taken = python(code, line, known)
        found += _plain(code, line, known) if taken is None else taken
    return found
