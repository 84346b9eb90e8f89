"""INT8 with symmetric absmax scales in fp32: one scale per token and KV head, or per block of tokens and KV head."""
from __future__ import annotations

from dataclasses import dataclass

from kvlab.kv.formats._base import Component, KVFormat, granularity

EXAMPLES = ("int8/token", "int8/block16")


@dataclass(frozen=True)
class Int8:
    """code = round(x / scale), scale = max|x| / 127 over one KV head of `tokens` consecutive tokens."""
    name: str
    tokens: int

    def components(self, head_dim):
        return (Component("codes", 1, head_dim, 1, "int8"), Component("scale", self.tokens, 1, 4, "float32"))

    def encode(self, x_KSD):
        import torch
        x_KSD = x_KSD.float()
        K, S, D = x_KSD.shape
        groups = -(-S // self.tokens)
        padded = torch.nn.functional.pad(x_KSD, (0, 0, 0, groups * self.tokens - S)).reshape(K, groups, -1)
        scale_KGW = padded.abs().amax(-1, keepdim=True) / 127
        safe = torch.where(scale_KGW > 0, scale_KGW, 1.0)          # a group of zeros keeps scale 0 and codes 0
        codes = (padded / safe).round().clamp(-127, 127).to(torch.int8)
        codes_KSD = codes.view(K, -1, D)[:, :S]                     # cloned: a view would keep the padding's bytes too
        return codes_KSD.clone(memory_format=torch.contiguous_format), scale_KGW

    def decode(self, arrays, kv_len, dtype):
        codes, scale = arrays
        per_token = scale if self.tokens == 1 else scale.repeat_interleave(self.tokens, -2)
        return (codes[..., :kv_len, :] * per_token[..., :kv_len, :]).to(dtype)


def kv_format(name: str) -> KVFormat | None:
    found = granularity(name, "int8")
    if found is None or found[0] not in ("token", "block") or (found[0] == "token") != (found[1] is None):
        return None
    codec = Int8(name, found[1] or 1)
    return KVFormat(name, codec, codec)
