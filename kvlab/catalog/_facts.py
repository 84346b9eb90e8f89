"""A config's facts under one name each, whatever the config calls them, with their types and limits checked."""
from __future__ import annotations

import reprlib
from collections.abc import Mapping

# Every spelling of a fact that is read. All spellings that a config has must agree.
NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "n_embed", "model_dim"),
    "q_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads",
                "num_attention_heads_per_layer"),
    "kv_heads": ("num_key_value_heads", "n_head_kv", "num_kv_heads", "n_kv_heads", "multi_query_group_num",
                 "num_attention_groups", "kv_n_heads", "num_key_value_heads_per_layer"),
    "head_dim": ("head_dim", "kv_channels", "attention_head_dim", "attention_key_dim"),
    "v_head_dim": ("v_head_dim", "head_dim_v"),
    "window": ("sliding_window", "sliding_window_size", "attention_window_size", "window_size", "local_window_size",
               "local_attention_window"),
    "chunk": ("attention_chunk_size",),
    "context": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length",
                "max_seq_length", "seq_length", "model_max_length"),
}
# Facts of the layers of one kind, where they differ from those of the others.
OF_KIND = {
    "sliding": {"q_heads": ("swa_num_attention_heads", "num_sliding_attention_heads"),
                "kv_heads": ("swa_num_key_value_heads",), "head_dim": ("swa_head_dim",),
                "v_head_dim": ("swa_v_head_dim",)},
    "full": {"kv_heads": ("num_global_key_value_heads",), "head_dim": ("global_head_dim",)},
}
LONGEST = 128                   # characters of a key or a model_type; the longest known has 49
LIMITS = {"layers": 1_000, "q_heads": 65_536, "kv_heads": 65_536}
LIMIT = 2**40                   # of every other whole number: tokens, widths
PER_LAYER = ("q_heads", "kv_heads", "head_dim", "v_head_dim", "window")     # may be a list, an entry per layer
MAY_DIFFER = ("context", "q_heads")     # a mean beside a per-layer list; a trained beside a supported length
SAID = 600                      # characters of an error


class Facts:
    """One config's keys, read by fact. `assumed` gathers what it does not say and the reader took for granted."""

    def __init__(self, config: Mapping[str, object], name: str):
        self.config, self.name, self.assumed = config, name, []
        self._found: dict[tuple[str, int, str], int | list[int] | None] = {}

    def wrong(self, text: str) -> ValueError:
        """The error of this config: what is wrong with it, behind its name; a value in it may be the whole file."""
        return ValueError(f"{self.name}: {text}" if len(text) <= SAID else f"{self.name}: {text[:SAID]} …")

    def assume(self, text: str) -> None:
        if text not in self.assumed:
            self.assumed.append(text)

    def get(self, key: str) -> object | None:
        """A key's value; None where it is absent or null."""
        return self.config.get(key)

    def text(self, key: str) -> str:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(f"{key} is {shown(value)}, and must be text")
        return value or ""

    def flag(self, key: str) -> bool | None:
        """A true or false key, which may be 1 or 0 too; None where it is absent or null."""
        value = self.get(key)
        if value is not None and not (isinstance(value, int) and value in (0, 1)):
            raise self.wrong(f"{key} is {shown(value)}, and must be true or false")
        return None if value is None else bool(value)

    def number(self, key: str, least: int = 1, most: int = LIMIT) -> int | None:
        """A whole number between least and most; None where the key is absent or null."""
        value = self.get(key)
        return None if value is None else self._whole(key, value, least, most)

    def need(self, key: str, least: int = 1) -> int:
        """A whole number that must be there."""
        value = self.number(key, least)
        if value is None:
            raise self.wrong(f"{key} is missing, and is needed beside the keys that are there")
        return value

    def table(self, key: str) -> Facts | None:
        """The keys and values inside another key; None where it is absent or null."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(f"{key} is {shown(value)}, and must hold keys and values")
        inner = Facts(value, f"{self.name}: {key}")
        inner.assumed = self.assumed
        return inner

    def items(self, key: str, count: int | None = None) -> list | None:
        """A list, cut to its first `count` entries where it goes on for layers that predict further tokens."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.wrong(f"{key} is {shown(value)}, and must be a list")
        if count is None:
            return value
        more = self.number("num_nextn_predict_layers", 0) or 0
        if not count <= len(value) <= count + more:
            raise self.wrong(f"{key} has {len(value):,} entries for {count:,} layers; one of the two is wrong")
        return value[:count]

    def numbers(self, key: str, count: int | None = None, least: int = 0, most: int = LIMIT) -> list[int] | None:
        """A list of whole numbers."""
        found = self.items(key, count)
        return None if found is None else [self._whole(key, value, least, most) for value in found]

    def fact(self, fact: str, layers: int = 0, kind: str = "") -> int | list[int] | None:
        """The fact under any of its names: a number, or one per layer where the config gives a list; None = not said.

        kind: the value that layers of this kind have of their own. Refuses names that contradict each other. Read once:
        every layer asks, and a list of 1,000 numbers is not checked 1,000 times.
        """
        asked = fact, layers, kind
        if asked not in self._found:
            self._found[asked] = self._fact(fact, layers, kind)
        return self._found[asked]

    def _fact(self, fact: str, layers: int, kind: str) -> int | list[int] | None:
        names = OF_KIND.get(kind, {}).get(fact, ()) if kind else NAMES[fact]
        least = 0 if fact in ("window", "chunk") else 1         # only in a list per layer 0 means: no attention there
        most = LIMITS.get(fact, LIMIT)
        found: dict[str, int | list[int]] = {}
        for key in names:
            if isinstance(self.get(key), list) and fact in PER_LAYER:
                found[key] = [0 if value is None or value == -1 else self._whole(key, value, 0, most)
                              for value in self.items(key, layers or None)]
            elif self.get(key) is not None:
                found[key] = self.number(key, least, most)
        if not found:
            return None
        first = next(iter(found))
        for key, value in found.items():
            if value != found[first] and not (fact in MAY_DIFFER and (fact == "context" or isinstance(value, list))):
                raise self.wrong(f"{first} is {shown(found[first])} but {key} is {shown(value)}; the two contradict "
                                 "each other")
        return next((value for value in found.values() if isinstance(value, list)), found[first])

    def _whole(self, key: str, value: object, least: int, most: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(f"{key} holds {shown(value)}, and must be a whole number of {least:,} to {most:,}")
        return value


def shown(value: object) -> str:
    """A value from a file in at most a line, however long or deep it is; what steers a terminal is escaped."""
    return reprlib.repr(value)


def plain(text: str) -> str:
    """A name from a file without quotes, cut to LONGEST characters; what steers a terminal is escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:LONGEST])
