"""Public model configurations from data/models.csv, each a ModelSpec with its layers by kind and its source.

Column layer_groups lists the layers that cache alike: "9 full num_q_heads=64 …; 39 sliding … window=128", the fields
being LayerSpec's. Layers that cache nothing (MLP blocks of a hybrid) are linear with state_bytes=0.
"""
from __future__ import annotations

from functools import cache

from kvlab.catalog import find, integer, rows
from kvlab.shapes import LayerSpec, ModelSpec


def _layers(text: str) -> tuple[LayerSpec, ...]:
    groups = []
    for group in text.split(";"):
        count, kind, *fields = group.split()
        values = dict(field.split("=") for field in fields)
        groups.append(LayerSpec(kind, int(count), **{name: int(value) for name, value in values.items()}))
    return tuple(groups)


def _spec(row: dict[str, str]) -> ModelSpec:
    source = row["source"] + (f"; parameters: {row['params_source']}" if row["params"] else "")
    return ModelSpec(row["model"], _layers(row["layer_groups"]), int(row["num_q_heads"]), int(row["num_kv_heads"]),
                     int(row["head_dim"]), context=integer(row["context"]), params=int(row["params"] or 0) or None,
                     attention_type=row["attention_type"], approximate=row["approximate"], source=source)


@cache
def _by_id() -> tuple[dict[str, ModelSpec], dict[str, ModelSpec]]:
    """Models by their own id, and by their own id or any alias."""
    own, every = {}, {}
    for row in rows("models.csv"):
        spec = own[row["model"]] = _spec(row)
        for name in (row["model"], *filter(None, row["aliases"].split(";"))):
            every[name] = spec
    return own, every


def models() -> dict[str, ModelSpec]:
    """Every model of the catalogue by its id, in the file's order; aliases are left out."""
    return dict(_by_id()[0])


def aliases() -> dict[str, str]:
    """Other ids of the same architecture, such as a base model's, and the id they stand for."""
    own, every = _by_id()
    return {name: spec.name for name, spec in every.items() if name not in own}


def model(name: str) -> ModelSpec:
    """The model of that id, in any case, by an alias, or by the part after the slash where only one model has it.

    Refuses an unknown or ambiguous name with KeyError, a near match and the list.
    """
    every = _by_id()[1]
    short: dict[str, list[ModelSpec]] = {}
    for known, spec in every.items():
        candidates = short.setdefault(known.rpartition("/")[2].lower(), [])
        if spec not in candidates:
            candidates.append(spec)
    return find("model", name, every, short)
