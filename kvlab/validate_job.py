"""Steps of a validation one after another: each timed, said, saved at once, and none able to stop the others."""
from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from threading import Event, Thread

from kvlab.probes._nvml import Unavailable
from kvlab.record.environment import portable
from kvlab.record.export import atomic_write, write_parquet
from kvlab.record.reading import table
from kvlab.validate_answers import Verdict, verdicts
from kvlab.validate_cases import Sizes

GRACE_S = 15.0                                              # behind the budget: by then even a slow step has ended
UUID = re.compile(r"\b(?:GPU-|MIG-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.I)


class Job:
    """What the steps found so far; the clock of its budget runs from here."""

    def __init__(self, out: Path, sizes: Sizes, say: Callable[[str], None]):
        self.out, self.sizes, self.say = out, sizes, say
        self.began, self.running, self.unwritten = time.perf_counter(), "", set()
        self.steps: dict[str, dict] = {}
        self.rows: list[dict] = []
        self.nvml: list[dict] = []
        self.ncu: list[dict] = []

    @property
    def verdicts(self) -> list[Verdict]:
        return verdicts(self.rows, self.steps)

    def left(self) -> float:
        return self.sizes.budget_s - (time.perf_counter() - self.began)

    def step(self, name: str, needs_s: float, work: Callable[[], dict]) -> None:
        """One step: what it found, or why it found nothing; saved at once."""
        began, heard, self.running = time.perf_counter(), len(self.nvml), name
        self.say(f"[{began - self.began:3.0f} of {self.sizes.budget_s:g} s] {name}: takes about {needs_s:.0f} s")
        if self.left() < needs_s:
            found = dict(error=f"not begun: {self.left():.0f} s of {self.sizes.budget_s:g} are left, and it takes "
                               f"about {needs_s:.0f}")
        else:
            try:
                found = work()
            except Exception as error:                       # whatever it is, the next step may tell something
                kind = "" if isinstance(error, Unavailable) else f"{type(error).__name__}: "
                found = dict(error=anonymous(f"{kind}{error}")[:500])
        self.steps[name] = {**found, "seconds": round(time.perf_counter() - began, 2), "heard": [heard, len(self.nvml)]}
        self.say(f"    {found.get('error') or _brief(found)} ({self.steps[name]['seconds']:.1f} s)")
        self.save()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """A step that hangs (a GPU that is lost, say) ends the process, with all before it saved."""
        over = Event()

        def watch():
            if over.wait(max(0.0, self.left()) + GRACE_S):
                return
            try:
                why = f"it hangs: the process is ended {GRACE_S:g} s behind its {self.sizes.budget_s:g} s"
                self.steps[self.running] = dict(error=why)
                self.save()
                for line in (f"{self.running}: {why}", *(f"{v.question}: {v}" for v in self.verdicts)):
                    self.say(line)
                sys.stdout.flush()
            finally:
                os._exit(1)                                          # nothing less ends a call that never returns
        Thread(target=watch, name="kvlab-guard", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def save(self) -> None:
        """The files as they can be by now: one that cannot be written is said, and costs no other."""
        def as_json(name, told):
            return self._kept(name, lambda: atomic_write(self.out / name, json.dumps(
                told(), indent=1, ensure_ascii=False, default=str).encode()))
        as_json("validate.json", lambda: dict(
            about="validation of a GPU's counters by kvlab", sizes=asdict(self.sizes), steps=self.steps,
            answers={v.question: dict(answered=v.answered, words=v.words, **v.numbers) for v in self.verdicts}))
        as_json("nvml.json", lambda: self.nvml)
        as_json("ncu.json", lambda: self.ncu)
        if not self.rows:
            return
        if self._kept("counters.parquet", lambda: write_parquet(table(self.rows), self.out / "counters.parquet")):
            (self.out / "rows.json").unlink(missing_ok=True)
        else:
            as_json("rows.json", lambda: self.rows)

    def _kept(self, name: str, write: Callable[[], object]) -> bool:
        try:
            write()
        except Exception as error:                           # a full disk, a row that is no row, a missing package
            if name not in self.unwritten:
                self.say(anonymous(f"{name} could not be written: {type(error).__name__}: {error}")[:500])
            self.unwritten.add(name)
            return False
        return True

    def add(self, rows: list[dict]) -> dict:
        """Keep rows as the study counters would; how many are numbers, and the commonest reasons for none."""
        for row in rows:
            texts = {column: anonymous(row[column]) for column in ("note", "error")}
            self.rows.append({**row, "study": "counters", **texts})
        failed = Counter(anonymous(row["note"]) for row in rows if row["status"] != "ok")
        none = Counter(anonymous(row["note"]) for row in rows if row["status"] == "ok" and row["value"] is None)
        return dict(numbers=sum(row["value"] is not None for row in rows), **{
            name: [note for note, _ in of.most_common(5)] for name, of in (("failed", failed), ("missing", none))})


def anonymous(text: str) -> str:
    """The text without absolute paths, without this machine's name and without a GPU's identity."""
    host = socket.gethostname()
    text = re.sub(rf"(?<![\w-]){re.escape(host)}(?![\w-])", "host", text) if host else text
    return UUID.sub("uuid", portable(text))


def _brief(found: dict) -> str:
    """What a step found, in a line."""
    if "numbers" not in found:
        return json.dumps(found, ensure_ascii=False, default=str)[:300]
    return "; ".join([f"{found['numbers']} numbers", *(f"{name}: {why[:150]}" for name in ("failed", "missing")
                                                      for why in found[name][:2])])
