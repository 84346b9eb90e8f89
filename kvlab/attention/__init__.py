"""Attention variants, the trial that measures one, and the oracle that judges it."""
from kvlab.attention._base import (
    Comparison,
    Cost,
    Inputs,
    Trial,
    Variant,
    VariantRef,
    contiguous_only,
    ideal_traffic,
    least_cost,
    reference,
    trial,
    useful_flops,
    variants,
)

__all__ = ["Comparison", "Cost", "Inputs", "Trial", "Variant", "VariantRef", "contiguous_only", "ideal_traffic",
           "least_cost", "reference", "trial", "useful_flops", "variants"]
