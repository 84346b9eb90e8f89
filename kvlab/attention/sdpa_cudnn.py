"""cuDNN's fused attention through torch (CUDA), and no other."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvlab.attention._sdpa import backend_why_not, on_backend
from kvlab.attention.sdpa import Sdpa


@dataclass(frozen=True)
class SdpaCudnn(Sdpa):
    """sdpa held to the cuDNN back end (about 11 µs of each call are the switch).

    Source: as sdpa; torch.nn.attention.sdpa_kernel holds it there.
    """
    name: ClassVar[str] = "sdpa_cudnn"

    def why_not(self, trial):
        return super().why_not(trial) or backend_why_not(trial, "CUDNN_ATTENTION")

    def prepare(self, trial, inputs):
        return on_backend("CUDNN_ATTENTION", super().prepare(trial, inputs))
