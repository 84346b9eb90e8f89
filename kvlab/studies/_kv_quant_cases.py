"""The cases of kv_quant on text, as pure data: a model, a format, texts, and which windows of them."""
from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property

from kvlab.accuracy.scoring import CALIBRATION
from kvlab.attention._base import digest

MIXED = ("int4/token/g32", "int8/token")            # what a mix of layers chooses from


@dataclass(frozen=True)
class TextCase:
    """Fields that all cases of a model on text share. start: tokens of each document that are passed over."""
    model: str
    kv_format: str
    documents: tuple[str, ...]
    window: int
    count: int | None = 1
    start: int = 300
    calibration: str = CALIBRATION
    device: str = "cpu"

    @cached_property
    def comparison_id(self) -> str:
        return digest({"kind": type(self).__name__, **asdict(self)})

    @property
    def label(self) -> str:
        """The format as tables and figures show it: with the range where that was guessed."""
        kind, _, limit = self.calibration.partition(":")
        return f"{self.kv_format}, guessed range ±{limit}" if kind == "range" else self.kv_format

    def columns(self) -> dict:
        return dict(model=self.model, kv_format=self.label, data=" + ".join(self.documents), kv_len=self.window,
                    batch_size=1, device=self.device, dtype="fp32", seed=0,
                    case=json.dumps(asdict(self), sort_keys=True))


@dataclass(frozen=True)
class ScoreCase(TextCase):
    """Windows of texts scored under one format.

    against: formats whose scores of the same tokens are subtracted, one of the same grain first.
    common: documents whose first window every format of the run scores; () where this case scores nothing else.
    """
    against: tuple[str, ...] = ()
    common: tuple[str, ...] = ()


@dataclass(frozen=True)
class ContextCase(TextCase):
    """One long window, its KL by position. every: one token in so many is scored."""
    every: int = 4


@dataclass(frozen=True)
class SensitivityCase(TextCase):
    """KL with one layer's K or V at a time in the format."""


@dataclass(frozen=True)
class MixCase(TextCase):
    """Layers in formats chosen by their sensitivity within the bytes of a uniform format (`kv_format`), scored.

    candidates: formats to choose from. sensed: window in which sensitivities are measured, as SensitivityCase does; it
    lies behind the scored windows. against: formats whose scores of the same tokens are subtracted.
    """
    candidates: tuple[str, ...] = MIXED
    sensed: int = 96
    against: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"layers mixed, bytes of {self.kv_format}"
