"""Run a model over a text and keep the q, k and v that chosen layers computed, for use as a trial's data.

Legend: T = token, Q = query head, K = kv head, D = head_dim, E = v_head_dim.
"""
from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvlab.attention import _captured_file
from kvlab.attention._base import DTYPES
from kvlab.model._asked import layer_of
from kvlab.shapes import AttentionShape

SHARED = 32                     # tokens in a row that show two texts to be one
See = Callable[[int, Tensor, Tensor, Tensor, AttentionShape], None]     # layer, q_TQD, k_TKD, v_TKE, its shape


@dataclass(frozen=True)
class Captured:
    """One layer's tensors on disk. data: what a Trial takes. path: the file; shape: of the layer's attention."""
    layer: int
    data: str
    path: Path
    shape: AttentionShape
    tokens: int


class _Enough(Exception):
    """All chosen layers were seen: the rest of the model need not run."""


def capture(model, text: str | Tensor, layers: int | Iterable[int] | str, out: Path | str | None = None, *,
            tokens: int | None = None, calibration: str | Tensor | None = None, dtype: str = "fp32") -> list[Captured]:
    """q [T, Q, D], k [T, K, D], v [T, K, E] of a causal model's layers over a text, as safetensors files.

    model: a kvlab Decoder or a model of Hugging Face transformers. text: a string (a Decoder encodes it with its
    tokenizer) or a 1-D tensor of token ids; tokens: take the first so many. layers: numbers, or "all". q and k are
    those behind RoPE; q is scaled so that 1/sqrt(head_dim) gives the model's own scores. calibration: another text,
    whose first 256 tokens formats with static scales calibrate on; they may not share 32 tokens in a row with the text.
    dtype: of the files.

    The files lie in kvlab's cache folder, named by their hash: `Trial(…, data=captured.data)` finds them, also in a
    worker process. out: a folder for copies to pass on. One layer of the text is held in memory at a time, and the
    model runs no further than the last layer chosen. ValueError: a layer that is not there, no token, NaN or infinity,
    a layer up to the last one chosen whose attention is not plain causal attention (sinks, biases, chunks, dropout).
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}; allowed: {', '.join(DTYPES)}")
    ids_T, kept_as = _token_ids(model, text, tokens), getattr(torch, DTYPES[dtype][0])
    chosen = _layers(layers, _num_layers(model))
    about, found, others = _about(model, text, ids_T), {}, {}
    if calibration is not None:
        other_T = _calibration_ids(model, calibration, ids_T)
        about["calibration_ids_sha256"] = _hash(other_T)
        _run(model, other_T, chosen, lambda layer, q_TQD, k_TKD, v_TKE, shape: others.update(
            {layer: (k_TKD.to(kept_as), v_TKE.to(kept_as))}))

    def keep(layer, q_TQD, k_TKD, v_TKE, shape):
        header = about | dict(layer=layer, window=shape.window, softcap=shape.softcap)
        tensors = (x.to(kept_as) for x in (q_TQD, k_TKD, v_TKE))
        data, path = _captured_file.write(*tensors, header, others.get(layer))
        if out is not None:
            Path(out).mkdir(parents=True, exist_ok=True)
            path = Path(shutil.copy(path, out))
        found[layer] = Captured(layer, data, path, shape, len(ids_T))

    _run(model, ids_T, chosen, keep)
    return [found[layer] for layer in sorted(found)]


def _run(model, ids_T: Tensor, chosen: set[int], take: See) -> None:
    """Run the model over the tokens as far as needed, and hand over each chosen layer's q, k, v as they come."""
    left = set(chosen)

    def see(layer, *tensors_and_shape):
        if layer in left:
            take(layer, *tensors_and_shape)
            left.remove(layer)
            if not left:
                raise _Enough

    try:
        with torch.no_grad():
            (_run_decoder if _is_decoder(model) else _run_transformers)(model, ids_T, see)
    except _Enough:
        return
    raise ValueError(f"layers {', '.join(map(str, sorted(left)))} of {_name(model)} showed no attention: the model "
                     "does not compute it through transformers' attention interface")


def _run_decoder(decoder, ids_T: Tensor, see: See) -> None:
    decoder.hidden([ids_T], decoder.cache(len(ids_T)),
                   observe=lambda layer, q, k, v: see(layer, q, k, v, decoder.config.shape(layer)))


def _run_transformers(model, ids_T: Tensor, see: See) -> None:
    with _watched(model.config, see):
        model.model(input_ids=ids_T.to(model.device)[None], use_cache=False)


