"""`kvlab.attach`: a Hugging Face transformers decoder whose attention is a Variant and whose cache is a KVCache.

What knows transformers is here: its two interfaces, its cache classes, what must be undone. The rest is in _attached.
Legend: B = sequence, S = kv token, K = kv head, D = head_dim, E = v_head_dim.
"""
from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from kvlab.attention import Variant, VariantRef
from kvlab.kv.cache import Layout
from kvlab.kv.formats import KVFormat
from kvlab.kv.formats import kv_format as format_named
from kvlab.model._attached import Attached, Store, examine
from kvlab.model.cache import DTYPES

NEEDS = "kvlab.attach needs transformers 5.0 or later"
_numbers = itertools.count(1)


@contextmanager
def attach(model, variant: str | type | Variant | VariantRef = "sdpa",
           kv_format: str | KVFormat | Sequence[str | KVFormat] = "fp32", layout: Layout | None = None,
           calibration: Tensor | Sequence[int] | None = None, errors: bool = False) -> Iterator[Attached]:
    """Run a transformers decoder with a kvlab variant as its attention and a kvlab format as its KV cache.

    `with kvlab.attach(model, "paged", "int8/token") as attached:` and inside it model(ids), steps with a cache and
    model.generate as ever; `attached.rows()` says per layer what they took. On leaving, by an exception too, the
    model is as it was; caches filled inside are refused outside. Inside the block no gradients are recorded.

    kv_format: one name or KVFormat for all layers, or one for each. layout: default the variant's own.
    calibration: token ids, [tokens] or [sequences, tokens], of a text that is not measured; formats with static scales
    need it, and find them layer by layer in one pass in the model's own precision. errors: also hold each output
    against fp64 attention; this keeps the original K and V, and is slow.

    Tokens of one call see each other as stored. Where tokens share a scale, or the newest stay in fp16, what is stored
    of a token depends on those behind it; there a call of several tokens (a prompt) attends to its own tokens in full
    precision and to earlier ones as they were stored, and its own are stored meanwhile. Rows say so in `note`.
    Single tokens always attend to the cache. Layers with a window keep every token; bytes are counted from the
    window's first token on. A scale other than 1/sqrt(head_dim) is put on q, in the model's dtype.

    Raises ValueError, with the layer where there is one, for what would be wrong without a word: padding, any mask that
    is not causal (with a window at most), beams, cropped or foreign caches, cross attention, dropout, gradients, a
    variant or format that cannot do these heads, a model that is attached already.
    Source: a prompt in full precision and storage beside it: KIVI's code (arXiv 2402.02750).
    """
    _library()
    config = _decoder_config(model)
    formats = _formats(kv_format, config.num_hidden_layers)
    ref = VariantRef.of(variant)
    attached = Attached(config._name_or_path or type(model).__name__, ref, formats,
                        ref.default_layout if layout is None else layout, errors)
    if attached.layout.share_prefix:
        raise ValueError("share_prefix: attach knows no prefix that sequences share; give a layout without it")
    if any(f.static for f in formats):
        attached.formats = _calibrated(model, attached, calibration)
    with _inside(model, config, attached):
        yield attached


def _library():
    """transformers with the interfaces that attach needs, or a sentence."""
    try:
        import transformers
    except ImportError:
        raise ValueError(f"{NEEDS}: pip install 'transformers>=5'") from None
    has = all(hasattr(transformers, name) for name in ("AttentionInterface", "AttentionMaskInterface", "DynamicCache"))
    if int(transformers.__version__.split(".")[0]) < 5 or not has:
        raise ValueError(f"{NEEDS}, {transformers.__version__} is installed: pip install -U 'transformers>=5'")
    return transformers


def _decoder_config(model):
    """The text config of a decoder that can take an attention function and has none of kvlab's yet."""
    if not isinstance(model, _library().PreTrainedModel):
        raise ValueError(f"attach takes a Hugging Face transformers model, got {type(model).__name__}")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} is an encoder with a decoder; attach takes decoders only")
    taken = [c._attn_implementation for c in _configs(model) if str(c._attn_implementation).startswith("kvlab_")]
    if taken:
        raise ValueError(f"this {type(model).__name__}, or a model that shares its config, is attached already; leave "
                         "the inner with block first")
    return model.config.get_text_config(decoder=True)


def _configs(model) -> list:
    """Every config object of the model and its parts, each once."""
    todo = [m.config for m in model.modules() if hasattr(getattr(m, "config", None), "_attn_implementation_internal")]
    found = {}
    while todo:
        config = todo.pop()
        if id(config) not in found:
            found[id(config)] = config
            todo += [sub for name in config.sub_configs if (sub := getattr(config, name, None)) is not None]
    return list(found.values())


def _formats(kv_format, num_layers: int) -> tuple[KVFormat, ...]:
    given = [kv_format] * num_layers if isinstance(kv_format, str | KVFormat) else list(kv_format)
    if len(given) != num_layers:
        raise ValueError(f"kv_format has {len(given)} entries and the model {num_layers} layers; give one, or one each")
    return tuple(f if isinstance(f, KVFormat) else format_named(f) for f in given)


