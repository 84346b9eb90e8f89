"""Query heads, KV heads and widths of every layer: per model, per kind or per layer, as the config gives them."""
from __future__ import annotations

from kvlab.catalog._facts import NAMES, OF_KIND, Facts, plain
from kvlab.catalog._keys import READ, unknown_keys

_PER_LAYER = {name for fact in ("q_heads", "kv_heads", "head_dim", "v_head_dim") for name in NAMES[fact]}


class Heads:
    """Query heads, KV heads and widths of every layer, with what is derived where the config leaves it out."""

    def __init__(self, facts: Facts, layers: int, attending: set[str]):
        self.facts, self.layers = facts, layers
        self.values = {fact: facts.fact(fact, layers) for fact in ("q_heads", "kv_heads", "head_dim", "v_head_dim")}
        self.own = {kind: {fact: facts.fact(fact, layers, kind) for fact in table} for kind, table in OF_KIND.items()}
        if not facts.flag("attention_k_eq_v"):
            self.own["full"]["kv_heads"] = None          # Gemma 4 reads it only where K and V are one projection
        other = facts.table("attention_other_setting")   # Step: the heads of the kind it names
        if other is not None:
            kind = {"sliding_attention": "sliding", "full_attention": "full"}.get(other.text("attention_type"))
            if kind is None:
                raise other.wrong("attention_type must be sliding_attention or full_attention")
            self.own[kind] = {fact: other.fact(fact, layers) for fact in self.values}
        self.overrides = self._overrides()
        if attending:
            self._derive()

    def _overrides(self) -> dict[int, dict[str, int]]:
        """per_layer_config: by layer number, the facts in which that layer differs from the others."""
        table = self.facts.table("per_layer_config")
        found: dict[int, dict[str, int]] = {}
        for key in table.config if table is not None else ():
            if not key.isascii() or not key.isdigit() or len(key) > 5 or int(key) >= self.layers:
                raise table.wrong(f"{key!r:.40} is not the number of one of the {self.layers:,} layers")
            layer = table.table(key)
            if layer is None:
                continue
            unknown = [name for name in layer.config if name not in _PER_LAYER and (name == "skip" or unknown_keys(
                {name: layer.config[name]}) or name in READ)]
            if unknown:
                raise layer.wrong(f"it changes {', '.join(map(plain, unknown[:5]))} in one layer, which kvlab does not "
                                  "know")
            facts = {fact: layer.fact(fact, self.layers) for fact in self.values}
            found[int(key)] = {fact: value for fact, value in facts.items() if value is not None}
        return found

    def _derive(self) -> None:
        facts = self.facts
        if self.values["q_heads"] is None:
            raise facts.wrong(f"the number of query heads is missing; it needs one of: {', '.join(NAMES['q_heads'])}")
        multi_query = facts.flag("multi_query")
        if multi_query and not facts.flag("new_decoder_architecture"):
            self.values["kv_heads"] = 1                 # Falcon and BigCode: whatever else the config says
        elif facts.flag("multi_query_attention") is False:
            self.values["kv_heads"] = self.values["q_heads"]
        if self.values["kv_heads"] is None and facts.get("block_configs") is not None:
            self.values["kv_heads"] = self._of_blocks()
        if self.values["kv_heads"] is None and not facts.number("kv_lora_rank", 0):
            self.values["kv_heads"] = self.values["q_heads"]
            facts.assume("num_key_value_heads = num_attention_heads (the config gives none: MHA)")
        if self.values["head_dim"] is None and not facts.number("kv_lora_rank", 0):
            self.values["head_dim"] = self._quotient()

    def _of_blocks(self) -> list[int]:
        """Nemotron NAS gives query heads per KV head; a layer without attention has none."""
        q_heads, found = self.values["q_heads"], []
        for layer, entry in enumerate(self.facts.items("block_configs", self.layers)):
            ratio = Facts(entry, f"{self.facts.name}: block_configs").table("attention").number("n_heads_in_group")
            whole = q_heads[layer] if isinstance(q_heads, list) else q_heads
            if ratio and whole % ratio:
                raise self.facts.wrong(f"block_configs: n_heads_in_group {ratio} does not divide {whole} query heads")
            found.append(whole // ratio if ratio else 0)
        return found

    def _quotient(self) -> int:
        hidden, q_heads = self.facts.fact("hidden"), self.values["q_heads"]
        if hidden is None or isinstance(q_heads, list) or not q_heads or hidden % q_heads:
            raise self.facts.wrong("head_dim is missing, and is not hidden_size / num_attention_heads "
                                   f"({hidden} / {q_heads}); add head_dim")
        if any(own.get("q_heads") not in (None, q_heads) and own.get("head_dim") is None for own in self.own.values()):
            raise self.facts.wrong("head_dim is missing, and the layers differ in their query heads; add head_dim")
        self.facts.assume(f"head_dim = hidden_size / num_attention_heads = {hidden // q_heads}")
        return hidden // q_heads

    def at(self, fact: str, kind: str, layer: int) -> int | None:
        """The fact of one layer, which is of that kind; None = the config does not say it."""
        value = self.overrides.get(layer, {}).get(fact)
        if value is None:
            value = self.own.get(kind, {}).get(fact)
        if value is None:
            value = self.values[fact]
        return value[layer] if isinstance(value, list) else value

    def one(self, fact: str) -> int:
        """One number for formulas that know only one: the largest of a list; 0 where nothing attends.

        A latent's expansion counts: its query heads, as wide as the part of K without positions.
        """
        value = self.values[fact]
        if self.facts.number("kv_lora_rank", 0):
            value = {"kv_heads": value or self.values["q_heads"],
                     "head_dim": self.facts.number("qk_nope_head_dim", 0) or value}.get(fact, value)
        return max(value, default=0) if isinstance(value, list) else value or 0
