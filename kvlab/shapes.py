"""Geometry of an attention call and of a model's cache. Pure numbers: no tensors, no devices, no libraries."""
from __future__ import annotations

from dataclasses import dataclass

LAYER_KINDS = ("full", "sliding", "chunked", "mla", "linear")


def positive(**values: int) -> None:
    """Refuse with ValueError what is no whole number of at least 1, by its name."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} must be a whole number of at least 1")


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of one attention layer; MHA, GQA and MQA differ only in num_kv_heads.

    v_head_dim: width of V where it differs from K's. v_in_k: V is the first v_head_dim elements of K and is not
    stored apart (absorbed MLA: 1 KV head, head_dim 576, v_head_dim 512). window: a query sees at most the last
    `window` tokens, itself included. softcap: scores become softcap * tanh(score / softcap).
    """
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    v_in_k: bool = False
    window: int | None = None
    softcap: float | None = None

    def __post_init__(self):
        positive(num_q_heads=self.num_q_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        if self.v_head_dim is not None:
            positive(v_head_dim=self.v_head_dim)
        if self.window is not None:
            positive(window=self.window)
        if self.num_q_heads % self.num_kv_heads:
            divisors = [n for n in range(1, self.num_q_heads + 1) if self.num_q_heads % n == 0]
            raise ValueError(f"num_q_heads={self.num_q_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
                             f"allowed num_kv_heads: {', '.join(map(str, divisors))}")
        if self.v_in_k and self.v_dim > self.head_dim:
            raise ValueError(f"v_in_k needs v_head_dim <= head_dim, got v_head_dim={self.v_dim}, "
                             f"head_dim={self.head_dim}")
        if self.softcap is not None:
            if not self.softcap > 0:
                raise ValueError(f"softcap={self.softcap!r} must be above 0 (or None for no soft-capping)")
            object.__setattr__(self, "softcap", float(self.softcap))    # 20 and 20.0 are one shape, with one id

    @property
    def group_ratio(self) -> int:
        """Query heads per KV head: 1 = MHA, num_q_heads = MQA."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def v_dim(self) -> int:
        return self.head_dim if self.v_head_dim is None else self.v_head_dim


@dataclass(frozen=True, slots=True)
class Workload:
    """One attention call over a batch: q_lens new tokens per sequence attend to kv_lens tokens, those included.

    Attention is causal and bottom-right aligned: query t of a sequence sees KV tokens 0 … kv_len - q_len + t.
    shared_prefix: leading KV tokens that all sequences of the batch have in common.
    """
    shape: AttentionShape
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    shared_prefix: int = 0

    def __post_init__(self):
        object.__setattr__(self, "q_lens", tuple(self.q_lens))
        object.__setattr__(self, "kv_lens", tuple(self.kv_lens))
        if not self.q_lens or len(self.q_lens) != len(self.kv_lens):
            raise ValueError(f"q_lens and kv_lens need one entry per sequence, got {len(self.q_lens)} and "
                             f"{len(self.kv_lens)}")
        for q_len, kv_len in zip(self.q_lens, self.kv_lens):
            positive(q_len=q_len, kv_len=kv_len)
            if kv_len < q_len:
                raise ValueError(f"kv_len={kv_len} is less than q_len={q_len}: kv_len counts the new tokens too")
        if type(self.shared_prefix) is not int or not 0 <= self.shared_prefix <= min(self.kv_lens):
            raise ValueError(f"shared_prefix={self.shared_prefix} must lie between 0 and the shortest kv_len "
                             f"({min(self.kv_lens)})")

    @classmethod
    def decode(cls, shape: AttentionShape, *, batch_size: int = 1, kv_len: int, shared_prefix: int = 0) -> Workload:
        """One new token per sequence over a cache of kv_len tokens."""
        positive(batch_size=batch_size)
        return cls(shape, (1,) * batch_size, (kv_len,) * batch_size, shared_prefix)

    @classmethod
    def prefill(cls, shape: AttentionShape, *, batch_size: int = 1, q_len: int, kv_len: int | None = None) -> Workload:
        """q_len new tokens per sequence; kv_len (default q_len) counts an earlier cache too."""
        positive(batch_size=batch_size)
        return cls(shape, (q_len,) * batch_size, (q_len if kv_len is None else kv_len,) * batch_size)

    @property
    def batch_size(self) -> int:
        return len(self.kv_lens)

    @property
    def phase(self) -> str:
        decoding = [q_len == 1 for q_len in self.q_lens]
        return "decode" if all(decoding) else "mixed" if any(decoding) else "prefill"

    @property
    def uniform(self) -> bool:
        """Whether all sequences have the same lengths, so that a batched call needs no padding."""
        return len(set(self.q_lens)) == len(set(self.kv_lens)) == 1

    def first_visible(self, sequence: int) -> int:
        """Index of the first KV token that some query of the sequence may see (0 without a window)."""
        if self.shape.window is None:
            return 0
        return max(0, self.kv_lens[sequence] - self.q_lens[sequence] + 1 - self.shape.window)

    def visible_pairs(self) -> int:
        """Number of (query, KV token) pairs inside the causal mask and the window, over all sequences."""
        total = 0
        for q_len, kv_len in zip(self.q_lens, self.kv_lens):
            window = self.shape.window or kv_len
            first, last = kv_len - q_len + 1, kv_len            # tokens seen by the first and the last query, no window
            below = max(0, min(last, window) - first + 1)       # queries that the window does not cut
            total += below * (2 * first + below - 1) // 2 + (q_len - below) * window
        return total

    def columns(self) -> dict:
        """The result table's columns about the workload (lengths are maxima)."""
        s = self.shape
        return dict(phase=self.phase, batch_size=self.batch_size, q_len=max(self.q_lens), kv_len=max(self.kv_lens),
                    num_q_heads=s.num_q_heads, num_kv_heads=s.num_kv_heads, group_ratio=s.group_ratio,
                    head_dim=s.head_dim)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """`count` layers of a model that cache alike.

    kind: full (every token) | sliding (the last `window` tokens) | chunked (the tokens of the current chunk of
    `window`) | mla (one latent of head_dim elements per token, V a view of it) | linear (no KV: a constant
    recurrent state of `state_bytes` per sequence, SSM layers included).
    """
    kind: str
    count: int
    num_q_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int | None = None
    window: int | None = None
    state_bytes: int = 0

    def __post_init__(self):
        if self.kind not in LAYER_KINDS:
            raise ValueError(f"layer kind {self.kind!r} is unknown; allowed: {', '.join(LAYER_KINDS)}")
        positive(count=self.count)
        if self.kind in ("sliding", "chunked") and self.window is None:
            raise ValueError(f"a {self.kind} layer needs a window")
        if self.state_bytes < 0:
            raise ValueError(f"state_bytes={self.state_bytes} must be at least 0")
        if self.kind != "linear":
            AttentionShape(self.num_q_heads, self.num_kv_heads, self.head_dim, self.v_head_dim)   # refuses wrong heads

    @property
    def span(self) -> int:
        """Tokens of a sliding layer's window or a chunked layer's chunk.

        ValueError for a layer that has neither.
        """
        if self.window is None:
            raise ValueError(f"a {self.kind} layer without a window keeps every token: it has no span")
        return self.window

    @property
    def heads(self) -> AttentionShape:
        """`shape` of a layer that has KV.

        ValueError for a linear layer.
        """
        if (shape := self.shape) is None:
            raise ValueError("a linear layer has no KV, and so no heads to store")
        return shape

    @property
    def shape(self) -> AttentionShape | None:
        """What one attention call of this layer looks like; None for a linear layer, which has no KV."""
        if self.kind == "linear":
            return None
        return AttentionShape(self.num_q_heads, self.num_kv_heads, self.head_dim, self.v_head_dim,
                              v_in_k=self.kind == "mla", window=self.window if self.kind == "sliding" else None)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What sizing needs to know of a model; unknown facts are None, never guessed.

    num_q_heads, num_kv_heads and head_dim are the config's own, as the article's formula would read them.
    assumed: what the config does not say and its reader took for granted. weight_bytes: as a file stores the weights.
    """
    name: str
    layers: tuple[LayerSpec, ...]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    context: int | None = None
    params: int | None = None
    attention_type: str = ""
    approximate: str = ""                   # why the byte counts are a model of the cache and not exact; "" = exact
    source: str = ""
    assumed: tuple[str, ...] = ()
    weight_bytes: int | None = None         # None = no file with the weights was read

    @property
    def num_layers(self) -> int:
        return sum(layer.count for layer in self.layers)
