"""What a Llama-type decoder is made of, read from a Hugging Face config.json: sizes, biases, windows, RoPE.

A key that changes the computation in a way that the decoder does not have is refused in words. A key that is left out
takes the value that all releases of transformers give it, or is asked for.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kvlab.catalog._facts import LIMITS, Facts, plain, shown
from kvlab.shapes import AttentionShape, positive

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
SCALINGS = ("linear", "llama3", "yarn")
WIDEST = 2**24                  # of widths and vocabularies; the largest known has 256,000 tokens
_ASKED = {"num_key_value_heads": ("mistral", "qwen2", "qwen3"), "head_dim": ("qwen3",), "sliding_window": ("mistral",)}
_DYNAMIC = ("changes with the length of the text, so that keys already cached would have to be rotated again")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How RoPE's frequencies are changed for contexts beyond `original_context`.

    kind: linear (all divided by factor) | llama3 (long wavelengths divided, a ramp between low_ and high_freq_factor) |
    yarn (a ramp over the channels between beta_fast and beta_slow rotations; cos and sin times attention_factor).
    """
    kind: str
    factor: float
    original_context: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True                   # yarn's ramp begins and ends at whole channels

    def __post_init__(self):
        if self.kind not in SCALINGS:
            raise ValueError(f"RoPE scaling {self.kind!r} is not supported; supported: {', '.join(SCALINGS)}")
        if not self.factor > 0:
            raise ValueError(f"factor={self.factor!r} of the RoPE scaling must be above 0")
        if self.kind != "linear" and self.original_context is None:
            raise ValueError(f"the RoPE scaling {self.kind} needs original_context, the context it was trained on")
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(f"low_freq_factor={self.low_freq_factor} must be above 0 and below "
                             f"high_freq_factor={self.high_freq_factor}")
        if self.kind == "yarn" and not 0 < self.beta_slow <= self.beta_fast:
            raise ValueError(f"beta_slow={self.beta_slow} must be above 0 and at most beta_fast={self.beta_fast}")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A Llama-type decoder: RMSNorm, RoPE over the whole head, grouped-query attention, SwiGLU; all layers alike.

    qkv_bias, o_bias: biases of the attention's projections. qk_norm: RMSNorm of each head of q and k before RoPE.
    tied: the output layer is the embedding. windows: per layer, None where it sees all tokens; () = none has one.
    """
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    context: int
    rms_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    windows: tuple[int | None, ...] = ()
    activation: str = "silu"

    def __post_init__(self):
        positive(vocab_size=self.vocab_size, hidden_size=self.hidden_size, intermediate_size=self.intermediate_size,
                 num_layers=self.num_layers, context=self.context)
        object.__setattr__(self, "windows", tuple(self.windows) or (None,) * self.num_layers)
        if len(self.windows) != self.num_layers:
            raise ValueError(f"windows has {len(self.windows)} entries for {self.num_layers} layers")
        for layer in range(self.num_layers):
            self.shape(layer)
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: RoPE rotates pairs of channels")
        if self.activation != "silu":
            raise ValueError(f"the activation {self.activation!r} is not supported; supported: silu")
        if not 0 < self.rms_eps < 1 or not 1 < self.rope_theta < math.inf:
            raise ValueError(f"rms_eps={self.rms_eps!r} must be between 0 and 1, and rope_theta={self.rope_theta!r} "
                             "above 1")

    def shape(self, layer: int) -> AttentionShape:
        """Heads and window of one layer's attention."""
        return AttentionShape(self.num_q_heads, self.num_kv_heads, self.head_dim, window=self.windows[layer])

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight under its Hugging Face name, with its shape; a projection is [out, in]."""
        width, inner = self.hidden_size, self.intermediate_size
        q, kv = self.num_q_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes = {"model.embed_tokens.weight": (self.vocab_size, width)}
        for layer in range(self.num_layers):
            at = f"model.layers.{layer}."
            shapes |= {f"{at}input_layernorm.weight": (width,), f"{at}post_attention_layernorm.weight": (width,)}
            for name, rows in (("q", q), ("k", kv), ("v", kv)):
                shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, width)
                if self.qkv_bias:
                    shapes[f"{at}self_attn.{name}_proj.bias"] = (rows,)
            shapes[f"{at}self_attn.o_proj.weight"] = (width, q)
            if self.o_bias:
                shapes[f"{at}self_attn.o_proj.bias"] = (width,)
            if self.qk_norm:
                shapes |= {f"{at}self_attn.{name}_norm.weight": (self.head_dim,) for name in "qk"}
            shapes |= {f"{at}mlp.gate_proj.weight": (inner, width), f"{at}mlp.up_proj.weight": (inner, width),
                       f"{at}mlp.down_proj.weight": (width, inner)}
        shapes["model.norm.weight"] = (width,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, width)
        return shapes

    @classmethod
    def from_config(cls, config: Mapping[str, object], where: str) -> DecoderConfig:
        """The decoder that a Hugging Face config.json describes; `where` names it in sentences.

        Takes model_type llama, mistral, qwen2 and qwen3, with RoPE as transformers 5 (rope_parameters) and older
        releases (rope_theta, rope_scaling) write it. ValueError: another type, a key that is missing, wrong or asks
        for what the decoder does not have. Source: the public configurations of these four architectures.
        """
        facts = Facts(config, where)
        kind = facts.text("model_type")
        if kind not in MODEL_TYPES:
            raise facts.wrong(f"model_type {plain(kind) or 'is missing'} is no decoder that kvlab runs; supported: "
                              f"{', '.join(MODEL_TYPES)}")
        _refuse(facts, kind)
        layers, heads = _need(facts, "num_hidden_layers", LIMITS["layers"]), _need(facts, "num_attention_heads")
        context = _need(facts, "max_position_embeddings", 2**40)
        bias = bool(facts.flag("attention_bias")) and kind in ("llama", "qwen3")
        try:
            theta, scaling = _rope(facts, context)
            if scaling and scaling.kind == "yarn":              # Qwen's state the context before it is stretched
                context = max(context, int(scaling.original_context * scaling.factor))
            return cls(vocab_size=_need(facts, "vocab_size"), hidden_size=_need(facts, "hidden_size"),
                       intermediate_size=_need(facts, "intermediate_size"), num_layers=layers, num_q_heads=heads,
                       num_kv_heads=facts.number("num_key_value_heads", 1, WIDEST) or heads,
                       head_dim=_head_dim(facts, heads), rms_eps=_real(facts, "rms_norm_eps", None),
                       rope_theta=theta, rope_scaling=scaling, qkv_bias=bias or kind == "qwen2", o_bias=bias,
                       qk_norm=kind == "qwen3", tied=bool(facts.flag("tie_word_embeddings")), context=context,
                       windows=_windows(facts, kind, layers), activation=plain(facts.text("hidden_act")) or "silu")
        except ValueError as error:
            raise error if str(error).startswith(facts.name) else facts.wrong(str(error)) from error


def _need(facts: Facts, key: str, most: int = WIDEST) -> int:
    value = facts.number(key, 1, most)
    if value is None:
        raise facts.wrong(f"{key} is missing, without which the decoder cannot be built")
    return value


def _real(facts: Facts, key: str, default: float | None) -> float:
    """A number above 0, within reason; the default where the key is absent or null, an error where there is none."""
    value = facts.get(key)
    if value is None:
        value = default
    if value is None:
        raise facts.wrong(f"{key} is missing, without which the decoder cannot be built")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-15 < value < 1e15:
        raise facts.wrong(f"{key} is {shown(value)}, and must be a number above 0 (1e-15 to 1e15)")
    return float(value)


def _refuse(facts: Facts, kind: str) -> None:
    """What the four architectures may ask for and the decoder does not have."""
    for key, types in _ASKED.items():
        if kind in types and key not in facts.config:
            raise facts.wrong(f"{key} is missing, for which {kind} has a number of its own that kvlab does not guess")
    if facts.flag("mlp_bias"):
        raise facts.wrong("mlp_bias is true; kvlab's decoder has no biases in its MLP")
    if facts.get("quantization_config"):
        raise facts.wrong("its weights are quantised (quantization_config); give the model in fp32, bf16 or fp16, or "
                          "a GGUF file")


def _head_dim(facts: Facts, heads: int) -> int:
    given = facts.number("head_dim", 1, 65_536)
    if given is not None:
        return given
    width = _need(facts, "hidden_size")
    if width % heads:
        raise facts.wrong(f"head_dim is missing, and hidden_size {width} is not a multiple of num_attention_heads "
                          f"{heads}")
    return width // heads


def _windows(facts: Facts, kind: str, layers: int) -> tuple[int | None, ...]:
    """The window of each layer. Qwen's take effect only with use_sliding_window, from layer max_window_layers on."""
    window = facts.number("sliding_window", 1, 2**40) if kind != "llama" else None
    if kind.startswith("qwen") and not facts.flag("use_sliding_window"):
        window = None
    first = _need(facts, "max_window_layers", 2**40) if kind.startswith("qwen") and window and not facts.get(
        "layer_types") else 0
    sliding = [window is not None and layer >= first for layer in range(layers)]
    kinds = facts.items("layer_types", layers)
    if kinds is not None:
        known = {"full_attention": False, "sliding_attention": True}
        unknown = [entry for entry in kinds if not isinstance(entry, str) or entry not in known]
        if unknown:
            raise facts.wrong(f"layer_types holds {shown(unknown[0])}; supported: {', '.join(known)}")
        stated = [known[entry] for entry in kinds]
        if any(stated) and window is None or kind == "mistral" and stated != sliding:
            raise facts.wrong("layer_types and sliding_window contradict each other: kvlab does not guess which layers "
                              "have a window")
        sliding = stated
    return tuple(window if on else None for on in sliding)


