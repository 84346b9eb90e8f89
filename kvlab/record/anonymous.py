"""Results without what says whose they are: for papers that are reviewed blind.

What a number is about stays: hardware models, dates, variants. A run's id goes, because published results carry it.
"""
from __future__ import annotations

import getpass
import platform
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

_HEX = "[0-9a-fA-F]"
_OTHERS = {"root", "user", "admin", "ubuntu", "runner", "localhost"}              # names that are nobody's
# what it is called -> (what it looks like, what stands in its place); in this order
_LOOKS = {
    "URLs of servers": (r"https?://(?:[\w-]+|(?:\d{1,3}\.){3}\d{1,3}|[\w.-]+(?=:\d))(?::\d+)?(?=[/\s]|$)\S*", "[URL]"),
    # of a user's variant, file.py:Class: its class stays, as its name does
    "files of variants": (r'(?<=")[^"]*\.py(?=:\w)|[\w.@+~/-]+\.py(?=:\w)', "[file]"),
    "git commits": (rf"(?<=\bcommit )\W*{_HEX}{{7,40}}\b|\b{_HEX}{{40}}\b", "[commit]"),
    "device UUIDs": (rf"\b(?:GPU-|MIG-)?{_HEX}{{8}}-(?:{_HEX}{{4}}-){{3}}{_HEX}{{12}}\b", "[UUID]"),
    "PCI addresses": (rf"\b{_HEX}{{4,8}}:{_HEX}{{2}}:{_HEX}{{2}}\.{_HEX}\b", "[PCI address]"),
    "serial numbers": (r"(?i)\bserial(?:[ _]?(?:number|no\.?))?\W{0,3}(?=[A-Z0-9-]*\d)[A-Z0-9-]{5,}\b",
                       "[serial number]"),
    "e-mail addresses": (r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b", "[e-mail]"),
    "network addresses": (r"\b(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?\b", "[address]"),
    # the system's own folders are alike on every machine
    "paths": (r"(?<![\w/.:])(?:~[\w.-]*|/(?!(?:sys|proc|dev|usr|etc|bin|lib)\b)[\w.@+-]+)(?:/[\w.@+-]+)+/?"
              r"|\b[A-Za-z]:\\[^\s'\"]+", "[path]"),
}
# a source that is cited; with a port it is somebody's server
_PUBLIC = re.compile(r"(https?://[\w-]+(?:\.[\w-]+)*\.[A-Za-z]{2,}(?![\w.-]*:\d)\S*)")
NEVER = "the git commit, device serial numbers, user and host names of the manifest are not part of it"


class Anonymous:
    """Takes out of tables what identifies, and remembers what that was.

    One serves all parts of a table.
    """

    def __init__(self):
        self._runs: dict[str, str] = {}
        self._found: dict[str, set[str]] = {}
        node = platform.node()
        names = {node, node.partition(".")[0], *((getpass.getuser(), Path.home().name) if _has_user() else ())}
        names = sorted((name for name in names if len(name) > 2 and name.lower() not in _OTHERS), key=len, reverse=True)
        self._looks = {what: (re.compile(look), instead) for what, (look, instead) in _LOOKS.items()}
        if names:
            self._looks["user and host names"] = (re.compile(rf"\b(?:{'|'.join(map(re.escape, names))})\b"), "[name]")

    def table(self, table: pd.DataFrame) -> pd.DataFrame:
        """The result table with run-1, run-2, … for runs, and words in brackets for what identified in its texts."""
        for run in table["run_id"].dropna().unique():
            if run and run not in self._runs:
                self._runs[run] = f"run-{len(self._runs) + 1}"
        texts = {name: table[name] for name in table if table[name].dtype == "string"}
        return table.assign(**{name: values.map({one: self.text(one) for one in values.dropna().unique()})
                               .astype("string") for name, values in texts.items()})

    def text(self, text: str) -> str:
        """The text without what identifies; public URLs, which are sources, stay."""
        parts = _PUBLIC.split(text)
        return "".join(part if at % 2 else self._cut(part) for at, part in enumerate(parts))

    def _cut(self, text: str) -> str:
        for run, name in self._runs.items():
            text = text.replace(run, name)
        for what, (look, instead) in self._looks.items():
            found = look.findall(text)
            if found:
                self._found.setdefault(what, set()).update(found)
                text = look.sub(instead, text)
        return text

    @property
    def sentence(self) -> str:
        """What was taken out, and what was not there to be taken out."""
        counts = Counter({what: len(found) for what, found in self._found.items()})
        told = [f"run ids ({len(self._runs)}, now {', '.join(self._runs.values())})"] if self._runs else []
        told += [f"{what} ({count})" for what, count in counts.items()]
        return f"anonymous: dropped {', '.join(told) or 'nothing'}; {NEVER}"


def _has_user() -> bool:
    try:
        return bool(getpass.getuser())
    except (OSError, KeyError):                          # a container whose user has no name
        return False
