"""What each request did when: spans for a Gantt chart, and a Chrome trace of a simulated engine."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.record.simulated_trace import SOURCE, SPANS
from kvlab.serving.live import Live
from kvlab.serving.simulator import StepRecord

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["SPANS", "Gantt"]
_MICRO = 1e6                    # Chrome traces count microseconds


class Gantt:
    """Collects the steps of a simulation: `simulate(…, on_step=gantt)`. Memory grows with steps and requests.

    Spans of a request follow one another: queued (arrival to admission), prefill (to the first token), decode (to the
    last), and in between preempted (blocks taken, waiting) and recompute (its tokens computed again).
    """

    def __init__(self):
        # replica, began, ended, prefill tokens, decoding sequences, running, waiting, blocks used
        self.steps: list[tuple] = []
        self._spans: list[tuple] = []           # id, replica, what, began, ended
        self._open: dict[Live, tuple[str, float]] = {}

    def __call__(self, record: StepRecord) -> None:
        step, batch = record.step, record.step.batch
        self.steps.append((record.replica, record.began_s, record.ended_s, batch.prefill_tokens, batch.decode_seqs,
                           record.running, record.waiting, record.blocks_used))
        for live in step.preempted:
            self._turn(record, live, "preempted", record.began_s)
        for live in step.admitted:
            self._open[live] = ("queued", live.served.request.arrival_s)
            self._turn(record, live, "prefill", record.began_s)
        for live in step.resumed:
            self._turn(record, live, "recompute", record.began_s)
        for live in (*step.first, *step.caught_up):
            self._turn(record, live, "decode", record.ended_s)
        for live in step.ended:
            self._turn(record, live, None, record.ended_s)

    def _turn(self, record: StepRecord, live: Live, what: str | None, now: float) -> None:
        """The request's span ends, and another begins."""
        was, began = self._open.pop(live)
        if now > began:
            self._spans.append((live.served.request.id, record.replica, was, began, now))
        if what is not None:
            self._open[live] = (what, now)

    def spans(self) -> pd.DataFrame:
        """One line per span: id, replica, what (of SPANS), began_s, ended_s; in order of their beginning."""
        import pandas as pd
        table = pd.DataFrame(self._spans, columns=["id", "replica", "what", "began_s", "ended_s"])
        return table.sort_values(["began_s", "ended_s"], kind="stable", ignore_index=True)

    def events(self) -> Iterator[dict]:
        """The events of a Chrome trace: a replica's steps as slices, its state as counters, requests as async spans."""
        for replica, began, ended, prefill, decoding, running, waiting, blocks in self.steps:
            kind = "mixed" if prefill and decoding else "prefill" if prefill else "decode"
            yield dict(ph="X", cat="step", name=kind, pid=replica, tid=0, ts=began * _MICRO,
                       dur=(ended - began) * _MICRO, args=dict(prefill_tokens=prefill, decode_seqs=decoding))
            for name, value in (("requests", dict(running=running, waiting=waiting)), ("blocks", dict(used=blocks))):
                yield dict(ph="C", name=name, pid=replica, tid=0, ts=began * _MICRO, args=value)
        for name, replica, what, began, ended in self._spans:
            common = dict(cat="request", name=what, id=name, pid=replica, tid=1)
            yield dict(ph="b", ts=began * _MICRO, **common)
            yield dict(ph="e", ts=ended * _MICRO, **common)

    def write(self, path: Path | str) -> Path:
        """The Chrome trace as .json or .json.gz, for Perfetto and `kvlab trace`. The clock in it is simulated."""
        import gzip
        import json
        path = Path(path)
        opened = gzip.open if path.suffix == ".gz" else open
        about = dict(source=SOURCE, clock="simulated")
        with opened(path, "wt", encoding="utf-8") as file:
            json.dump(dict(traceEvents=list(self.events()), displayTimeUnit="ms", otherData=about), file)
        return path
