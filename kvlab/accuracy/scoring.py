"""Teacher-forced scoring: what a KV cache in some format does to a model's predictions on real text.

The reference is the same model with an fp32 cache. KL over the whole vocabulary and top-1 agreement are primary: they
tell formats apart with a thousand tokens. Perplexity needs a hundred times as many, and is secondary.
Legend: T = token of a window, C = token of a chunk, H = hidden_size, V = vocabulary.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvlab.accuracy.statistics import BLOCK, Estimate, block_bootstrap, equivalence, n_needed
from kvlab.accuracy.texts import text as text_of
from kvlab.kv.formats import KVFormat
from kvlab.kv.formats import kv_format as format_named
from kvlab.model import tokenizer
from kvlab.model.cache import calibrated
from kvlab.record.reading import Reading

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from kvlab.model.decoder import Decoder

CHUNK = 32                      # tokens whose logits exist at once: 10 arrays of 32 x 49,152 in fp32 are 60 MiB
CALIBRATION = "pydoc:debugger"  # in every Python, and about something else than the texts that are scored
CALIBRATION_TOKENS = 256
SHARED = 32                     # tokens in a row that two texts may not have in common
MARGIN = 0.001                  # the article's: FP8 loses less than 0.1 % of perplexity
COLUMNS = ("document", "window", "position", "token", "nll", "nll_reference", "kl", "top1", "rank")
UNITS = {"kl": "nat", "top1_agreement": "ratio", "nll": "nat", "nll_delta": "nat", "perplexity": "ratio",
         "perplexity_delta": "ratio"}


class Window(NamedTuple):
    """A stretch of a text that is scored by itself: every window begins with an empty cache."""
    document: str
    index: int                              # type: ignore[assignment]  # the field hides tuple.index
    ids_T: Tensor


def encode(decoder: Decoder, text: str) -> Tensor:
    """Token ids of a text, without special tokens at its ends; refused where they do not give the text back."""
    return tokenizer.encode(decoder.tokenizer, text)


def windows(document: str, ids: Tensor, *, window: int = 512, count: int | None = 1, start: int = 0) -> list[Window]:
    """The first `count` windows of a text's token ids from token `start` on, one behind the other; None: all that fit.

    ids: [tokens]. Refused (ValueError): a text with fewer tokens than that; a window of one token, which predicts
    nothing.
    """
    if count is None:
        count = max(1, (len(ids) - start) // window) if window > 0 else 1
    if window < 2 or count < 1 or start < 0:
        raise ValueError(f"window={window}, count={count}, start={start}; allowed: a window of at least 2 tokens, at "
                         "least one of them, start 0 or more")
    needed = start + count * window
    if len(ids) < needed:
        raise ValueError(f"{document} has {len(ids)} tokens, and {needed} are needed for {count} × {window} from token "
                         f"{start}; take a longer text, a shorter window or fewer of them")
    return [Window(document, i, ids[start + i * window:start + (i + 1) * window]) for i in range(count)]


def hidden_states(decoder: Decoder, chosen: Iterable[Window], formats="fp32", *, variant: str | None = None,
                  told: Callable[[str], None] = lambda stage: None) -> list[Tensor]:
    """Final hidden states [T, H] of each window, each token attending to the cache as it stands at its time.

    formats: of the cache, one for all layers or one per layer. variant: how attention is computed (None: sdpa, and
    paged where stored tokens change). told: hears of every layer, so that a long computation is not taken to hang.
    """
    states = []
    for one in chosen:
        where = f"{one.document}, window {one.index}"
        try:
            states.append(decoder.hidden([one.ids_T], decoder.teacher(formats, variant),
                                         observe=lambda layer, q, k, v, at=where: told(f"{at}, layer {layer}")))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    return states


def score_windows(decoder: Decoder, chosen: Sequence[Window], formats="fp32", *, variant: str | None = None,
                  reference: Sequence[Tensor] | None = None, every: int = 1,
                  told: Callable[[str], None] = lambda stage: None) -> pd.DataFrame:
    """One line per token: document, window, position, token, nll, nll_reference, kl, top1, rank.

    nll, rank: of the next token (`token`; rank 0 = most probable); absent at the last token of a window, which has
    none. kl: KL(fp32 cache || this cache) over the whole vocabulary, nats. top1: both hold the same token most
    probable. reference: hidden_states of the fp32 cache, [tokens, hidden] a window, where at hand.
    every: logits of one token in so many only, for long windows.
    Memory: hidden states are kept, and logits exist for 32 tokens at a time.
    Raises ValueError where NaN or infinity turns up, naming window, layer and token.
    """
    import pandas as pd
    if not chosen:
        raise ValueError("there are no windows to score; see windows(document, ids)")
    if reference is not None and len(reference) != len(chosen):
        raise ValueError(f"{len(reference)} reference states for {len(chosen)} windows; give those of the same windows")
    own = reference is None and formats == "fp32"
    if reference is None:
        reference = hidden_states(decoder, chosen, variant=variant, told=told)
    states = reference if own else hidden_states(decoder, chosen, formats, variant=variant, told=told)
    frames = []
    for one, state_TH, reference_TH in zip(chosen, states, reference):
        told(f"{one.document}, window {one.index}, logits")
        frames.append(pd.DataFrame(_per_token(decoder, one, state_TH, reference_TH, every), columns=COLUMNS))
    return pd.concat(frames, ignore_index=True).astype({"token": "Int64", "rank": "Int64"})


@torch.no_grad()
def _per_token(decoder: Decoder, one: Window, state_TH: Tensor, reference_TH: Tensor, every: int) -> dict[str, list]:
    """The columns of one window."""
    T, next_T = len(one.ids_T), torch.cat([one.ids_T[1:], one.ids_T[-1:]]).to(state_TH.device)
    found: dict[str, list] = {name: [] for name in COLUMNS}
    for position_C in torch.arange(0, T, every).split(CHUNK):
        p_CV, q_CV = (log_probabilities(decoder, one, x_TH, position_C) for x_TH in (reference_TH, state_TH))
        target_C1 = next_T[position_C, None]
        q_C1 = q_CV.gather(1, target_C1)
        for name, values in (("position", position_C), ("token", target_C1[:, 0]), ("nll", -q_C1[:, 0]),
                             ("nll_reference", -p_CV.gather(1, target_C1)[:, 0]), ("kl", kl_divergence(p_CV, q_CV)),
                             ("top1", p_CV.argmax(1) == q_CV.argmax(1)), ("rank", (q_CV > q_C1).sum(1))):
            found[name] += values.tolist()
    if found["position"][-1] == T - 1:                              # the last token of a window predicts nothing known
        for name in ("token", "nll", "nll_reference", "rank"):
            found[name][-1] = None
    return {**found, "document": [one.document] * len(found["kl"]), "window": [one.index] * len(found["kl"])}


def log_probabilities(decoder: Decoder, one: Window, hidden_TH: Tensor, position_C: Tensor) -> Tensor:
    """Log-probabilities [C, V] after the tokens at those positions; NaN and infinity stop with window and token."""
    log_CV = decoder.logits(hidden_TH[position_C]).float().log_softmax(-1)
    if not bool(log_CV.isfinite().all()):
        token = int(position_C[int((~log_CV.isfinite()).any(1).nonzero()[0])])
        raise ValueError(f"{one.document}, window {one.index}: the output layer of {decoder.name or 'the decoder'} "
                         f"gives NaN or infinite logits, first at token {token} of {len(one.ids_T)}; its weights are "
                         "broken")
    return log_CV


def kl_divergence(p_TV: Tensor, q_TV: Tensor) -> Tensor:
    """KL(p || q) in nats of each row of log-probabilities.

    Summed as p (e^d - 1 - d) with d = log q - log p, which equals -p d in total since p and q both sum to 1, and of
    which no term is negative: formats that change little (fp16: 3e-7) are not lost in rounding.
    """
    p, d = p_TV.exp(), q_TV - p_TV
    return torch.where(d < 1, p * (torch.expm1(d.clamp(max=1)) - d), q_TV.exp() - p - p * d).sum(-1)


def with_scales(decoder: Decoder, formats, calibration_ids: Tensor | None, chosen: Sequence[Window] = ()):
    """The formats (one, or one per layer), where static with the scales that a calibration text gives each layer.

    calibration_ids: [tokens]. Refused (ValueError): no calibration text, an empty one, one that shares tokens with what
    is scored (`disjoint`).
    """
    if not is_static(formats):
        return formats
    if calibration_ids is None or not len(calibration_ids):
        raise ValueError("the calibration text is empty, and static scales are found on one; give a text of some "
                         "hundred tokens that is not scored")
    disjoint(calibration_ids, chosen, "the calibration text", "scales must come from a text that is not scored")
    return calibrated(decoder, formats, calibration_ids)


def disjoint(ids_T: Tensor, chosen: Iterable[Window], what: str, why: str) -> None:
    """Refuse (ValueError) tokens that share 32 in a row with a window; fewer where one of the two has no 32."""
    for one in chosen:
        length = min(SHARED, len(ids_T), len(one.ids_T))
        if tokenizer.shared_run(ids_T, one.ids_T, length):
            raise ValueError(f"{what} shares {length} tokens in a row with {one.document}, window {one.index}; {why}")


def is_static(formats) -> bool:
    """Whether a calibration pass must find scales first; of one format, or of one per layer."""
    several = [formats] if isinstance(formats, str | KVFormat) else formats
    return any((format_named(one) if isinstance(one, str) else one).static for one in several)


def score(model: Decoder | str, text: str, kv_format: str | KVFormat = "fp32", *, window: int = 512, count: int = 2,
          start: int = 0, calibration: str = CALIBRATION, variant: str | None = None) -> pd.DataFrame:
    """Score `count` windows of a text under a KV format; one line per token (see score_windows).

    model: a Decoder, or what load_decoder takes. text: a name such as "pydoc:execmodel" or "file:PATH".
    calibration: the text whose first 256 tokens give a format its static scales, if it has any.
    Raises KeyError for unknown names, ValueError for a text that is too short or calibrates itself.
    """
    (scores,) = score_each(model, text, [kv_format], window=window, count=count, start=start, calibration=calibration,
                           variant=variant)
    return scores


def score_each(model: Decoder | str, text: str, kv_formats: Sequence[str | KVFormat], *, window: int = 512,
               count: int = 2, start: int = 0, calibration: str = CALIBRATION,
               variant: str | None = None) -> Iterator[pd.DataFrame]:
    """`score` under one format after the other; the fp32 cache that all are held against is computed once."""
    formats = [format_named(one) if isinstance(one, str) else one for one in kv_formats]
    content = text_of(text)                                         # what is wrong is said before a model is loaded
    static = any(is_static(one) for one in formats)
    if static and text_of(calibration) == content:
        raise ValueError(f"{text} is to be scored and to calibrate; scales must come from a text that is not scored, "
                         f"such as {CALIBRATION}")
    if window * count <= 2 * BLOCK:
        raise ValueError(f"{count} × {window} tokens are too few for an interval, which is drawn from blocks of "
                         f"{BLOCK}; take a larger window or count, {2 * BLOCK + 1} tokens in all at least")
    if isinstance(model, str):
        from kvlab.model.load import load_decoder
        model = load_decoder(model)
    if not hasattr(model, "teacher"):
        raise ValueError(f"score takes a kvlab Decoder (kvlab.load_decoder) or what load_decoder takes, got "
                         f"{type(model).__name__}; kvlab.attach puts formats into a transformers model")
    for one, layer in itertools.product(formats, range(model.config.num_layers)):
        if why := one.why_not(model.config.shape(layer)):
            raise ValueError(f"layer {layer} cannot keep its K and V as {one.name}: {why}")
    chosen = windows(text, encode(model, content), window=window, count=count, start=start)
    ids = encode(model, text_of(calibration))[:min(CALIBRATION_TOKENS, model.config.context)] if static else None
    ready = [with_scales(model, one, ids, chosen) for one in formats]
    reference = hidden_states(model, chosen, variant=variant)
    return (score_windows(model, chosen, one, variant=variant, reference=reference) for one in ready)


@dataclass(frozen=True)
class Quality:
    """What a cache's format does to the predictions, against another cache on the same tokens; 95 % intervals.

    kl, top1_agreement: against the fp32 cache. nll_delta, perplexity_delta: against the one compared with, losses
    positive. margin: the relative loss of perplexity that counts as none; loss: perplexity_delta with the 90 % interval
    of the equivalence test; verdict: "below" (no change beyond the margin), "above" (a loss beyond it), "gain" (a gain
    beyond it) or "inconclusive"; n_needed: tokens whose interval would be ± half the margin.
    """
    kl: Estimate
    top1_agreement: Estimate
    nll: Estimate
    nll_delta: Estimate
    perplexity: Estimate
    perplexity_delta: Estimate
    margin: float
    loss: Estimate
    verdict: str
    n_needed: int

    def readings(self, **fields) -> list[Reading]:
        """A Reading per number; fields: what they have in common (method, source, hardware, …)."""
        return [Reading(name, e.value, unit, "measured", low=e.low, high=e.high, n=e.n, **fields)
                for name, unit in UNITS.items() for e in [getattr(self, name)]]


def compare(scores: pd.DataFrame, other: pd.DataFrame | None = None, *, margin: float = MARGIN,
            seed: int = 0) -> Quality:
    """Score frames as numbers with intervals, paired token by token (moving-block bootstrap, see block_bootstrap).

    other: scores of the same windows under another format; None: the fp32 cache. Refused (ValueError): frames of
    other tokens.
    """
    if other is not None:
        same = ["document", "window", "position", "token"]
        if not scores[same].reset_index(drop=True).equals(other[same].reset_index(drop=True)):
            raise ValueError("the two score frames are not of the same windows of the same texts; score both alike")

    def mean(values, rows, confidence=0.95):
        return block_bootstrap(values, rows["document"], rows["window"], confidence=confidence, seed=seed)
    nll = scores["nll"].dropna()
    against = scores["nll_reference"] if other is None else other["nll"].set_axis(scores.index)
    delta, rows = nll - against[nll.index], scores.loc[nll.index]
    change, loss = mean(delta, rows), mean(delta, rows, 0.9).through(math.expm1)
    whole, verdict = mean(nll, rows), equivalence(loss, margin)
    agreement = mean(scores["top1"], scores).through(lambda share: min(1.0, max(0.0, share)))
    kl = mean(scores["kl"], scores).through(lambda nats: max(0.0, nats))
    return Quality(kl=kl, top1_agreement=agreement, nll=whole,
                   nll_delta=change, perplexity=whole.through(math.exp), perplexity_delta=change.through(math.expm1),
                   margin=margin, loss=loss, verdict="gain" if verdict == "above" and loss.value < 0 else verdict,
                   n_needed=n_needed(loss, margin))
