"""Attention variants, the trial that measures one, and the oracle that judges it."""
from kvlab.attention._base import Comparison, Inputs, Trial, trial
from kvlab.attention._oracle import contiguous_only, ideal_traffic, least_cost, reference, useful_flops
from kvlab.attention._variant import Cost, Variant, VariantRef, variants

__all__ = ["Comparison", "Cost", "Inputs", "Trial", "Variant", "VariantRef", "contiguous_only", "ideal_traffic",
           "least_cost", "reference", "trial", "useful_flops", "variants"]
