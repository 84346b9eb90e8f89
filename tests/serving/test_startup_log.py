"""Start-up logs as engines print them (short lines, each with its thread) become lines of the table, numbered."""
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.serving.server_logs import check
from kvlab.serving.startup_log import LONGEST_LINE, MOST_BYTES, MOST_LINES, from_log, parse

# https://github.com/vllm-project/vllm/issues/10517 (V0; the first line's pattern is vLLM 0.7's llm_engine.py)
V0 = """\
INFO 12-02 llm_engine.py:240] Initializing an LLM engine (v0.6.4) with config: \
model='meta-llama/Llama-3.1-8B-Instruct', dtype=torch.bfloat16, max_seq_len=20000, tensor_parallel_size=1, \
kv_cache_dtype=auto,
Loading model weights took 14.9888 GB
Memory profiling results: total_gpu_memory=23.58GiB initial_memory_usage=15.34GiB peak_torch_memory=17.06GiB \
non_torch_memory=0.35GiB kv_cache_size=3.81GiB gpu_memory_utilization=0.90
# GPU blocks: 1952, # CPU blocks: 2048
Maximum concurrency for 20000 tokens per request: 1.56x
"""
# https://github.com/noonghunna/club-3090/issues/612 (V1, two lines)
V1 = """\
(EngineCore pid=107) INFO 07-06 22:50:46 [core.py:114] Initializing a V1 LLM engine (v0.24.0) with config: \
model='qwen3.6-35b-a3b-nvfp4', tensor_parallel_size=1, kv_cache_dtype=fp8,
(EngineCore pid=107) INFO 07-06 22:52:09 [gpu_worker.py:508] Available KV cache memory: 5.98 GiB
(EngineCore pid=107) INFO 07-06 22:52:09 [kv_cache_utils.py:2146] GPU KV cache size: 567,978 tokens
(EngineCore pid=107) INFO [kv_cache_utils.py:2147] Maximum concurrency for 131,072 tokens per request: 4.33x
"""
# vLLM 0.32.0's own words (kv_cache_utils.py, update_kv_cache_capacity), as its CPU build printed them
CPU = ("INFO [kv_cache_utils.py:2332] CPU KV cache size: 46,592 tokens, Maximum concurrency for 2,048 tokens per "
       "request: 22.75x\n")
# https://github.com/vllm-project/vllm/issues/21348 (SGLang half)
SGLANG = """\
server_args=ServerArgs(model_path='Qwen/Qwen3-235B-A22B-FP8', tp_size=4, mem_fraction_static=0.93, page_size=1)
KV Cache is allocated. #tokens: 367404, K size: 8.23 GB, V size: 8.23 GB
"""
# https://github.com/ggml-org/llama.cpp/issues/11200 (older words) and a fork's measurements (newer ones)
LLAMA_OLD = """\
print_info: general.name     = Qwen2.5 Coder 32B Instruct
llama_init_from_model: KV self size  = 4352.00 MiB, K (q8_0): 2176.00 MiB, V (q8_0): 2176.00 MiB
llama_context: n_ctx         = 32768
"""
LLAMA = """\
llama_model_loader: - kv   2:                               general.name str              = Llama 3.2 3B Instruct
llama_kv_cache: size =  343.00 MiB (  4096 cells,  28 layers,  1/1 seqs), K (q8_0):  119.00 MiB, V (f16):  224.00 MiB
"""
# https://github.com/ggml-org/llama.cpp discussions of window models print one line per pool
LLAMA_SWA = """\
print_info: general.name     = gpt-oss 120b
llama_kv_cache: size = 2304.00 MiB ( 65536 cells,  18 layers,  4/1 seqs), K (f16): 1152.00 MiB, V (f16): 1152.00 MiB
llama_kv_cache: size =   36.00 MiB (  1024 cells,  18 layers,  4/1 seqs), K (f16):   18.00 MiB, V (f16):   18.00 MiB
"""
# https://github.com/triton-inference-server/tutorials/pull/150 (the words), the numbers of a public recipe
TRTLLM = """\
[TensorRT-LLM][INFO] TensorRT-LLM version: 0.17.0
[TensorRT-LLM][INFO] Number of blocks in KV cache primary pool: 8219
[TensorRT-LLM][INFO] Number of tokens per block: 32.
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 16.05 GiB for max tokens in paged KV cache (263008).
"""
# https://github.com/InternLM/lmdeploy/issues/3825
TURBOMIND = """\
[TM][INFO] [BlockManager] block_size = 9.000 MB
[TM][INFO] [BlockManager] max_block_count = 863
[TM][INFO] [BlockManager] chunk_size = 863
"""


