"""The article's claims, each with its evidence and the verdict that the evidence gives. `ledger` judges them all."""
from kvlab.claims._base import judged
from kvlab.claims._ledger import as_row, claims, ledger
from kvlab.claims._results import Results

__all__ = ["Results", "as_row", "claims", "judged", "ledger"]
