"""The model that the cases of a run share, what is computed from it once per process, and rows for its absence."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from kvlab.model.load import load_decoder
from kvlab.record.reading import Reading, missing

# of a model, a package or a text that this machine lacks: the case is missing, not failed. An ImportError is not among
# them: loaders say in words what is not installed, so that it would be an error of kvlab's own
ABSENT = (KeyError, ValueError, OSError)
KEPT = 16
_KEPT: dict[tuple, Any] = {}


@lru_cache(maxsize=1)
def decoder(model: str, device: str):
    """The decoder on that device; the last one is kept."""
    loaded = load_decoder(model)
    return loaded if device == "cpu" else loaded.to(device)


def once(key: tuple, make: Callable[[], Any]) -> Any:
    """What `make` gives, of the last 16 things asked for by key: cases that follow one another share it."""
    if key not in _KEPT:
        value = make()
        while len(_KEPT) >= KEPT:
            _KEPT.pop(next(iter(_KEPT)))
        _KEPT[key] = value
    return _KEPT[key]


def absent(units: Mapping[str, str], error: Exception, **about) -> list[Reading]:
    """A missing reading per metric, which says why. units: of each metric; about: further fields of a Reading."""
    why = " ".join(map(str, error.args)) or type(error).__name__
    return [missing(metric, unit, why, **about) for metric, unit in units.items()]


def forget() -> None:
    """Let go of the decoder and of all that was kept."""
    decoder.cache_clear()
    _KEPT.clear()