@pytest.mark.parametrize("text, cells", [
    (V0, dict(model="meta-llama/Llama-3.1-8B-Instruct", tp="1", n_gpus="1", weights_gib="14.9888", kv_cache_gib="3.81",
              gpu_blocks="1952", cpu_blocks="2048", max_model_len="20000", max_concurrency="1.56", dtype="bfloat16",
              kv_dtype="auto", gpu_memory_utilization="0.90", engine_version="vLLM 0.6.4 V0")),
    (V1, dict(model="qwen3.6-35b-a3b-nvfp4", tp="1", n_gpus="1", kv_cache_gib="5.98", kv_tokens="567978",
              kv_dtype="fp8", max_model_len="131072", max_concurrency="4.33", engine_version="vLLM 0.24.0 V1")),
    (CPU, dict(kv_tokens="46592", max_model_len="2048", max_concurrency="22.75",
               engine_version="vLLM 0.25 or newer (by its wording) V1")),
    (SGLANG, dict(model="Qwen/Qwen3-235B-A22B-FP8", tp="4", gpu_memory_utilization="0.93", kv_cache_gib="16.46",
                  kv_tokens="367404", block_size="1", engine_version="SGLang")),
    (LLAMA_OLD, dict(model="Qwen2.5 Coder 32B Instruct", kv_cache_gib="4.25", kv_tokens="32768", max_model_len="32768",
                     kv_dtype="K q8_0 V q8_0", engine_version="llama.cpp")),
    (LLAMA, dict(model="Llama 3.2 3B Instruct", kv_cache_gib="0.334960938", kv_tokens="4096", kv_dtype="K q8_0 V f16",
                 engine_version="llama.cpp")),
    (TRTLLM, dict(kv_cache_gib="16.05", kv_tokens="263008", gpu_blocks="8219", block_size="32",
                  engine_version="TensorRT-LLM 0.17.0")),
    (TURBOMIND, dict(block_size="9.000 MB", gpu_blocks="863", engine_version="LMDeploy TurboMind")),
])
def test_columns(text, cells):
    row = parse(text)
    row.pop("lines"), row.pop("meaning")
    assert row == cells


@pytest.mark.parametrize("text, verdict", [(V0, "agreed"), (V1, "agreed"), (CPU, "unmatched"), (SGLANG, "unmatched"),
                                           (LLAMA_OLD, "agreed"), (LLAMA, "agreed"), (LLAMA_SWA, "agreed"),
                                           (TRTLLM, "unmatched"), (TURBOMIND, "unmatched")])
def test_what_comes_out_can_be_checked(text, verdict):
    expected = "agreed" if text is SGLANG else verdict
    assert check([parse(text)])[0]["verdict"] == expected


def test_every_cell_says_its_line():
    row = parse("\n" + V1)
    assert row["lines"]["kv_tokens"][0] == 4 and "567,978 tokens" in row["lines"]["kv_tokens"][1]
    assert set(row["lines"]) >= {"model", "tp", "kv_dtype", "kv_cache_gib", "max_concurrency"}


@pytest.mark.parametrize("text, meaning", [
    (V1, "maximum concurrency x max_model_len"), (CPU, "maximum concurrency x max_model_len"), (SGLANG, ""),
    (V1.replace("v0.24.0", "v0.11.0"), "blocks ÷ groups of layers x block size"),
    (V1.replace("v0.24.0", "v0.8.4"), "blocks x block size"),
    (V1.replace(" (v0.24.0)", ""), "maximum concurrency x max_model_len or blocks ÷ groups of layers x block size or "
                                   "blocks x block size")])
def test_what_kv_cache_size_means(text, meaning):
    assert parse(text)["meaning"] == meaning


def test_the_least_rank_and_the_last_start_count():
    others = "".join(f"Available KV cache memory: {gib} GiB\n" for gib in (5.98, 6.01))
    ranks = V1.replace("5.98 GiB", "6.20 GiB") + others
    assert parse(ranks)["kv_cache_gib"] == "5.98"
    assert parse(V1.replace("5.98", "1.00") + V1)["kv_cache_gib"] == "5.98"


def test_colour_codes_and_carriage_returns_are_no_part_of_a_line():
    row = parse("\x1b[36m(EngineCore pid=1)\x1b[0m INFO GPU KV cache size: 1,024 tokens\r\n")
    assert row["kv_tokens"] == "1024"


def test_a_file(tmp_path):
    path = tmp_path / "server.log"
    path.write_text(V0)
    row = from_log(path)
    assert row["id"] == "server.log" and check([row])[0]["verdict"] == "agreed"


