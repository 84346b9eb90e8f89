"""How far the output is from fp64 attention on the original K and V: what storing them in this format costs."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvlab.attention import _captured
from kvlab.probes._base import Bench
from kvlab.probes._expected import Expected
from kvlab.record.reading import Reading


@dataclass(frozen=True)
class FormatError:
    """Relative L2 distance to the fp64 oracle on the K and V before encoding. Reported, never a gate."""
    name: ClassVar[str] = "format_error"
    metrics: ClassVar[dict[str, str]] = {"format_error": "ratio"}
    needs: ClassVar[tuple[str, ...]] = ("kernel_error",)
    rotates: ClassVar[bool] = False

    def why_not(self, trial):
        return None

    def measure(self, bench: Bench):
        expected = Expected(bench, original=True)
        for trial in list(bench.trials):
            with bench.on(trial):
                exact, places, _ = expected.of(trial)
                output = trial.prepare(bench.inputs_of(trial)[:1])[0]()
                error = bench.check(trial, output, exact, float("inf"), places)
                scales = "" if not trial.format.static else ("; static scales from 256 tokens of another text" if
                          trial.data.startswith("file:") else "; static scales from 256 other tokens drawn alike")
                yield trial, Reading("format_error", error, "ratio", "measured", method="derived", source=self.name,
                                     denominator="L2 norm of fp64 attention on the original K, V",
                                     note=f"data: {trial.data}{scales}{_captured.repeats(trial)}")
