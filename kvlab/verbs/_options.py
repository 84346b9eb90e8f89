"""What several verbs share: times as options, options that another one rules out, JSON."""
from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable


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


def print_json(data) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False, default=str))
