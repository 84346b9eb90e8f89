"""What several verbs share: times as options, options that another one rules out, where a run is, JSON."""
from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path


def seconds(option: str, text: str) -> float:
    """A time such as 500ms, 60s, 5m, 1h or plain seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|)", text.strip())
    value = float(found[1]) * {"ms": 0.001, "s": 1, "": 1, "m": 60, "h": 3600}[found[2]] if found else 0
    if not 0 < value <= 366 * 86400:
        raise ValueError(f"{option} {text!r} is no time of up to a year; write it as 500ms, 60s, 5m or 1h")
    return value


def beside(command: Callable, given: dict, *looked_at: str) -> list[str]:
    """Options of a verb, as they are written, that were set and are not among those looked at. given: its arguments."""
    usual = {name: one.default for name, one in inspect.signature(command).parameters.items()}
    return ["MODEL" if name == "model" else f"--{name.replace('_', '-')}" for name in usual
            if name not in looked_at and given[name] != usual[name]]


def results(run: str | None) -> Path | None:
    """Where the results of that name are: a file, or a run's directory, given as itself, by its id or by its URL."""
    if run is None:
        return None
    from kvlab.record._places import FILES, is_url
    from kvlab.record.store import find_run
    if not is_url(run) and Path(run).suffix in FILES:
        return Path(run)
    return find_run(run, Path("profiles"))


def print_json(data) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False, default=str))
