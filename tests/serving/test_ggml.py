"""llama.cpp's buffers to the printed MiB: cache types by their blocks, cells, window pools, latents."""
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.catalog.models import model
from kvlab.kv.formats import kv_format
from kvlab.serving.ggml import TYPES, cache_bytes, cell_bytes, padded, row_bytes, window_cells
from kvlab.shapes import LayerSpec

MiB = 2**20


@pytest.mark.parametrize("kind, per_32", [("f32", 128), ("f16", 64), ("bf16", 64), ("q8_0", 34), ("q5_1", 24),
                                          ("q5_0", 22), ("q4_1", 20), ("q4_0", 18), ("iq4_nl", 18)])
def test_bytes_per_32_elements(kind, per_32):
    assert row_bytes(kind, 32) == per_32 and row_bytes(kind, 320) == 10 * per_32


def test_the_types_are_the_catalogues_where_both_know_them():
    for kind in set(TYPES) & {"q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"}:
        assert row_bytes(kind, 128) == kv_format(kind).k.components(128)[0].width


def test_rows_are_whole_blocks():
    assert row_bytes("q1_0", 1024) == 144
    with pytest.raises(ValueError, match="no multiple of q4_0's blocks of 32"):
        row_bytes("q4_0", 48)
    with pytest.raises(KeyError, match="known: f32"):
        row_bytes("fp8", 32)
    with pytest.raises(ValueError):
        row_bytes("f16", 0)


# MiB as llama.cpp prints them: ggml-org/llama.cpp issue 11200, PR 21551, a fork's table of build b8247, Ollama logs.
@pytest.mark.parametrize("name, n_ctx, k, v, mib", [
    ("Qwen/Qwen2.5-Coder-32B-Instruct", 32768, "q8_0", "q8_0", 4352.00),
    ("Qwen/Qwen3.5-9B", 131072, "q4_0", "q4_0", 1152.00),
    ("Qwen/Qwen3.6-27B", 262144, "q8_0", "q4_0", 6656.00),
    ("mistralai/Mistral-Small-24B-Instruct-2501", 6656, "q4_0", "q1_0", 182.81),
    ("meta-llama/Llama-3.2-3B", 4096, "f16", "f16", 448.00),
    ("meta-llama/Llama-3.2-3B", 4096, "q8_0", "f16", 343.00),
    ("meta-llama/Llama-3.2-3B", 4096, "q5_0", "f16", 301.00),
    ("meta-llama/Llama-3.2-3B", 4096, "q4_1", "f16", 294.00),
    ("Qwen/Qwen3-8B", 40960, "f16", "f16", 5760.00),
])
def test_printed_buffers(name, n_ctx, k, v, mib):
    assert round(cache_bytes(model(name), n_ctx, k, v) / MiB, 2) == mib


def test_a_context_is_padded_to_256_cells_per_stream():
    assert (padded(1), padded(256), padded(257)) == (256, 256, 512)
    small = model("meta-llama/Llama-3.2-1B")
    assert cache_bytes(small, 4097) == cache_bytes(small, 4352)
    assert cache_bytes(small, 4000, slots=4, unified=False) == cache_bytes(small, 4096)


def test_window_pools_per_slot():
    """gpt-oss-120b with four unified slots prints 1,024 cells; gemma-3-270m with four streams of 1,024 fills them."""
    assert window_cells(65536, 128, slots=4) == 1024
    assert window_cells(65536, 128) == 768 and window_cells(512, 128) == 512
    assert window_cells(4096, 512, slots=4, unified=False) == 4 * 1024
    oss = model("openai/gpt-oss-120b")
    assert cache_bytes(oss, 65535, slots=4) == (2304 + 36) * MiB
    assert cache_bytes(oss, 65535, swa_full=True) == 4608 * MiB
    assert cache_bytes(model("google/gemma-3-270m"), 4096, slots=4, unified=False) == 72 * MiB


def test_latents_once_twice_and_expanded():
    deepseek = model("deepseek-ai/DeepSeek-V3")
    assert cache_bytes(deepseek, 131072, "q4_0", "q4_0", latent="twice") == 4666.5 * MiB
    assert cell_bytes(deepseek.layers[0]) == 576 * 2
    assert cell_bytes(deepseek.layers[0], latent="expanded") == (24576 + 16384) * 2
    with pytest.raises(ValueError, match="allowed: once, twice, expanded"):
        cell_bytes(deepseek.layers[0], latent="thrice")
    assert cell_bytes(LayerSpec("linear", 1, state_bytes=9)) == 0


@given(st.integers(1, 10**6), st.integers(1, 5000), st.integers(1, 16), st.sampled_from([256, 512, 2048]),
       st.booleans())
def test_a_window_never_takes_more_cells_than_the_context(n_ctx, window, slots, ubatch, unified):
    cells = window_cells(n_ctx, window, slots, ubatch, unified)
    every = padded(n_ctx) if unified else slots * padded(-(-n_ctx // slots))
    assert 0 < cells <= every and cells % 256 == 0
