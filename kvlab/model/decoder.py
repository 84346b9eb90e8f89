"""A Llama-type decoder whose attention is a Variant and whose cache is a KVCache in a KVFormat.

Speed and accuracy come from one code path: what kvlab times as a single call is what computes the logits here.
Legend: T = token (of all sequences, one after the other), H = hidden_size, Q = query head, K = kv head, D = head_dim.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear, rms_norm, silu

from kvlab.attention import VariantRef
from kvlab.kv.cache import Layout
from kvlab.model import rope
from kvlab.model.cache import DTYPES, DecoderCache
from kvlab.model.config import DecoderConfig
from kvlab.model.teacher import TeacherCache

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

Observe = Callable[[int, "Tensor", "Tensor", "Tensor"], None]          # layer, q_TQD, k_TKD, v_TKD after RoPE


class Decoder:
    """A decoder of the llama, mistral, qwen2 or qwen3 kind, for inference.

    weights: tensors under the names of Hugging Face's checkpoints, all of one floating dtype and on one device; that
    dtype is the one of the arithmetic. sha256: of the file that they come from, "" if they were made up.
    """

    def __init__(self, config: DecoderConfig, weights: Mapping[str, Tensor], tokenizer: Tokenizer | None = None,
                 name: str = "", sha256: str = ""):
        self.config, self.weights, self.tokenizer, self.name, self.sha256 = config, weights, tokenizer, name, sha256
        embedding = weights["model.embed_tokens.weight"]
        self.dtype, self.device = embedding.dtype, str(embedding.device)
        if self.dtype not in DTYPES:
            raise ValueError(f"weights of dtype {self.dtype}; allowed: {', '.join(map(str, DTYPES))}")
        self._rope = (torch.empty(0), torch.empty(0))

    @classmethod
    def random(cls, config: DecoderConfig, seed: int = 0) -> Decoder:
        """The same decoder with random weights in fp32, for trying things out."""
        generator = torch.Generator().manual_seed(seed)

        def made(name, size):
            noise = torch.randn(*size, generator=generator)
            return 1 + 0.1 * noise if "norm" in name else noise * (0.1 if name.endswith("bias") else size[-1] ** -0.5)
        return cls(config, {name: made(name, size) for name, size in config.tensor_shapes().items()}, name="random")

    def to(self, device: str, dtype=None) -> Decoder:
        """The decoder with its weights on that device, in that dtype (default: as they are)."""
        moved = {name: w.to(device, dtype) for name, w in self.weights.items()}
        return Decoder(self.config, moved, self.tokenizer, self.name, self.sha256)

    def cache(self, tokens: int, *, kv_format="fp32", variant="sdpa", layout: Layout | None = None, sequences: int = 1,
              num_blocks: int | None = None) -> DecoderCache:
        """An empty cache with room for `tokens` tokens in each of so many sequences.

        kv_format: a name, a KVFormat, or one of either per layer. layout: default the variant's own. num_blocks: of a
        paged cache's pool, the null block included; default: enough for all.
        """
        ref = VariantRef.of(variant)
        return DecoderCache(self._shapes(), kv_format, ref, ref.default_layout if layout is None else layout,
                            tokens=tokens, sequences=sequences, num_blocks=num_blocks, dtype=self.dtype,
                            device=self.device)

    def teacher(self, kv_format="fp32", variant=None) -> TeacherCache:
        """An empty cache for scoring one text: each token meets the cache as it is when that token is the newest."""
        ref = None if variant is None else VariantRef.of(variant)
        return TeacherCache(self._shapes(), kv_format, ref, dtype=self.dtype, device=self.device)

    def _shapes(self):
        return [self.config.shape(layer) for layer in range(self.config.num_layers)]

    @torch.no_grad()
    def hidden(self, ids: Sequence[Tensor], cache: DecoderCache | TeacherCache, *,
               sequences: Sequence[int] | None = None, observe: Observe | None = None) -> Tensor:
        """Hidden states [T, H], after the final norm, of new tokens behind those that the cache holds.

        ids: the new token ids of each sequence; sequences: which of the cache's they are (default the first ones).
        observe: told each layer's q, k, v after RoPE, before they are stored. NaN or infinity stops with ValueError,
        naming layer and token; OutOfBlocks where a paged cache's pool runs dry: the sequences then hold what they held.
        """
        sequences = list(range(len(ids)) if sequences is None else sequences)
        if len({*sequences} & {*range(len(cache.kv_lens))}) != len(ids) or len(sequences) != len(ids):
            raise ValueError(f"{len(ids)} texts for sequences {sequences}; give each one of its own, of the "
                             f"{len(cache.kv_lens)} that this cache has")
        ids = [torch.as_tensor(one, device=self.device) for one in ids]
        if wrong := [one for one in ids if one.dim() != 1 or one.dtype not in (torch.int64, torch.int32)]:
            raise ValueError(f"token ids are whole numbers in one dimension, got {wrong[0].dtype} of shape "
                             f"{tuple(wrong[0].shape)}")
        tokens_T = torch.cat(ids)
        q_lens, starts = [len(one) for one in ids], [cache.kv_lens[b] for b in sequences]
        self._check(tokens_T, q_lens, starts)
        cache.begin(q_lens, sequences)
        cos_TD, sin_TD = self._tables(q_lens, starts)
        x_TH = self.weights["model.embed_tokens.weight"][tokens_T]
        for layer in range(self.config.num_layers):
            x_TH = self.block(layer, x_TH, cos_TD, sin_TD, cache, observe)
            if not bool(torch.isfinite(x_TH.sum())) and not bool((finite := x_TH.isfinite()).all()):
                token = int((~finite).any(1).nonzero()[0])
                raise ValueError(f"layer {layer} of {self.name or 'the decoder'} gives NaN or infinity, first at new "
                                 f"token {token} of {len(tokens_T)}; its weights, or the KV format, do not fit")
        cache.commit()
        return self._norm(x_TH, "model.norm")

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Logits [T, vocab_size] of hidden states; take few tokens at a time, since a row may be 200,000 long."""
        head = self.weights.get("lm_head.weight")
        return linear(hidden_TH, self.weights["model.embed_tokens.weight"] if head is None else head)

    def block(self, layer: int, x_TH: Tensor, cos_TD: Tensor, sin_TD: Tensor, cache, observe=None) -> Tensor:
        """One layer: attention over the cache, then the gated MLP, each behind its norm and a residual."""
        name, c = f"model.layers.{layer}", self.config
        h_TH = self._norm(x_TH, f"{name}.input_layernorm")
        q_TQD, k_TKD, v_TKD = (self._linear(h_TH, f"{name}.self_attn.{side}_proj").view(len(h_TH), -1, c.head_dim)
                               for side in "qkv")
        if c.qk_norm:
            q_TQD, k_TKD = (self._norm(x, f"{name}.self_attn.{side}_norm") for x, side in ((q_TQD, "q"), (k_TKD, "k")))
        q_TQD, k_TKD = rope.rotate(q_TQD, cos_TD, sin_TD), rope.rotate(k_TKD, cos_TD, sin_TD)
        if observe is not None:
            observe(layer, q_TQD, k_TKD, v_TKD)
        try:
            out_TQD = cache.attend(layer, q_TQD, k_TKD, v_TKD)
        except ValueError as error:
            raise error if str(error).startswith("layer ") else ValueError(f"layer {layer}: {error}") from error
        x_TH = x_TH + self._linear(out_TQD.flatten(1), f"{name}.self_attn.o_proj")
        h_TH = self._norm(x_TH, f"{name}.post_attention_layernorm")
        gated = silu(self._linear(h_TH, f"{name}.mlp.gate_proj")) * self._linear(h_TH, f"{name}.mlp.up_proj")
        return x_TH + self._linear(gated, f"{name}.mlp.down_proj")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """RMS norm over the last axis, in fp32 as the published models do."""
        weight = self.weights[f"{name}.weight"]
        return rms_norm(x.float(), weight.shape, eps=self.config.rms_eps).to(x.dtype) * weight

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _tables(self, q_lens, starts) -> tuple[Tensor, Tensor]:
        """cos and sin of the new tokens' positions."""
        longest = max(start + n for n, start in zip(q_lens, starts))
        if len(self._rope[0]) < longest:
            self._rope = rope.tables(self.config, max(256, 2 * longest), self.device)
        if len(q_lens) == 1:
            return tuple(table[starts[0]:longest] for table in self._rope)
        positions_T = torch.cat([torch.arange(s, s + n, device=self.device) for n, s in zip(q_lens, starts)])
        return tuple(table[positions_T] for table in self._rope)

    def _check(self, tokens_T: Tensor, q_lens, starts) -> None:
        if not q_lens or min(q_lens) < 1:
            raise ValueError(f"every sequence needs at least one new token, got {q_lens}")
        low, high = int(tokens_T.min()), int(tokens_T.max())
        if low < 0 or high >= self.config.vocab_size:
            raise ValueError(f"token id {low if low < 0 else high} is outside the vocabulary of "
                             f"{self.config.vocab_size}; the text was encoded with another tokenizer")
        longest = max(start + n for n, start in zip(q_lens, starts))
        if longest > self.config.context:
            raise ValueError(f"{longest} tokens are beyond the {self.config.context} of context that "
                             f"{self.name or 'this model'} was made for; take a shorter text or window")

    def renamed(self, name: str, weights: Mapping[str, Tensor], **config) -> Decoder:
        """A decoder with some other weights, and config fields that go with them; the rest is shared, not copied."""
        return Decoder(replace(self.config, **config), {**self.weights, **weights}, self.tokenizer, name)
