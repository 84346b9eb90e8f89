"""What this machine has for kvlab, what is wrong with it, and where each metric comes from here. No network."""
from __future__ import annotations

import getpass
import re
import socket
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

from kvlab.doctor import _gpus, _machine, _metrics, _software
from kvlab.doctor._check import Check, deadline
from kvlab.record.environment import portable

GROUPS = ("software", "notebooks", "machine", "libraries", "commands", "metrics")
# in the order of their lines; each is asked by itself, and one that fails is a line as well
CHECKS: tuple[Callable[[], Check | Iterable[Check]], ...] = (
    _software.versions, _software.torch, _software.gpus, _gpus.nvml, _software.pynvml, _software.chinese,
    _software.encoding, _software.kernel, _software.jupyter, _machine.processor, _machine.clocks, _gpus.gpus,
    _machine.load, _machine.memory, _machine.disk, _machine.writable, _machine.counters, _software.libraries,
    _machine.commands, _metrics.metrics)


def examine() -> list[Check]:
    """All checks, by group. Whatever one of them raises is its line, and so is what hangs; nothing raises here."""
    for known in (_software.facts, _software.torch_child):
        known.forget()
    # all at once: none waits behind one that hangs
    with deadline.running(), ThreadPoolExecutor(max_workers=len(CHECKS)) as pool:
        found = [check for checks in pool.map(_asked, CHECKS) for check in checks]
    return sorted(found, key=lambda check: GROUPS.index(check.group))


def _asked(ask: Callable) -> list[Check]:
    try:
        answer = ask()
        return [answer] if isinstance(answer, Check) else list(answer)
    except Exception as error:
        group = {"_software": "software", "_metrics": "metrics"}.get(ask.__module__.split(".")[-1], "machine")
        return [Check(group, ask.__name__.replace("_", " "), "problem",
                      f"could not be checked: {type(error).__name__}: {error}")]


def next_steps(found: list[Check], most: int = 3) -> list[str]:
    """What helps most, first what is broken. Libraries and metrics that are merely absent are no task."""
    problems = [check for check in found if check.status == "problem" and check.next_step]
    notes = [check for check in found if check.status == "note" and check.next_step
             and check.group not in ("libraries", "metrics")]
    steps = dict.fromkeys(f"{check.name}: {check.next_step}" for check in problems + notes)
    return list(steps)[:most] or ["nothing is in the way; try: kvlab run memory_wall --size smoke"]


def plain(found: list[Check]) -> dict:
    """All checks and the next steps as plain values, without paths, user or host."""
    found = [_anonymous(check) for check in found]
    return dict(checks=[asdict(check) for check in found], next_steps=next_steps(found))


def as_markdown(found: list[Check]) -> str:
    """Tables to paste in a bug report, without paths, user or host."""
    from kvlab.show import printable
    found = [_anonymous(check) for check in found]
    lines = ["### kvlab doctor", ""]
    for group, names, check in _grouped(found):
        if group:
            lines += ["", f"**{group}**", "", "| what | status | found | next step |", "|---|---|---|---|"]
        cells = (names, check.status, check.found, check.next_step)
        lines.append("| " + " | ".join(printable(" ".join(cell.replace("|", "\\|").split())) for cell in cells) + " |")
    return "\n".join([*lines, "", "**next**", "", *(f"- {printable(step)}" for step in next_steps(found))])


def _grouped(found: list[Check]) -> list[tuple[str, str, Check]]:
    """(group where it begins, names, check): lines of one group that say the same are one."""
    same: dict[tuple, list[str]] = {}
    for check in found:
        same.setdefault((check.group, check.status, check.found, check.next_step), []).append(check.name)
    seen, lines = "", []
    for (group, status, text, step), names in same.items():
        lines.append((group if group != seen else "", ", ".join(names), Check(group, names[0], status, text, step)))
        seen = group
    return lines


def _anonymous(check: Check) -> Check:
    """The same without absolute paths and without the names of the user and of the machine."""
    def clean(text: str) -> str:
        text = portable(text.replace(str(Path.home()), "~") if len(str(Path.home())) > 1 else text)
        for name, instead in ((socket.gethostname(), "host"), (_user(), "user")):
            if len(name) > 2 and name != "root":
                text = re.sub(rf"\b{re.escape(name)}\b", instead, text)
        return text
    return replace(check, found=clean(check.found), next_step=clean(check.next_step))


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):                # no name for this user, as in some containers
        return ""


def print_checks(found: list[Check]) -> None:
    """The lines by group, and the next steps."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kvlab.show import printable
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")            # the diagnosis of a terminal must not fail on its encoding
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    table = Table(box=None, pad_edge=False, show_header=False)
    for width in (1, 28, None):
        table.add_column(max_width=width, overflow="fold")
    marks = {"ok": "", "note": "·", "problem": "!"}
    for group, names, check in _grouped(found):
        if group:
            table.add_row("", Text(group, style="bold"), "")
        text = Text(printable(check.found))
        if check.next_step:
            text.append(f" → {printable(check.next_step)}", style="dim")
        table.add_row(marks[check.status], Text(printable(names)), text,
                      style="red" if check.status == "problem" else None)
    console.print(table)
    counts = {status: sum(check.status == status for check in found) for status in ("problem", "note")}
    console.print(f"\n{counts['problem']} problems (!), {counts['note']} notes (·). Next:")
    for step in next_steps(found):
        console.print(Text(f"- {printable(step)}"))