@pytest.mark.parametrize("content", [b"", b"\x00\xff" * 5000, "Möge die Macht".encode("utf-16"), b"hello\n" * 100])
def test_a_file_that_is_no_start_up_log_is_refused_with_what_to_give(tmp_path, content):
    path = tmp_path / "x.log"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="give the log from its first line on"):
        from_log(path)
    with pytest.raises(OSError):
        from_log(tmp_path / "none")


def test_huge_logs_are_read_at_their_beginning_only(tmp_path):
    path = tmp_path / "huge.log"
    with open(path, "wb") as file:
        file.write(V0.encode())
        file.truncate(3 * MOST_BYTES)
    assert from_log(path)["gpu_blocks"] == "1952"
    assert "kv_tokens" not in parse("x\n" * MOST_LINES + "GPU KV cache size: 1,024 tokens\n")
    assert "kv_tokens" not in parse("x" * LONGEST_LINE + "GPU KV cache size: 1,024 tokens\n")


@pytest.mark.parametrize("piece", ["non-default args: ", "KV Cache is allocated. ", "general.name = " + " " * 50,
                                   "llama_kv_cache: size = ", "Initializing an LLM engine ", "1,", "K size: 1 GB "])
def test_hostile_lines_take_no_longer_than_their_length(piece):
    began = time.process_time()
    parse("\n".join([piece * (LONGEST_LINE // len(piece))] * 50))
    assert time.process_time() - began < 2


@given(st.text(max_size=300), st.lists(st.sampled_from([V0, V1, CPU, SGLANG, LLAMA, TRTLLM, TURBOMIND]), max_size=3))
def test_no_text_breaks_it(noise, logs):
    row = parse(noise + "\n" + "\n".join(logs))
    assert isinstance(row["engine_version"], str) and check([row])[0]["verdict"]


STREAMS = """\
llama_model_loader: loaded meta data with 36 key-value pairs
print_info: general.name     = gpt-oss 20b
llama_context: n_ctx         = 131072
llama_kv_cache: size = 3072.00 MiB ( 32768 cells,  12 layers,  4/ 4 seqs), K (f16): 1536.00 MiB, V (f16): 1536.00 MiB
llama_kv_cache: size =   72.00 MiB (   768 cells,  12 layers,  4/ 4 seqs), K (f16):   36.00 MiB, V (f16):   36.00 MiB
"""


def test_cells_of_a_stream_for_each_sequence_are_added():
    row = parse(STREAMS)
    assert (row["kv_tokens"], row["kv_cache_gib"]) == ("131072", "3.0703125")
    assert check([row])[0]["verdict"] == "agreed"
    unified = parse(STREAMS.replace("4/ 4", "4/ 1"))
    assert unified["kv_tokens"] == "32768" and check([unified])[0]["verdict"] == "unexplained"


ONE_BUFFER = "".join(STREAMS.splitlines(keepends=True)[1:4])


@pytest.mark.parametrize("text", [
    ONE_BUFFER * 2, ONE_BUFFER.replace("print_info: ", "") * 2,
    ONE_BUFFER + ONE_BUFFER.splitlines()[-1], ONE_BUFFER.replace("3072.00 MiB (", "9999.00 MiB (") + ONE_BUFFER],
    ids=["names", "contexts", "buffers", "another size"])
def test_a_start_whose_passes_both_print_their_buffers_is_counted_once(text):
    """As llama.cpp's fit pass does at debug verbosity, in a log of which only some lines were kept."""
    assert (parse(text)["kv_cache_gib"], parse(text)["kv_tokens"]) == ("3", "131072")


def test_two_equal_pools_of_windows_and_full_layers_are_both_counted():
    line = ONE_BUFFER.splitlines()[-1]
    pools = ["llama_kv_cache_iswa: creating non-SWA KV cache, size = 32768 cells", line,
             "llama_kv_cache_iswa: creating     SWA KV cache, size = 32768 cells", line]
    assert parse("\n".join(pools))["kv_cache_gib"] == "6"


def test_a_quiet_llama_server_says_how_it_prints_the_line(tmp_path):
    path = tmp_path / "x.log"
    path.write_text("srv load_model: initializing, n_slots = 4, n_ctx_slot = 1024, kv_unified = 'false'")
    with pytest.raises(ValueError, match="llama-server prints it with --verbosity 4"):
        from_log(path)


def test_of_several_llama_starts_in_one_log_the_last_counts():
    first = STREAMS.replace("gpt-oss 20b", "Qwen3 8B").replace("3072.00 MiB (", "9999.00 MiB (")
    assert parse(first + STREAMS)["kv_cache_gib"] == "3.0703125"


def test_a_version_loses_the_dot_that_ends_it():
    assert parse("[TensorRT-LLM] TensorRT-LLM version: 0.17.0.post1")["engine_version"] == "TensorRT-LLM 0.17.0"
