"""Lines that no file holds: other models, forks, engines and spellings, each number worked out here by hand.

Wrong lines stand between them: 10 % off, one block off, another model, types or K and V exchanged.
"""
from math import ceil

import pytest

from kvlab.serving._log_case import read
from kvlab.serving._log_cells import engine, number
from kvlab.serving.server_logs import check, judge

GIB, MIB = 2**30, 2**20
AGREED, EXPLAINED, UNEXPLAINED, UNMATCHED = "agreed", "explained", "unexplained", "unmatched"
GGML = dict(f16=2, bf16=2, f32=4, q8_0=34 / 32, q5_1=24 / 32, q5_0=22 / 32, q4_1=20 / 32, q4_0=18 / 32, iq4_nl=18 / 32)


def heads(layers, kv, dim, itemsize=2, tp=1):
    """Bytes of one token on one rank."""
    return layers * 2 * max(1, kv // tp) * dim * itemsize


def latent(layers, itemsize=2):
    return layers * (512 + 64) * itemsize


def line(verdict, engine, model, **cells):
    row = {**dict(model=model, engine_version=engine, n_gpus=1, tp=1), **cells}
    return pytest.param({name: str(cell) for name, cell in row.items()}, verdict, id=f"{verdict}-{engine}-{model}"[:70])


def on(gpus):
    return dict(n_gpus=gpus, tp=gpus)


def v0(verdict, engine, model, token, block=16, swap=4, off=0, **cells):
    return line(verdict, engine, model, gpu_blocks=3333, block_size=block, swap_gib=swap,
                cpu_blocks=swap * GIB // (token * block) + off, **cells)


def v1(verdict, engine, model, token, pool, block=16, length=8192, factor=1.0, **cells):
    blocks = int(pool * GIB // (token * block))
    per = length / block if engine == "vLLM 0.8.5" else ceil(length / block)
    return line(verdict, engine, model, **{**dict(
        kv_cache_gib=f"{pool:.2f}", kv_tokens=int(blocks * factor) * block, block_size=block, max_model_len=length,
        max_concurrency=f"{blocks / per:.2f}", kv_dtype="auto", dtype="bf16"), **cells})


def windowed(verdict, engine, model, full, sliding, page, window, pool, length, batched, new=False, **cells):
    size = min(full, sliding)
    groups, blocks = ceil(full / size) + ceil(sliding / size), int(pool * GIB // (size * page))
    per = ceil(full / size) * ceil(length / 16) + ceil(sliding / size) * (ceil((window - 1 + batched) / 16) + 1)
    return line(verdict, engine, model, **{**dict(
        kv_cache_gib=f"{pool:.2f}", kv_tokens=int(blocks / per * length) if new else blocks // groups * 16,
        block_size=16, max_model_len=length, max_concurrency=f"{blocks / per:.2f}", dtype="bf16"), **cells})


def ggml(verdict, engine, model, cells_bytes, cells, kv="f16", **other):
    return line(verdict, engine, model, **{**dict(kv_cache_gib=f"{cells_bytes / GIB:.8g}", kv_tokens=cells,
                                                  kv_dtype=kv), **other})


def rows_of(layers, kv, dim, cells, k="f16", v="f16"):
    return layers * kv * dim * cells * (GGML[k] + GGML[v])


def pooled(verdict, engine, model, token, tokens, block=1, factor=1.0, **cells):
    return line(verdict, engine, model, **{**dict(kv_cache_gib=f"{token * tokens / GIB * factor:.2f}", kv_tokens=tokens,
                                                  block_size=block), **cells})


def turbomind(verdict, model, block_bytes, blocks, **cells):
    return line(verdict, "LMDeploy 0.6.2 TurboMind", model, **{**dict(
        gpu_blocks=blocks, block_size=f"{block_bytes / MIB:.3f} MB", kv_cache_gib=f"{block_bytes * blocks / GIB:.3f}"),
        **cells})


def scaled(layers, kv, dim, bits):
    """TurboMind's block of 64 tokens: numbers, and scale and zero point of 16 bits for K and for V of each head."""
    return layers * kv * 2 * (dim * bits // 8 + 4) * 64


QWEN14 = heads(40, 8, 128)
LINES = [
    v0(AGREED, "vLLM 0.5.4", "casperhansen/llama-3-70b-instruct-awq", heads(80, 8, 128, tp=4), **on(4)),
    v0(AGREED, "0.6.3.post1 vLLM", "Qwen/Qwen2.5-72B-Instruct-AWQ", heads(80, 8, 128, tp=2), **on(2)),
    v0(AGREED, "vllm v0.6.6", "mistralai/Mixtral-8x7B-Instruct-v0.1", heads(32, 8, 128, tp=2), **on(2)),
    v0(AGREED, "vLLM 0.6.2", "google/gemma-2-9b-it", heads(42, 8, 256)),
    v0(AGREED, "vLLM 0.5.5", "neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8", heads(32, 8, 128, 1), kv_dtype="fp8_e5m2"),
    v0(AGREED, "vLLM 0.6.4", "NousResearch/Meta-Llama-3.1-8B-Instruct", heads(16, 8, 128), tp=1, n_gpus=2),
    v0(AGREED, "vLLM 0.4.2", "meta-llama/Llama-2-13b-chat-hf", heads(40, 40, 128), swap=8),
    v0(AGREED, "vLLM 0.6.1", "Qwen/Qwen2-7B-Instruct-AWQ", heads(28, 4, 128), block=32),
    v0(AGREED, "vLLM 0.2.7", "facebook/opt-13b", heads(40, 40, 128)),
    v0(UNEXPLAINED, "vLLM 0.5.4", "meta-llama/Meta-Llama-3-70B", heads(80, 8, 128, tp=4), off=1, **on(4)),
    v0(UNEXPLAINED, "vLLM 0.5.4", "Qwen/Qwen2.5-7B-Instruct", heads(32, 8, 128)),
    line(UNEXPLAINED, "vLLM 0.5.4", "meta-llama/Meta-Llama-3-8B", gpu_blocks=24_000, cpu_blocks=2048, swap_gib=4,
         gpu="RTX A6000", gpu_memory_utilization=0.9),
    v1(AGREED, "vLLM 0.8.5", "Qwen/Qwen3-32B-AWQ", heads(64, 8, 128, tp=4), 12.34, length=40960, **on(4)),
    v1(AGREED, "vLLM 0.10.2", "Qwen/Qwen3-4B-Instruct-2507-FP8", heads(36, 8, 128), 9.87, block=32),
    v1(AGREED, "vLLM 0.11.0", "Qwen/Qwen3-Coder-30B-A3B-Instruct", heads(48, 4, 128, tp=8), 51.23, **on(8)),
    v1(AGREED, "vLLM 0.9.2", "cognitivecomputations/DeepSeek-R1-AWQ", latent(61), 21.57, block=64, **on(8)),
    v1(AGREED, "vLLM 0.12", "nvidia/DeepSeek-R1-0528-FP4", latent(61, 1), 33.13, block=64, kv_dtype="fp8", **on(4)),
    v1(AGREED, "vLLM 0.9.1", "deepseek-ai/DeepSeek-V3", latent(31), 40.11, block=64, tp=8, n_gpus=16),
    v1(EXPLAINED, "vLLM 0.10.1", "deepseek-ai/DeepSeek-R1-0528", latent(62), 21.57, block=64, **on(8)),
    v1(EXPLAINED, "vLLM 0.9.1 rocm", "amd/Llama-3.3-70B-Instruct-FP8-KV", heads(80, 8, 128, 1), 101.5, gpu="MI300X"),
    v1(AGREED, "vLLM 0.10.0 CPU", "Qwen/Qwen3-8B", heads(36, 8, 128), 40, block=128, kv_cache_gib="40", n_gpus=0),
    v1(AGREED, "vLLM 0.10.0 V1", "microsoft/phi-4", heads(40, 10, 128, 4), 20.5, dtype="float32"),
    v1(AGREED, "vLLM 0.15", "Qwen/Qwen3-14B", QWEN14, 40.43, n_gpus=8, tp=1),
    v1(AGREED, "vllm-ascend 0.9.1", "Qwen/Qwen3-14B", QWEN14, 40.43, block=128),
    v1(AGREED, "vLLM jan 2025", "Qwen/Qwen3-14B", QWEN14, 40.43),
    v1(AGREED, "vLLM 0.20", "Qwen/Qwen3-14B", 40 * 8 * 2 * (128 + 4), 40.43, kv_dtype="int8_per_token_head"),
    v1(UNEXPLAINED, "vLLM 0.10.2", "Qwen/Qwen3-14B", QWEN14, 40.43, factor=1.1),
    v1(UNEXPLAINED, "vLLM 0.10.2", "Qwen/Qwen3-14B-AWQ", QWEN14, 40.43, factor=0.9),
    v1(UNEXPLAINED, "vLLM 0.10.2", "Qwen/Qwen3-8B", QWEN14, 40.43),
    v1(UNEXPLAINED, "vLLM 0.10.2", "Qwen/Qwen3-8B", heads(36, 8, 128), 40.43, kv_dtype="bf16", **on(2)),
    v1(UNEXPLAINED, "vLLM 0.11", "Qwen/Qwen3-14B", QWEN14, 40.43, max_concurrency="40.00"),
    v1(UNEXPLAINED, "vLLM 0.11", "Qwen/Qwen3-14B", QWEN14, 40.43, kv_tokens=264_957),
    v1(UNEXPLAINED, "vLLM 0.11", "Qwen/Qwen3-14B", QWEN14, 40.43, gpu_blocks=15_000),
    windowed(AGREED, "vLLM 0.11.0", "openai/gpt-oss-20b", 12, 12, 16 * 8 * 64 * 4, 128, 36.56, 131072, 2048,
             gpu="A100-80GB"),
    windowed(AGREED, "vLLM 0.22.1", "openai/gpt-oss-120b", 18, 18, 16 * 4 * 64 * 4, 128, 33.21, 131072, 8192, new=True,
             gpu="H100", **on(2)),
    windowed(AGREED, "vLLM 0.10.1", "RedHatAI/gemma-3-27b-it-quantized.w4a16", 10, 52, 16 * 8 * 128 * 4, 1024, 15.4,
             32768, 2048, gpu="RTX 4090", **on(2)),
    windowed(EXPLAINED, "vLLM 0.12.0", "google/gemma-3-27b-it", 10, 52, 16 * 16 * 128 * 4, 1024, 40.4, 131072, 4096,
             gpu="A100-80GB"),
    windowed(UNEXPLAINED, "vLLM 0.12.0", "google/gemma-3-12b-it", 8, 40, 16 * 8 * 256 * 4, 1024, 20.4, 131072, 2048,
             gpu="RTX 4090", kv_tokens=150_000, kv_dtype="bf16"),
    ggml(AGREED, "llama.cpp b6500 2025-09", "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF", rows_of(32, 8, 128, 8192),
         8192),
    ggml(AGREED, "llama.cpp b6500", "Qwen3-30B-A3B-Instruct-2507-Q4_K_M.gguf",
         rows_of(48, 4, 128, 40960, "q5_1", "q5_1"), 40960, "q5_1"),
    ggml(AGREED, "llama.cpp b6500", "unsloth/Qwen3-14B-GGUF:Q4_K_XL", rows_of(40, 8, 128, 32768, "q8_0", "iq4_nl"),
         32768,
         "K (q8_0), V (iq4_nl)"),
    ggml(AGREED, "llama-server b5000", "Llama-3.3-70B-Instruct-Q4_K_M", rows_of(80, 8, 128, 16384, "q8_0", "q4_1"),
         16384,
         "-ctk q8_0 -ctv q4_1"),
    ggml(AGREED, "", "Qwen3-8B GGUF", rows_of(36, 8, 128, 4096, "q8_0", "q8_0"), 4096, "K q8_0 V q8_0"),
    ggml(AGREED, "Ollama 0.5.7 (num_parallel 4)", "llama3.1:8b", rows_of(32, 8, 128, 32768), 32768, max_model_len=8192),
    ggml(AGREED, "ollama 0.6.2", "qwen2.5-coder:32b", rows_of(64, 8, 128, 32768, "q8_0", "q8_0"), 32768,
         "OLLAMA_KV_CACHE_TYPE=q8_0"),
    ggml(AGREED, "Ollama 0.5.13", "deepseek-r1:14b", rows_of(48, 8, 128, 16384), 16384),
    ggml(AGREED, "ollama 0.9", "qwen3:30b-a3b", 0, 4096, kv_cache_gib="384.00 MiB"),
    ggml(AGREED, "koboldcpp 1.80", "Mistral-Nemo-Instruct-2407-Q6_K", rows_of(40, 8, 128, 16640), 16640,
         max_model_len=16384),
    ggml(AGREED, "llama.cpp 2025-01", "Qwen2.5-72B-Instruct GGUF", 0, 32768,
         kv_cache_gib="CUDA0 5184.00 MiB, CUDA1 5056.00 MiB", n_gpus=2, tp=1),
    ggml(AGREED, "llama.cpp 2025-05", "Qwen3-8B GGUF", 0, 8192, kv_cache_gib="1152.00 MiB (K 576.00, V 576.00)"),
    ggml(AGREED, "llama.cpp 2025-11", "Qwen3-8B GGUF", rows_of(36, 8, 128, 10240), 10_000, max_model_len=10_000),
    ggml(AGREED, "llama.cpp b5600 2025-06", "gemma-3-12b-it-Q4_K_M",
         rows_of(8, 8, 256, 32768) + rows_of(40, 8, 256, 1536), 32768),
    ggml(AGREED, "llama.cpp 2025-06", "gemma-3-27b-it-Q4_K_M.gguf", rows_of(52, 16, 128, 1536), 1536,
         arch="gemma3-27b SWA layers"),
    ggml(EXPLAINED, "llama.cpp 2026-02", "gemma-3-4b-it GGUF", rows_of(34, 4, 256, 8192), 8192,
         arch="gemma3-4b swa-full"),
    ggml(AGREED, "llama.cpp 2026-05", "DeepSeek-V3/R1 class GGUF (61 layers)", latent(61) * 32768, 32768),
    ggml(AGREED, "llama.cpp b4600 2025-01", "DeepSeek-R1-UD-IQ1_S", 61 * 128 * (192 + 128) * 2 * 4096, 4096),
    ggml(AGREED, "llama.cpp 2025-12", "Qwen3-Next-80B-A3B-Instruct GGUF", rows_of(12, 2, 256, 32768), 32768),
    ggml(UNEXPLAINED, "llama.cpp b6500", "Meta-Llama-3.1-8B-Q8_0", rows_of(32, 8, 128, 8192) * 1.1, 8192),
    ggml(UNEXPLAINED, "llama.cpp b6500", "Meta-Llama-3.1-8B-Q8_0", rows_of(32, 8, 128, 8192, "q8_0"), 8192, "q8_0"),
    ggml(UNEXPLAINED, "llama.cpp b6500", "Meta-Llama-3.1-8B-Q8_0", 32 * 8 * 128 * 2 * 8192, 8192, "q8_0"),
    ggml(UNEXPLAINED, "llama.cpp b6500", "Qwen3-8B-Q8_0", rows_of(32, 8, 128, 8192), 8192),
    ggml(UNEXPLAINED, "llama.cpp b6500", "Qwen3-8B-Q8_0", rows_of(36, 8, 128, 8192), 8028),
    ggml(UNEXPLAINED, "llama.cpp b7000 2025-11", "gpt-oss-20b", rows_of(12, 8, 64, 33792), 29_491),
    ggml(UNEXPLAINED, "llama.cpp 2026-02", "gemma-3-4b-it GGUF", rows_of(34, 4, 256, 16384), 14_745),
    ggml(UNEXPLAINED, "llama.cpp 2025-06", "DeepSeek-V3-Q4_K_M",
         61 * (576 * GGML["q4_0"] + 512 * GGML["q8_0"]) * 8192, 8192,
         "K q8_0 V q4_0"),
    pooled(AGREED, "SGLang 0.4.6", "deepseek-ai/DeepSeek-V3-0324", latent(61), 512_000, **on(8)),
    pooled(AGREED, "SGLang 0.3.6", "meta-llama/Llama-2-7b-chat-hf", heads(32, 32, 128), 90_000),
    pooled(AGREED, "SGLang 0.5", "meta-llama/Llama-3.1-70B", heads(80, 8, 128, 1, 4), 900_000, kv_dtype="fp8_e5m2",
           **on(4)),
    pooled(AGREED, "SGLang 0.5", "neuralmagic/Llama-3.3-70B-Instruct-FP8-dynamic", 1, 420_000,
           kv_cache_gib="K size: 16.02 GB, V size: 16.02 GB", **on(4)),
    pooled(AGREED, "SGLang 0.5", "Llama-3.3-70B-Instruct", 1, 420_000, kv_cache_gib="16.02 + 16.02", **on(4)),
    pooled(AGREED, "SGLang 0.5.5", "deepseek-ai/DeepSeek-V3.2-Exp", 61 * (656 + 132), 600_000, kv_dtype="fp8_e4m3",
           block=64, **on(8)),
    pooled(UNEXPLAINED, "SGLang 0.4.6", "Qwen/Qwen3-14B", QWEN14, 300_000, factor=0.99),
    pooled(UNEXPLAINED, "SGLang 0.4.6", "Qwen/Qwen3-14B", QWEN14, 300_000, factor=GIB / 10**9),
    pooled(UNEXPLAINED, "SGLang 2026-01", "XiaomiMiMo/MiMo-V2-Flash", 39 * 2 * 2 * 128 * 2, 300_288, block=64,
           arch="mimo-v2-flash SWA pool", **on(4)),
    pooled(AGREED, "TensorRT-LLM 0.15.0", "meta-llama/Meta-Llama-3.1-70B", heads(80, 8, 128, 2, 4), 384_000, 64,
           **on(4)),
    pooled(AGREED, "TRT-LLM 0.8.0", "meta-llama/Llama-2-13b-chat-hf", heads(40, 40, 128, 1), 192_000, 64,
           kv_dtype="int8"),
    pooled(AGREED, "TensorRT-LLM 1.1", "deepseek-ai/DeepSeek-R1", latent(61, 1), 640_000, 32, kv_dtype="fp8", **on(8)),
    pooled(UNEXPLAINED, "TensorRT-LLM 0.15", "Llama-3.1-8B", heads(32, 8, 128), 192_000, 64, 1.1, kv_dtype="fp16"),
    pooled(UNEXPLAINED, "TensorRT-LLM 0.15", "Llama-3.1-8B", heads(32, 8, 128), 192_000, 64, gpu_blocks=2999),
    pooled(UNEXPLAINED, "TensorRT-LLM 0.15", "Llama-3.1-8B", heads(32, 8, 128), 192_000, "", gpu_blocks=2999),
    turbomind(AGREED, "Qwen/Qwen2.5-7B-Instruct", scaled(28, 4, 128, 8), 1500, kv_dtype="quant_policy=8"),
    turbomind(AGREED, "Qwen/Qwen2.5-32B-Instruct-AWQ", scaled(64, 8, 128, 4), 1500, kv_dtype="int4 (quant_policy 4)"),
    turbomind(AGREED, "meta-llama/Meta-Llama-3.1-8B", scaled(32, 8, 128, 4), 900, kv_dtype="quant_policy 4",
              kv_cache_gib=""),
    turbomind(AGREED, "internlm/internlm2-chat-20b", heads(48, 8, 128) * 64, 700, kv_dtype="quant_policy 0"),
    turbomind(UNEXPLAINED, "internlm/internlm2_5-7b-chat", heads(32, 8, 128) * 64 * 1.1, 800),
    turbomind(UNEXPLAINED, "internlm/internlm2_5-7b-chat", heads(32, 8, 128) * 64, 800, kv_cache_gib="7.25"),
]


@pytest.mark.parametrize("row, verdict", LINES)
def test_lines_worked_out_by_hand(row, verdict):
    found = judge(row)
    assert found.verdict == verdict, found


BLOCKS = int(40.43 * GIB // (QWEN14 * 16))
BASE = dict(model="Qwen/Qwen3-14B", engine_version="vLLM 0.11.0", kv_cache_gib="40.43 GiB", block_size="16", tp="1.0",
            kv_tokens=f"{BLOCKS * 16:,} tokens", max_model_len="40,960", max_concurrency=f"{BLOCKS / 2560:.2f}x",
            n_gpus="1", kv_dtype="auto", dtype="torch.bfloat16")


@pytest.mark.parametrize("cells, verdict", [
    ({}, AGREED), (dict(kv_tokens=f"{BLOCKS * 16:.5e}"), AGREED), (dict(kv_tokens=f"{BLOCKS * 17.6:.5e}"), UNEXPLAINED),
    (dict(kv_tokens=f"{BLOCKS * 16:_}"), AGREED), (dict(kv_tokens=f"{BLOCKS * 16:,}".replace(",", "\u202f")), AGREED),
    (dict(kv_tokens=f"{BLOCKS * 16:,}".replace(",", " ")), AGREED), (dict(kv_cache_gib=f"{40.43 * 1024:.2f} MiB"),
    AGREED),
    (dict(kv_cache_gib="40.43 GiB (41400.32 MiB)"), AGREED), (dict(n_gpus="N/A", cpu_blocks="na", gpu_blocks="—"),
    AGREED),
    (dict(engine_version=""), AGREED), (dict(model="", arch="qwen3-14b"), AGREED),
    (dict(kv_cache_gib="40,43", gpu_blocks=""), AGREED), (dict(kv_cache_gib="40"), AGREED),
    (dict(kv_cache_gib="42"), UNEXPLAINED),
    (dict(model="Qwen/Qwen3-8B", arch="qwen3-14b"), UNEXPLAINED), (dict(model=""), UNMATCHED),
    (dict(model="not stated", arch="n/a"), UNMATCHED), (dict(model="some-private-14b"), UNMATCHED),
    (dict(model="my-finetune (163840 B/token)"), UNMATCHED), (dict(model="/data/model"), UNMATCHED),
    (dict(kv_dtype="turboquant_k4v2"), UNMATCHED)])
def test_cells_as_people_write_them(cells, verdict):
    assert judge({**BASE, **cells}).verdict == verdict, judge({**BASE, **cells})


@pytest.mark.parametrize("delimiter", [";", "\t", ","])
def test_a_table_in_other_clothes(tmp_path, delimiter):
    """A byte order mark, names in capitals, columns in another order, missing and new ones, a short and a long line."""
    path = tmp_path / "logs.csv"
    text = [["KV_Tokens", " Model", "colour", "KV_CACHE_GIB", "engine_version"],
            [str(BLOCKS * 16), "Qwen/Qwen3-14B", "red", "40.43", "vLLM 0.11"],
            [str(BLOCKS * 18), "Qwen/Qwen3-14B", "red", "40.43", "vLLM 0.11", "more", "than", "named"],
            [str(BLOCKS * 16), "Qwen/Qwen3-14B"]]
    path.write_text("\ufeff" + "\n".join(delimiter.join(cells) for cells in text) + "\n", encoding="utf-8")
    assert [(row["id"], row["verdict"]) for row in check(path)] == [
        ("1", AGREED), ("2", UNEXPLAINED), ("3", UNMATCHED)]


@pytest.mark.parametrize("gpu, gib", [
    ("A6000", 48), ("2x RTX (3090 Ti named)", 24), ("A100-80GB", 80), ("2x24GB", 24), ("RTX PRO 6000", 96),
    ("A10G", 24), ("79.22 GiB GPU", 79.22), ("Jetson Thor 128GB", 128),
    ("AMD (ROCm), 51.1 GiB weights", None), ("not stated", None)])
def test_the_memory_that_a_gpu_cell_tells(gpu, gib):
    assert read(dict(gpu=gpu)).gpu_gib == gib


def test_blocks_are_held_against_the_memory_of_the_gpu_where_nothing_else_tests_them():
    row = dict(model="facebook/opt-125m", gpu="A6000", gpu_memory_utilization="0.9", gpu_blocks="75937",
               cpu_blocks="7281", block_size="16", engine_version="vLLM 2024-04", n_gpus="1", tp="1")
    assert judge(row).verdict == AGREED and "tested only against the GPU's memory" in judge(row).note
    more = judge({**row, "gpu_blocks": "79000"})            # 43.39 GiB of 0.9 x 48
    assert (more.verdict, more.what, more.predicted) == (UNEXPLAINED, "gpu_blocks", int(43.2 * GIB // 589_824))
    assert judge({**row, "gpu_blocks": "79000", "gpu_memory_utilization": ""}).verdict == AGREED
    assert judge({**row, "gpu_blocks": "79000", "gpu": "CPU, A6000 unused"}).verdict == AGREED


def test_fp8_by_itself_is_no_excuse_before_late_2024():
    row = dict(model="meta-llama/Meta-Llama-3-8B", cpu_blocks="4096", swap_gib="4", kv_dtype="auto", n_gpus="1", tp="1")
    assert judge({**row, "engine_version": "vLLM 0.4.2"}).verdict == UNEXPLAINED
    assert judge({**row, "engine_version": "vLLM V0 2024-12"}).verdict == EXPLAINED


def test_replicas_are_no_ranks_of_one_engine():
    row = dict(model="Qwen/Qwen3-14B", engine_version="vLLM 0.15", kv_cache_gib="41.00", kv_tokens=str(BLOCKS * 16))
    assert judge({**row, "n_gpus": "8", "tp": "1"}).verdict == UNEXPLAINED
    row.update(n_gpus="2", tp="2", kv_cache_gib="20.50")
    assert judge(row).verdict == EXPLAINED and "least of 2 ranks" in judge(row).note


def test_how_many_blocks_is_not_tested_without_a_pool_and_says_so():
    row = dict(engine_version="LMDeploy TurboMind", model="internlm2-chat-7b", gpu_blocks="500", block_size="8 MB")
    assert "is not tested" in judge(row).note
    assert "is not tested" not in judge({**row, "kv_cache_gib": "3.906"}).note


def test_a_pool_in_few_digits_tests_no_less():
    """Whole GiB are within 2 %; whole MiB told in GiB are a conversion; a decimal comma is not read at all."""
    tokens = dict(model="Qwen/Qwen3-14B", engine_version="vLLM 0.11", block_size="16")
    held = str(int(8.4 * GIB // (QWEN14 * 16)) * 16)
    assert judge({**tokens, "kv_tokens": held, "kv_cache_gib": "8"}).verdict == UNEXPLAINED
    assert judge({**tokens, "kv_tokens": held, "kv_cache_gib": "8.4"}).verdict == AGREED
    cells = dict(model="Meta-Llama-3.1-8B", engine_version="llama.cpp b6500", kv_cache_gib="1")
    assert judge({**cells, "kv_tokens": "8192"}).verdict == AGREED
    assert judge({**cells, "kv_tokens": "8064"}).verdict == UNEXPLAINED
    assert number({"pool": "53,29"}, "pool") is None and number({"pool": "1,024"}, "pool").value == 1024


@pytest.mark.parametrize("cell, name", [
    ("vLLM 0.11 (against llama.cpp)", "vllm"), ("llama.cpp b6500, not vLLM", "llamacpp"), ("llama-server", "llamacpp"),
    ("vllm jan 2025", "vllm"), ("TRT-LLM 1.0 (SGLang beside)", "trtllm"), ("1Cat fork", "")])
def test_the_engine_named_first_counts(cell, name):
    assert engine(cell).name == name
