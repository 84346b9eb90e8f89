"""Does the capacity model agree with real servers' logs, and which safety factor would each have needed?

Tests the article's rule that concurrency is (VRAM − weights) ÷ (KV of a request × 1.3 to 1.5). Start-up logs of vLLM,
SGLang, TensorRT-LLM, llama.cpp and LMDeploy are held against the block model, and the pools of those that print a
budget against its terms. What the rule would have had to divide by follows from the same logs.
"""
from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from kvlab.attention._base import digest
from kvlab.catalog import rows as rows_of
from kvlab.record.reading import Reading, missing
from kvlab.serving.capacity import check_logs
from kvlab.serving.server_logs import check
from kvlab.studies._capacity_findings import findings
from kvlab.studies._run import Case, case_row

__all__ = ["METRICS", "SIZES", "Budgets", "Logs", "cases", "findings", "run"]
SIZES = ("smoke", "small", "large")
METRICS = {"predicted_to_logged": "ratio", "pool_gib": "GiB", "safety_factor": "ratio"}


@dataclass(frozen=True)
class Logs:
    """Every start-up log of data/server_logs.csv against the block model."""

    @cached_property
    def comparison_id(self) -> str:
        return digest({"logs": [dict(row) for row in rows_of("server_logs.csv")]})

    def columns(self) -> dict:
        return dict(device="none")

    def rows(self) -> Iterator[dict]:
        """predicted ÷ logged of each line, with its verdict; missing, with the reason, where nothing is compared."""
        lines = rows_of("server_logs.csv")
        for line, found in zip(lines, check(lines)):
            about = dict(source=line["source"][:200], hardware="as each log says", note=found["note"])
            if found["predicted"] is None or not found["logged"]:
                about.pop("note")
                reading = missing("predicted_to_logged", "ratio", found["note"] or "the log says 0", **about)
            else:
                reading = Reading("predicted_to_logged", found["predicted"] / found["logged"], "ratio", "modelled",
                                  method=f"block model: {found['what']}", denominator=f"the log: {found['logged']}",
                                  **about)
            shown = dict(question="log", id=found["id"], verdict=found["verdict"], what=found["what"],
                         engine=line["engine_version"], gpu=line["gpu"])
            yield _row(self, found["id"], shown, reading, line["model"])


@dataclass(frozen=True)
class Budgets:
    """Every log of data/engine_budgets.csv, which print what the pool was left: the model's terms beside it."""

    @cached_property
    def comparison_id(self) -> str:
        return digest({"budgets": [dict(row) for row in rows_of("engine_budgets.csv")]})

    def columns(self) -> dict:
        return dict(device="none")

    def rows(self) -> Iterator[dict]:
        """The pool as logged and as modelled, and the factor that (VRAM − weights) had to be divided by."""
        for line in check_logs():
            shown = dict(question="budget", id=line["id"], engine=line["engine"], fitted=line["fitted"],
                         inside=line["inside"], vram_gib=line["vram_gib"], weights_gib=line["weights_gib"])
            about = dict(source=line["source"][:200], hardware="as each log says")
            readings = [Reading("pool_gib", line["logged_gib"], "GiB", "quoted", method="the log", **about),
                        Reading("pool_gib", line["pool_gib"], "GiB", "modelled", low=line["low_gib"],
                                high=line["high_gib"], method="util × VRAM − weights − non-torch − activation peak",
                                **about)]
            if line["logged_gib"] > 0:
                factor = (line["vram_gib"] - line["weights_gib"]) / line["logged_gib"]
                readings.append(Reading("safety_factor", factor, "ratio", "quoted",
                                        method="(VRAM − weights) ÷ pool, all from the log", **about))
            else:
                readings.append(missing("safety_factor", "ratio", "no factor serves: the pool was not positive, and "
                                        "the server refused to start", **about))
            for reading in readings:
                yield _row(self, line["id"], shown, reading, line["model"])


def _row(case: Logs | Budgets, name: str, shown: dict, reading: Reading, model: str) -> dict:
    return case_row(case, reading, digest([case.comparison_id, name]), model=model or "not stated",
                    case=json.dumps(shown, sort_keys=True))


def cases(size: str, *, device: str = "cpu", variants=None, model: str | None = None) -> Iterator[Case]:
    """The logs, and the budgets: the same in every size, since nothing is measured."""
    if variants or model:
        raise ValueError("capacity looks at all stored logs: it takes neither --variants nor --model; "
                         "`kvlab plan MODEL --gpu GPU` plans one")
    yield Logs()
    yield Budgets()


def run(case: Case, *, artifacts=None, watch=None) -> list[dict]:
    """Hold the logs against the model."""
    return list(case.rows())