def _calibrated(model, attached: Attached, calibration) -> tuple[KVFormat, ...]:
    """The formats with the static scales that K and V of the calibration text give, layer by layer."""
    names = ", ".join(sorted({f.name for f in attached.formats if f.static}))
    if calibration is None:
        raise ValueError(f"{names} has static scales: give calibration=token ids of a text that is not measured")
    ids = torch.as_tensor(calibration, device=model.device)
    if ids.numel() == 0 or ids.dim() not in (1, 2) or ids.is_floating_point():
        raise ValueError(f"calibration must be token ids, [tokens] or [sequences, tokens] and not empty, got "
                         f"{ids.dtype} of shape {tuple(ids.shape)}")
    full = format_named(DTYPES.get(model.dtype, "fp32"))
    run = replace(attached, formats=(full,) * len(attached.formats), calls=[], modules=set(), observed={}, errors=False)
    with _inside(model, model.config.get_text_config(decoder=True), run):
        model(ids.view(-1, ids.shape[-1]), use_cache=False)
    formats = list(attached.formats)
    for layer, seen in run.observed.items():
        k_SKD, v_SKE = (torch.cat([x.transpose(1, 2).flatten(0, 1) for x in side]) for side in zip(*seen))
        try:
            formats[layer] = formats[layer].calibrate(k_SKD, v_SKE)
        except ValueError as error:
            raise ValueError(f"layer {layer}, calibration: {error}") from None
    return tuple(formats)


@contextmanager
def _inside(model, config, attached: Attached) -> Iterator[None]:
    """The attention function registered, set and hooked in; on leaving everything as it was."""
    library = _library()
    name, before = f"kvlab_{next(_numbers)}", [(c, c._attn_implementation_internal) for c in _configs(model)]
    attached.modules = {id(m) for m in model.modules()}

    def restore():
        attached.open, attached.pending = False, None
        for one, implementation in before:
            one._attn_implementation_internal = implementation

    with ExitStack() as undo, torch.no_grad():
        for interface, function in ((library.AttentionInterface, attached.attend),
                                    (library.AttentionMaskInterface, examine)):
            interface.register(name, function)
            undo.callback(interface._global_mapping.pop, name)
        undo.callback(restore)
        model.set_attn_implementation(name)
        if config._attn_implementation != name:
            raise ValueError(f"{type(model).__name__} does not take attention functions from outside, so attach cannot "
                             "reach it")
        for part in model.modules():
            if isinstance(part, library.PreTrainedModel) and (hook := _cache_hook(part, attached)):
                undo.callback(part.register_forward_pre_hook(hook, with_kwargs=True).remove)
        attached.open = True
        yield


def _cache_hook(part, attached: Attached):
    """A forward pre-hook that has the model keep K and V in kvlab's cache; None where it takes no cache."""
    names = list(inspect.signature(part.forward).parameters)
    taken = [n for n in ("cache", "past_key_values") if n in names]       # renamed in transformers 5.2x
    if not taken:
        return None
    library, config = _library(), part.config.get_text_config(decoder=True)

    def hook(module, args, kwargs):
        attached.pending = None                                     # of a call that was broken off
        given = [kwargs.get(n) for n in ("cache", "past_key_values")]
        given += args[names.index(taken[0]):][:1]
        cache = next((c for c in given if c is not None), None)
        uses = kwargs.get("use_cache")
        if cache is not None:
            _take_over(cache, config, attached)
        elif getattr(config, "use_cache", False) if uses is None else uses:
            kwargs[taken[0]] = library.DynamicCache()
            _take_over(kwargs[taken[0]], config, attached)
        return args, kwargs
    return hook


def _take_over(cache, config, attached: Attached) -> None:
    """Have an empty DynamicCache keep its layers in kvlab; refuse any other cache."""
    ours = _layer_type()
    if cache.layers and all(isinstance(layer, ours) for layer in cache.layers):
        if any(layer.attached is not attached for layer in cache.layers):
            raise ValueError("this cache was filled inside another kvlab.attach; start with an empty one")
        return
    kinds = {type(layer).__name__ for layer in cache.layers} - {"DynamicLayer", "DynamicSlidingWindowLayer"}
    if type(cache) is not _library().DynamicCache or kinds or cache.offloading:
        raise ValueError(f"attach keeps K and V itself: pass no cache or an empty plain DynamicCache, not "
                         f"{type(cache).__name__}({', '.join(sorted(kinds)) or 'offloading' * cache.offloading})")
    if any(layer.get_seq_length() for layer in cache.layers):
        raise ValueError("this cache was filled before the model was attached; start with an empty one inside")
    cache.layers[:] = [ours(attached, layer) for layer in range(config.num_hidden_layers)]
    cache.layer_class_to_replicate = None


@cache
def _layer_type():
    """The class of a transformers cache layer whose tokens lie in a Store, made late: transformers is optional."""
    from transformers.cache_utils import CacheLayerMixin

    def refused(self, *args, **kwargs):
        raise ValueError("kvlab's cache is neither reordered (beams), cropped (assisted decoding), offloaded, copied "
                         "nor split; use greedy decoding or sampling, and a new cache for each text")

    class KVLabLayer(CacheLayerMixin):
        is_sliding = False
        reorder_cache = crop = batch_repeat_interleave = batch_select_indices = offload = prefetch = refused
        __deepcopy__ = __copy__ = __reduce_ex__ = activate_past_recording = lazy_initialization = refused

        def __init__(self, attached: Attached, layer: int):
            super().__init__()
            self.attached, self.store, self.supports_early_init = attached, Store(attached, layer), False

        def update(self, key, value, *args, **kwargs):
            """Hands K and V through: they are stored where the layer's heads and window are known."""
            if not self.attached.open:
                raise ValueError("this cache was filled inside a kvlab.attach that has ended; start with an empty one")
            self.attached.pending = key, self.store
            return key, value

        def get_mask_sizes(self, new):
            return self.store.kv_len + (new if isinstance(new, int) else new.shape[0]), 0

        def get_seq_length(self):
            return self.store.kv_len

        def get_max_length(self):
            return -1
        get_max_cache_shape = get_max_length                        # its name in transformers 5.0

        def reset(self):
            self.store.clear()

    return KVLabLayer
