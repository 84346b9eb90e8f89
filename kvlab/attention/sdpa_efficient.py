"""torch's memory-efficient attention kernel (CUDA), and no other."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvlab.attention._sdpa import backend_why_not, on_backend
from kvlab.attention.sdpa import Sdpa


@dataclass(frozen=True)
class SdpaEfficient(Sdpa):
    """sdpa held to the memory-efficient back end (about 11 µs of each call are the switch).

    Source: arXiv 2112.05682.
    """
    name: ClassVar[str] = "sdpa_efficient"

    def why_not(self, trial):
        return super().why_not(trial) or backend_why_not(trial, "EFFICIENT_ATTENTION")

    def prepare(self, trial, inputs):
        return on_backend("EFFICIENT_ATTENTION", super().prepare(trial, inputs))
