"""What llama.cpp sets aside for its KV cache: ggml's types by their blocks, cells by the rules of its contexts.

All lengths are tokens (llama.cpp says cells), all sizes bytes, over all devices together: it splits layers, not heads.

Source: ggml-common.h (block structs, MIT) and ggml.c's type traits; src/llama-kv-cache.cpp, llama-kv-cache-iswa.cpp and
llama-context.cpp of ggml-org/llama.cpp (rows of n_embd_k_gqa and n_embd_v_gqa, cells padded to 256, one stream per
sequence unless unified, window pools of window × sequences + ubatch). Ollama, koboldcpp and LM Studio run this code.
"""
from __future__ import annotations

from kvlab.shapes import LayerSpec, ModelSpec, positive

# name -> (elements, bytes) of one block
TYPES = {"f32": (1, 4), "f16": (1, 2), "bf16": (1, 2), "q8_0": (32, 34), "q5_1": (32, 24), "q5_0": (32, 22),
         "q4_1": (32, 20), "q4_0": (32, 18), "iq4_nl": (32, 18), "q1_0": (128, 18)}
PAD = 256                       # cells of a context are a multiple of it
UBATCH = 512                    # llama.cpp's default: tokens of one physical batch
LATENTS = ("once", "twice", "expanded")
_EXPANDED = (192, 128)          # K and V of one head of DeepSeek's MLA when its latent is not what is cached


def row_bytes(kind: str, elements: int) -> int:
    """Bytes of one row of `elements` numbers of a ggml type; whole blocks only.

    KeyError for a type that is not known, ValueError where the row is no multiple of the type's block.
    """
    if kind not in TYPES:
        raise KeyError(f"no ggml cache type named {kind!r}; known: {', '.join(TYPES)}")
    block, size = TYPES[kind]
    positive(elements=elements)
    if elements % block:
        raise ValueError(f"a row of {elements} numbers is no multiple of {kind}'s blocks of {block}")
    return elements // block * size


def padded(cells: int) -> int:
    return -(-cells // PAD) * PAD


def window_cells(n_ctx: int, window: int, slots: int = 1, ubatch: int = UBATCH, unified: bool = True) -> int:
    """Cells of a sliding layer over all slots: never more than the context that a stream has.

    unified: one stream for all sequences, window × slots + ubatch. Else a stream per slot, window + ubatch each.
    """
    positive(n_ctx=n_ctx, window=window, slots=slots, ubatch=ubatch)
    if unified:
        return min(padded(n_ctx), padded(window * slots + ubatch))
    return slots * min(padded(-(-n_ctx // slots)), padded(window + ubatch))


def cell_bytes(layer: LayerSpec, k: str = "f16", v: str = "f16", latent: str = "once") -> int:
    """Bytes of one cell of ONE layer. latent, of MLA layers: once (K alone, since 2026), twice (K 576 and V 512 wide,
    from April 2025), expanded (every head's own K and V, before that)."""
    if latent not in LATENTS:
        raise ValueError(f"latent={latent!r} is unknown; allowed: {', '.join(LATENTS)}")
    if layer.kind == "linear":
        return 0
    if layer.kind != "mla":
        return row_bytes(k, layer.num_kv_heads * layer.head_dim) + row_bytes(v, layer.num_kv_heads * layer.heads.v_dim)
    if latent == "expanded":
        return row_bytes(k, layer.num_q_heads * _EXPANDED[0]) + row_bytes(v, layer.num_q_heads * _EXPANDED[1])
    return row_bytes(k, layer.head_dim) + (row_bytes(v, layer.heads.v_dim) if latent == "twice" else 0)


def cache_bytes(spec: ModelSpec, n_ctx: int, k: str = "f16", v: str = "f16", *, slots: int = 1, ubatch: int = UBATCH,
                unified: bool = True, swa_full: bool = False, latent: str = "once") -> int:
    """KV buffers of a context of n_ctx tokens for all slots together; recurrent states are in other buffers.

    swa_full: windows are stored whole, as before May 2025 and with --swa-full.
    """
    positive(n_ctx=n_ctx)
    every = padded(n_ctx) if unified else slots * padded(-(-n_ctx // slots))
    total = 0
    for layer in spec.layers:
        held = every
        if layer.window and not swa_full:
            held = window_cells(n_ctx, layer.window, slots, ubatch, unified)
        total += layer.count * held * cell_bytes(layer, k, v, latent)
    return total
