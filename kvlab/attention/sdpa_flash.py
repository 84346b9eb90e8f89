"""torch's own FlashAttention kernel (on a CPU its blocked one), and no other."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvlab.attention._sdpa import backend_why_not, on_backend
from kvlab.attention.sdpa import Sdpa


@dataclass(frozen=True)
class SdpaFlash(Sdpa):
    """sdpa held to the flash back end (about 11 µs of each call are the switch).

    What that back end cannot take is refused, where sdpa falls back without a word.
    Source: as sdpa; torch.nn.attention.sdpa_kernel holds it there.
    """
    name: ClassVar[str] = "sdpa_flash"

    def why_not(self, trial):
        return super().why_not(trial) or backend_why_not(trial, "FLASH_ATTENTION")

    def prepare(self, trial, inputs):
        return on_backend("FLASH_ATTENTION", super().prepare(trial, inputs))
