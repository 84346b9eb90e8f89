"""Bytes of the recurrent state that a linear-attention or SSM layer keeps per sequence, by family."""
from __future__ import annotations

from kvlab.catalog._facts import Facts

_BYTES = {"float32": 4, "float": 4, "fp32": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "half": 2}


def state_bytes(facts: Facts) -> int:
    """State of one recurrent layer: elements of the first family whose keys are there × bytes per element.

    fp32 unless mamba_ssm_dtype or mamba_ssm_cache_dtype says otherwise. Convolution states are not counted.
    Refuses a config that does not give the sizes of any family.
    Source: gated DeltaNet v_heads × k_dim × v_dim; Kimi Delta Attention and lightning attention heads × head_dim²;
    Mamba 2 heads × head_dim × state_size; Mamba expand × hidden × state_size; RG-LRU its width.
    """
    for family in _FAMILIES:
        elements = family(facts)
        if elements:
            return elements * _itemsize(facts)
    raise facts.wrong("it has recurrent layers, and the size of their state is not in the config; add the linear_* or "
                      "mamba_* keys")


def _itemsize(facts: Facts) -> int:
    named = facts.text("mamba_ssm_dtype") or facts.text("mamba_ssm_cache_dtype")
    if named and named not in _BYTES:
        raise facts.wrong(f"the state's dtype {named!r:.40} is not known; allowed: {', '.join(_BYTES)}")
    if not named:
        facts.assume("recurrent state in fp32")
    return _BYTES[named or "float32"]


def _delta_net(facts: Facts) -> int | None:
    if facts.number("linear_num_value_heads", 0):
        return (facts.need("linear_num_value_heads") * facts.need("linear_key_head_dim")
                * facts.need("linear_value_head_dim"))


def _kda(facts: Facts) -> int | None:
    if facts.number("linear_num_heads", 0):
        return facts.need("linear_num_heads") * facts.need("linear_head_dim")**2
    inner = facts.table("linear_attn_config")
    if inner is not None:
        return inner.need("num_heads") * inner.need("head_dim")**2


def _lightning(facts: Facts) -> int | None:
    if facts.get("attn_type_list") is None and not facts.text("model_type").startswith(("minimax", "bailing")):
        return None
    heads, width, hidden = (facts.fact(name) for name in ("q_heads", "head_dim", "hidden"))
    if isinstance(heads, int) and width is None and hidden and hidden % heads == 0:
        width = hidden // heads
        facts.assume(f"head_dim = hidden_size / num_attention_heads = {width}")
    return heads * width**2 if isinstance(heads, int) and isinstance(width, int) else None


def _mamba2(facts: Facts) -> int | None:
    prefixes = ("",) if facts.text("model_type") == "mamba2" else ("mamba_", "ssm_")

    def first(*names: str) -> int | None:
        keys = [prefix + name for prefix in prefixes for name in names]
        return next((found for key in keys if facts.get(key) != "auto" and (found := facts.number(key, 0))), None)
    heads, width, state = first("num_heads", "n_heads"), first("head_dim", "d_head"), first("state_size", "d_state")
    if heads and not width and facts.get("mamba_d_head") == "auto" and facts.fact("hidden"):
        width = (facts.number("mamba_expand", 0) or 2) * facts.fact("hidden") // heads
    return heads * width * state if heads and width and state else None


def _mamba(facts: Facts) -> int | None:
    if any(facts.get(key) for key in ("mamba_n_heads", "mamba_num_heads", "mamba_d_head", "mamba_head_dim")):
        return None                                     # Mamba 2, with a size missing
    state = next((found for name in ("mamba_d_state", "state_size") if (found := facts.number(name, 0))), None)
    inner = facts.number("ssm_inner_size", 0) or facts.number("intermediate_size", 0) if (
        facts.text("model_type") in ("mamba", "falcon_mamba")) else None
    expand = facts.number("mamba_expand", 0) or facts.number("expand", 0)
    if state and not inner and expand and facts.fact("hidden"):
        inner = expand * facts.fact("hidden")
    return inner * state if inner and state else None


def _gguf(facts: Facts) -> int | None:
    inner, state = facts.number("ssm_inner_size", 0), facts.number("ssm_state_size", 0)
    return inner * state if inner and state else None


def _rg_lru(facts: Facts) -> int | None:
    return facts.number("lru_width", 0)


_FAMILIES = (_delta_net, _kda, _lightning, _gguf, _mamba2, _mamba, _rg_lru)
