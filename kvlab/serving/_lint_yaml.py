"""Flags in the lists of arguments of a YAML file: Kubernetes containers, compose services, values of Helm charts.

Whose they are: the command in the list or beside it (`command: [vllm, serve]`), else the image of the same container,
else that of what encloses it. Read by indentation, since charts with template braces are no YAML.
"""
from __future__ import annotations

import re
from collections.abc import Iterator

from kvlab.serving._lint_mention import Mention
from kvlab.serving._lint_shell import COMMAND, FLAG, engine_of

KEY = re.compile(r"^(?P<dash>\s*(?:- +)*)[\"']?(?P<key>[A-Za-z_][\w.-]*)[\"']?\s*:(?=\s|$)")
OPENED = re.compile(r"^\s*(?:- +)*\w*(?:args|command|entrypoint)\s*:\s*\[", re.I)
LISTED = re.compile(r"^\s*-\s+[\"']?(--[A-Za-z][A-Za-z0-9_.-]*[A-Za-z0-9])(?=$|[=\s\"'])")
MAX_ROWS = 200                                               # of one mapping, each way
Whose = tuple[str, tuple[str, ...]]


def listed(text: str, line: int) -> list[Mention]:
    """Flags of every list of arguments, `- --flag` or in brackets, whose engine is known."""
    rows = text.split("\n")
    mappings, known, found = _Mappings(rows), {}, []
    owner, depth = None, 0                                   # the key whose list this is; of open brackets
    for index, row in enumerate(rows):
        if depth <= 0 and mappings.keys[index]:
            owner = index
        inside = depth > 0 or bool(OPENED.match(row))
        depth = depth + row.count("[") - row.count("]") if inside and index - (owner or 0) < MAX_ROWS else 0
        flags = FLAG.findall(row) if inside else [m[1]] if (m := LISTED.match(row)) else []
        if not flags or owner is None or COMMAND.search(row):
            continue
        if owner not in known:
            known[owner] = mappings.engine(owner)
        if known[owner]:
            found += [Mention("flag", name, line + index, *known[owner]) for name in flags]
    return found


class _Mappings:
    """Rows of a YAML file by indentation. starts: of each row where its text begins, after dashes or before them."""

    def __init__(self, rows: list[str]):
        self.rows = rows
        matches = [KEY.match(row) for row in rows]
        self.keys = [m["key"].lower() if m else "" for m in matches]
        self.outer = [len(row) - len(row.lstrip()) if row.strip() and not row.lstrip().startswith("#") else 10**6
                      for row in rows]
        self.columns = [len(m["dash"]) if m else -1 for m in matches]

    def engine(self, at: int) -> Whose | None:
        """Whose flags the list under the key in row `at` holds; None if nothing tells."""
        beside = dict(self._values(at))
        own = self._words(at)
        before = next((beside[key] for key in ("command", "entrypoint") if key in beside and key != self.keys[at]), "")
        if match := COMMAND.search(f"{before} {own}"):
            return engine_of(match)
        if before:
            return None                                      # another program than the image's own
        while at is not None:
            for key, words in self._values(at):
                if key in ("image", "repository"):
                    match = COMMAND.search(words)
                    return engine_of(match) if match else None
            at = self._parent(at)
        return None

    def _values(self, at: int) -> Iterator[tuple[str, str]]:
        """Keys and texts of the mapping that row `at` is a key of."""
        column = self.columns[at]
        first = at
        while self.outer[first] >= column and first > 0 and at - first < MAX_ROWS:
            if self.outer[first - 1] < column and self.columns[first - 1] != column:
                break
            first -= 1
        for row in range(first, min(len(self.rows), at + MAX_ROWS)):
            if row > at and self.outer[row] < column:
                return
            if self.columns[row] == column:
                yield self.keys[row], self._words(row)

    def _words(self, at: int) -> str:
        """What stands under the key in row `at`, without the marks of lists."""
        last = at + 1
        while last < len(self.rows) and last - at < MAX_ROWS and not (
                self.outer[last] < self.columns[at] or (self.keys[last] and self.columns[last] <= self.columns[at])):
            last += 1
        text = re.sub(r"(?m)^\s*(?:- +)*[\w.-]+\s*:(?=\s|$)|^\s*- +|[\"',\[\]]", " ", "\n".join(self.rows[at:last]))
        return re.sub(r"\s+", " ", text)

    def _parent(self, at: int) -> int | None:
        """The nearest key above that stands further left."""
        return next((row for row in range(at - 1, max(at - 5 * MAX_ROWS, -1), -1)
                     if 0 <= self.columns[row] < self.columns[at]), None)