def _rope(facts: Facts, context: int) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from rope_parameters, or from rope_theta and rope_scaling of older files."""
    inside = facts.table("rope_parameters") or facts.table("rope_scaling") or Facts({}, facts.name)
    if any(isinstance(value, dict) for value in inside.config.values()):
        raise inside.wrong("it differs from layer kind to layer kind, and kvlab's decoder has one RoPE")
    for place in (facts, inside):
        if _real(place, "partial_rotary_factor", 1.0) != 1.0:
            raise place.wrong("partial_rotary_factor is not 1, and kvlab's decoder rotates the whole head")
    theta = _real(inside, "rope_theta", _real(facts, "rope_theta", 10_000.0))
    kind = inside.text("rope_type") or inside.text("type") or "default"
    if kind == "default":
        return theta, None
    if kind not in SCALINGS:
        why = f"; this one {_DYNAMIC}" if kind == "dynamic" else ""
        raise inside.wrong(f"RoPE scaling {plain(kind)} is not supported{why}; supported: default, "
                           f"{', '.join(SCALINGS)}")
    original = facts.number("original_max_position_embeddings", 1) or inside.number(
        "original_max_position_embeddings", 1) or context
    if kind == "linear":
        return theta, RopeScaling(kind=kind, factor=_real(inside, "factor", None))
    if kind == "llama3":
        return theta, RopeScaling(kind=kind, factor=_real(inside, "factor", None), original_context=original,
                                  low_freq_factor=_real(inside, "low_freq_factor", None),
                                  high_freq_factor=_real(inside, "high_freq_factor", None))
    return theta, _yarn(inside, context, original)


def _yarn(inside: Facts, context: int, original: int) -> RopeScaling:
    """YaRN, with the factor of cos and sin worked out: given, or 0.1 ln(factor) + 1, or the ratio of two such.

    Source: YaRN, arXiv 2309.00071, section 3.4; mscale and mscale_all_dim as DeepSeek's configs have them.
    """
    factor = _real(inside, "factor", context / original)

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0

    if inside.get("attention_factor") is not None:
        scale = _real(inside, "attention_factor", None)
    elif inside.get("mscale") and inside.get("mscale_all_dim"):
        scale = temperature(_real(inside, "mscale", None)) / temperature(_real(inside, "mscale_all_dim", None))
    else:
        scale = temperature(1.0)
    truncate = inside.flag("truncate")
    return RopeScaling(kind="yarn", factor=factor, original_context=original, attention_factor=scale,
                       beta_fast=_real(inside, "beta_fast", 32.0), beta_slow=_real(inside, "beta_slow", 1.0),
                       truncate=truncate is not False)
