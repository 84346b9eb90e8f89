"""The article's claims, each with its evidence and the verdict that the evidence gives. `ledger` judges them all."""
from kvlab.claims._ledger import claims, ledger

__all__ = ["claims", "ledger"]