@contextmanager
def _watched(config, see: See) -> Iterator[None]:
    """The attention function that the model's config names, wrapped for the time of the block."""
    try:
        from transformers import AttentionInterface
    except ImportError:
        raise ValueError("capturing from this model needs a transformers with AttentionInterface (4.48 or later): "
                         "pip install -U transformers") from None
    known, name = AttentionInterface(), config.get_text_config()._attn_implementation
    before = known.get(name)                                            # None for eager: each model file has its own

    def watched(module, q_1QTD, k_1KTD, v_1KTE, mask, *, dropout=0.0, scaling=None, sliding_window=None,
                softcap=None, **more):
        layer = layer_of(module, dropout, more, "capture")
        if not _plain(mask, q_1QTD.shape[2], sliding_window):
            raise ValueError(f"layer {layer} of {type(module).__name__} has a mask that is neither causal nor a plain "
                             "window (chunks, parts that look ahead, a mask of the model's own); what was captured "
                             "would not give its attention again")
        q_TQD, k_TKD, v_TKE = (x[0].transpose(0, 1) for x in (q_1QTD, k_1KTD, v_1KTE))
        D = q_TQD.shape[-1]
        scale = 1.0 if scaling is None else scaling * D**0.5
        if abs(scale - 1) > 1e-6:
            q_TQD = q_TQD.float() * scale
        see(layer, q_TQD, k_TKD, v_TKE,
            AttentionShape(q_TQD.shape[1], k_TKD.shape[1], D, None if v_TKE.shape[-1] == D else v_TKE.shape[-1],
                           window=sliding_window, softcap=softcap))
        told = {key: value for key, value in dict(scaling=scaling, sliding_window=sliding_window,
                                                  softcap=softcap).items() if value is not None}
        own = before or sys.modules[type(module).__module__].eager_attention_forward
        return own(module, q_1QTD, k_1KTD, v_1KTE, mask, **told, **more)

    known.register(name, watched)
    try:
        yield
    finally:
        if before is None:
            del AttentionInterface._global_mapping[name]
        else:
            known.register(name, before)


def _plain(mask, T: int, window: int | None) -> bool:
    """Whether the mask that a layer gets shows each token itself and those before it, of at most the last `window`.

    None is causal, and so is what other implementations than sdpa and eager make, from the window they are told.
    """
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        return True
    seen_TS, token = mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] == 0, torch.arange(T, device=mask.device)
    if seen_TS.shape != (T, T):
        return False
    for begin in range(0, T, 512):                                  # a mask of 8,192 tokens has 67 million cells
        back_TS = token[begin:begin + 512, None] - token
        if not torch.equal(seen_TS[begin:begin + 512], (back_TS >= 0) & (back_TS < (window or T))):
            return False
    return True


# -------------------------------------------------------------------------------------------------- what is asked for

def _is_decoder(model) -> bool:
    from kvlab.model.decoder import Decoder
    if isinstance(model, Decoder):
        return True
    if not (hasattr(model, "config") and hasattr(model, "model")):
        raise ValueError(f"cannot capture from {type(model).__name__}; give a kvlab Decoder (kvlab.load_decoder) or a "
                         "causal language model of Hugging Face transformers")
    return False


def _num_layers(model) -> int:
    return model.config.num_layers if _is_decoder(model) else model.config.get_text_config().num_hidden_layers


def _layers(layers, there: int) -> set[int]:
    if isinstance(layers, str) and layers == "all":
        return set(range(there))
    chosen = list(layers) if isinstance(layers, Iterable) else [layers]
    if not chosen:
        raise ValueError(f'no layer was chosen; give numbers from 0 to {there - 1}, or "all"')
    for layer in chosen:
        if type(layer) is not int or not 0 <= layer < there:
            raise ValueError(f'layer {layer!r} is not in this model; allowed: 0 to {there - 1}, or "all"')
    return set(chosen)


def _token_ids(model, text: str | Tensor, tokens: int | None) -> Tensor:
    if isinstance(text, str):
        if (tokenizer := getattr(model, "tokenizer", None)) is None:
            raise ValueError("this model comes without a tokenizer; encode the text and give its token ids as a 1-D "
                             "tensor")
        from kvlab.model.tokenizer import encode  # needs the optional package tokenizers
        text = encode(tokenizer, text)
    ids_T = torch.as_tensor(text)
    if ids_T.ndim != 1 or ids_T.is_floating_point() or ids_T.dtype == torch.bool:
        raise ValueError(f"token ids must be whole numbers in one dimension, got {ids_T.dtype} of size "
                         f"{tuple(ids_T.shape)}")
    if tokens is not None and not 1 <= tokens <= len(ids_T):
        raise ValueError(f"tokens={tokens}, and the text has {len(ids_T)}")
    if not len(ids_T):
        raise ValueError("the text has no tokens; give at least one")
    return ids_T[:tokens].long()


def _calibration_ids(model, calibration: str | Tensor, ids_T: Tensor) -> Tensor:
    wanted = _captured_file.CALIBRATION_TOKENS
    other_T = _token_ids(model, calibration, None)
    if len(other_T) < wanted:
        raise ValueError(f"the calibration text has {len(other_T)} tokens; {wanted} are needed")
    from kvlab.model.tokenizer import shared_run
    length = min(SHARED, len(ids_T))
    if shared_run(other_T[:wanted], ids_T, length):
        raise ValueError(f"the calibration text is the text itself, or shares {length} tokens in a row with it; give "
                         "another, or scales would know what they store")
    return other_T[:wanted]


def _name(model) -> str:
    return model.name if _is_decoder(model) else getattr(model.config, "_name_or_path", "") or type(model).__name__


def _hash(ids_T: Tensor) -> str:
    return hashlib.sha256(ids_T.cpu().numpy().astype("<i8").tobytes()).hexdigest()


def _about(model, text, ids_T: Tensor) -> dict:
    """Where the tensors are from, for the file's header."""
    return dict(kvlab=sys.modules["kvlab"].__version__, model=_name(model), model_sha256=getattr(model, "sha256", ""),
                tokens=len(ids_T), ids_sha256=_hash(ids_T),
                text_sha256=hashlib.sha256(text.encode()).hexdigest() if isinstance(text, str) else "")
