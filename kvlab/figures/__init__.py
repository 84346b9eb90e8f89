"""Figures: one module each, drawn from stored rows. `make` draws one by name, `save` writes it with its rows."""
from kvlab.figures._make import figures, make, save

__all__ = ["figures", "make", "save"]
