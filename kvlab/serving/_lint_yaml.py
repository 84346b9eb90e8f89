"""Flags in the arguments of a YAML file, lists and strings: Kubernetes containers, compose services, Helm values.

Whose they are: the command in the arguments or beside them (`command: [vllm, serve]`), else the image of the same
container, else that of what encloses it. Read by indentation, since charts with template braces are no YAML.
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from sys import intern

from kvlab.serving._lint_mention import Mention
from kvlab.serving._lint_shell import COMMAND, FLAG, commands, engine_of, flags_before_end

KEY = re.compile(r"^(?P<dash>\s*(?:- +)*)[\"']?(?P<key>[A-Za-z_][\w.-]*)[\"']?\s*:(?=\s|$)")
OPENED = re.compile(r"^\s*(?:- +)*\w*(?:args|command|entrypoint)\s*:\s*\[", re.I)
STRING = re.compile(r"^\s*(?:- +)*[\"']?\w*(?:args|command|entrypoint)[\"']?\s*:(?=\s|$)\s*(?!\[|\{|&|\*)(?P<text>.*)$",
                    re.I)
BLOCK = re.compile(r"[>|][+-]?\d?[+-]?(\s+#.*)?$")
ITEM = re.compile(r"^(?P<dash>\s*(?:- +)+)[>|][+-]?\d?[+-]?\s*$")          # of a list, as a block of lines
SHELL = re.compile(r"(?<![\w.-])(?:ba|z|da|a)?sh\b")                        # reads a script: its lines are commands
PROGRAM = re.compile(r"\s*(?:[>|][+-]?\s+)?[\"']?(?:[./]|(?:python[\d.]*|(?:ba|z|da|a)?sh|uvx?|pip|env|exec|sleep|"
                     r"tail|cat|echo|ray|torchrun|nvidia-smi|huggingface-cli|hf|curl|wget|tritonserver)(?![\w/.-]))")
LISTED = re.compile(r"^\s*-\s+[\"']?(--[A-Za-z][A-Za-z0-9_.-]*[A-Za-z0-9])(?=$|[=\s\"'])")
MAX_ROWS = 200                                               # of one mapping, each way
Whose = tuple[str, tuple[str, ...]]


def listed(text: str, line: int) -> list[Mention]:
    """Flags of every list of arguments, `- --flag` or in brackets, and of every string whose engine is known."""
    rows = text.split("\n")
    mappings, known = _Mappings(rows), {}
    found = [mention for at, last, first in _strings(rows, mappings)
             for mention in _string(rows, mappings, at, last, first, line)]
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


def _strings(rows: list[str], mappings: _Mappings) -> Iterator[tuple[int, int, int]]:
    """Arguments that are a string: the row of its key, the row behind its last one and its first row."""
    owner = None
    for index, row in enumerate(rows):
        if mappings.keys[index]:
            owner = index
        if (item := ITEM.match(row)) and owner is not None and STRING.match(rows[owner]):
            yield owner, mappings.below(index, len(item["dash"]) - 2), index + 1
        elif (match := STRING.match(row)) and mappings.keys[index]:
            last = mappings.below(index, mappings.columns[index])
            block = bool(BLOCK.match(match["text"]))
            begun = next((body for body in rows[index + 1:last] if body.strip()), "")
            if block or match["text"].strip() or not re.match(r"\s*(?:-(?:\s|$)|\[|#)|.*:(?:\s|$)", begun):
                yield index, last, index + (block or not match["text"].strip())


def _string(rows: list[str], mappings: _Mappings, at: int, last: int, first: int, line: int) -> list[Mention]:
    """Flags of one string: its rows joined, unless they are a shell's script, which is read line by line elsewhere."""
    body = [re.sub(r"\\\s*$", "", row) for row in rows[first:last]]
    if first == at:
        body[0] = STRING.match(rows[at])["text"]
    text = " ".join(body)
    script = first > at and "|" in rows[first - 1] and SHELL.search(f"{mappings.before(at)} {mappings.words(at)}")
    if script or not FLAG.search(text):
        return []
    numbers = [line + first + index for index, row in enumerate(body) for _ in range(len(row) + 1)]
    if COMMAND.search(text):
        return commands(text, numbers)
    whose = mappings.engine(at)
    return flags_before_end(text, whose, numbers) if whose else []


class _Mappings:
    """Rows of a YAML file by indentation. starts: of each row where its text begins, after dashes or before them."""

    def __init__(self, rows: list[str]):
        self.rows = rows
        self.keys, self.columns, self._words = [], [], {}
        for row in rows:                                     # a list of matches would take ten times the text
            match = KEY.match(row)
            self.keys.append(intern(match["key"].lower()) if match else "")
            self.columns.append(len(match["dash"]) if match else -1)
        self.outer = [len(row) - len(row.lstrip()) if row.strip() and not row.lstrip().startswith("#") else 10**6
                      for row in rows]

    def engine(self, at: int) -> Whose | None:
        """Whose flags the list under the key in row `at` holds; None if nothing tells."""
        own, before = self.words(at), self.before(at)
        if match := COMMAND.search(f"{before} {own}"):
            return engine_of(match)
        if before or PROGRAM.match(own):
            return None                                      # another program than the image's own
        while at is not None:
            for key, words in self._values(at):
                if key in ("image", "repository"):
                    match = COMMAND.search(words)
                    return engine_of(match) if match else None
            at = self._parent(at)
        return None

    def before(self, at: int) -> str:
        """What the command or the entrypoint beside the key in row `at` says; "" if there is none."""
        beside = dict(self._values(at))
        return next((beside[key] for key in ("command", "entrypoint") if key in beside and key != self.keys[at]), "")

    def below(self, at: int, column: int) -> int:
        """The row behind those under row `at` that stand further right than `column`."""
        last = at + 1
        while last < len(self.rows) and last - at < MAX_ROWS and (
                not self.rows[last].strip() or len(self.rows[last]) - len(self.rows[last].lstrip()) > column):
            last += 1
        return last

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
                yield self.keys[row], self.words(row)

    def words(self, at: int) -> str:
        """What stands under the key in row `at`, without the marks of lists."""
        if at in self._words:                                # every key beside it asks
            return self._words[at]
        last = at + 1
        while last < len(self.rows) and last - at < MAX_ROWS and not (
                self.outer[last] < self.columns[at] or (self.keys[last] and self.columns[last] <= self.columns[at])):
            last += 1
        text = re.sub(r"(?m)^\s*(?:- +)*[\w.-]+\s*:(?=\s|$)|^\s*- +|[\"',\[\]]", " ", "\n".join(self.rows[at:last]))
        return self._words.setdefault(at, re.sub(r"\s+", " ", text))

    def _parent(self, at: int) -> int | None:
        """The nearest key above that stands further left."""
        return next((row for row in range(at - 1, max(at - 5 * MAX_ROWS, -1), -1)
                     if 0 <= self.columns[row] < self.columns[at]), None)
