"""Probes: what looks at a comparison and returns readings. `measure` runs them in order, correctness first."""
from kvlab.probes._base import Bench, Probe, measure, probes

__all__ = ["Bench", "Probe", "measure", "probes"]
