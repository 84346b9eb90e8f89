"""A server's start-up log as one line of the table of logs: what it printed, from which line, and what the words mean.

vLLM (V0, V1, its newer single line, CPU), SGLang, llama.cpp, TensorRT-LLM, LMDeploy. Logs are data: of one the first
MOST_BYTES and MOST_LINES are read, where a start-up is; bytes that are no text are replaced, nothing is run.
`kvlab.serving.server_logs.check` takes what comes out. Of a quantity that is printed several times the last counts; of
the pools that ranks print, the least.
"""
from __future__ import annotations

import os
import re
from collections.abc import Iterator
from io import StringIO
from itertools import islice
from pathlib import Path

from kvlab.serving._log_cells import engine
from kvlab.serving._log_vllm import wordings

MOST_BYTES, MOST_LINES, LONGEST_LINE = 8 * 2**20, 100_000, 8000
LONGEST_NUMBER = 40             # characters; what is longer no server prints, and the cell stays empty
_N, _G = r"([\d,]+)", r"(-?[\d.,]+)"
# (column, pattern whose first group is the cell, words that must stand before it). Several may come from one line. What
# stands before is found first, so that a line of nothing but such words takes no longer than its length.
_PATTERNS: tuple[tuple[str, ...], ...] = (
    ("model", r" model='([^']+)'", "LLM engine"),
    ("model", r"'model(?:_tag)?': '([^']+)'", "non-default args:"),
    ("model", r"model_path='([^']+)'", "server_args=ServerArgs("),
    ("model", r"general\.name +(?:str +)?= *(\S.*)"),
    ("tp", r"tensor_parallel_size'?[=:] ?(\d+)"),
    ("tp", r"\btp_size=(\d+)"),
    ("n_gpus", r"world_size=(\d+)"),
    ("gpu_memory_utilization", r"gpu_memory_utilization'? ?[=:(] ?([\d.]+)"),
    ("gpu_memory_utilization", r"mem_fraction_static=([\d.]+)"),
    ("weights_gib", r"[Mm]odel weights take ([\d.]+) ?GiB"),
    ("weights_gib", rf"(?:Loading model weights|Model loading) took {_G} ?Gi?B"),
    ("max_model_len", r"max_seq_len=(\d+)"),
    ("max_model_len", r"Using max model len (\d+)"),
    ("max_model_len", rf"Maximum concurrency for {_N} tokens per request"),
    ("max_model_len", r"context_len=(\d+)"),
    ("max_model_len", r"(?:llama_context|llama_new_context_with_model): n_ctx\s+= (\d+)"),
    ("dtype", r"\bdtype=(?:torch\.)?(float16|bfloat16|float32)\b"),
    ("kv_dtype", r"kv_cache_dtype'?[=:] ?'?(?:torch\.)?([a-z0-9_]+)"),
    ("kv_dtype", r"Using KV cache dtype: (?:torch\.)?(\w+)"),
    ("kv_dtype", r"Using (fp8\w*) data type to store kv cache"),
    ("kv_dtype", r"dtype: (?:torch\.)?(\w+)", "KV Cache is allocated."),
    ("block_size", r"Setting attention block size to (\d+) tokens"),
    ("block_size", r"\bblock_size'?[=:] ?(\d+)\b(?!\.\d| ?MB)"),
    ("block_size", r"\bpage_size=(\d+)"),
    ("block_size", r"Number of tokens per block: (\d+)"),
    ("block_size", r"\[BlockManager\] block_size = ([\d.]+ MB)"),
    ("kv_cache_gib", rf"Available KV cache memory: {_G} ?GiB"),
    ("kv_cache_gib", rf"the rest of the memory reserved for KV Cache is {_G} ?GiB"),
    ("kv_cache_gib", rf"kv_cache_size={_G} ?GiB"),
    ("kv_cache_gib", rf"Allocated {_G} GiB for max tokens in paged KV cache"),
    ("kv_tokens", rf"(?:GPU|CPU|NPU|XPU|TPU|HPU) KV cache size: {_N} tokens"),
    ("kv_tokens", rf"for max tokens in paged KV cache \({_N}\)"),
    ("kv_tokens", rf"Using {_N} tokens in paged KV cache"),
    ("kv_tokens", rf"#tokens: {_N}", "KV Cache is allocated."),
    ("gpu_blocks", rf"# (?:GPU|cuda|CUDA|NPU|TPU|HPU|gpu|npu|xpu|XPU) blocks: {_N}"),
    ("gpu_blocks", rf"GPU blocks: {_N}, # CPU blocks"),
    ("gpu_blocks", rf"\[BlockManager\] max_block_count = {_N}"),
    ("gpu_blocks", rf"[Bb]locks in KV cache primary pool: {_N}"),
    ("cpu_blocks", rf"# CPU blocks: {_N}\s*$"),
    ("cpu_blocks", rf"blocks: \d+, # CPU blocks: {_N}"),
    ("max_concurrency", rf"Maximum concurrency for [\d,]+ tokens per request: {_G}x"),
)
_COMPILED = tuple((column, re.compile(pattern), before) for column, pattern, *before in _PATTERNS)
_HINT = re.compile(r"engine|args|weights|took|KV|kv_|max_seq|max model|concurrency|n_ctx|blocks|BlockManager|page_size|"
                   r"block|name|context_len|world_size|cache|utilization|loader: loaded|constructing", re.I)
_START = re.compile(r"Initializing a(?:n| V[01])? LLM engine|server_args=|llama_model_loader: loaded|"
                    r": constructing llama_")
# Printed once a start before the buffers: seen again behind them, they begin another one (the pass that fits parameters
# to the memory, where a filtered log lacks its other lines).
_AGAIN = (("model", "print_info: general.name"), ("max_model_len", "llama_context: n_ctx "))
_ONE_LINE = re.compile(r"KV cache size: [\d,]+ tokens, Maximum concurrency for")
_SGLANG_KV = re.compile(r"\bK size: ([\d.]+) GB, V size: ([\d.]+) GB")
_SGLANG_ONE = re.compile(r"\bKV size: ([\d.]+) GB")
# Cells are of one stream; "4/ 1 seqs" are 4 sequences in 1 stream (unified), "4/ 4 seqs" a stream each.
_LLAMA = re.compile(r" size *= *([\d.]+) MiB(?: \( *(\d{1,15}) cells,[^()]*?(?:/ *(\d{1,15}) seqs)?\))?, "
                    r"K \((\w+)\):\s*[\d.]+ MiB, V \((\w+)\):\s*[\d.]+ MiB")
_VERSIONS = ((r"vLLM API server version v?([\d.]+\w*)", "vLLM {}"), (r"LLM engine \(v?([\d.]+[^)\s]*)\)", "vLLM {}"),
             (r"vLLM Version\s*: v?([\d.]+\w*)", "vLLM {}"), (r"TensorRT-LLM version: ([\d.]+)", "TensorRT-LLM {}"),
             (r"sglang==([\d.]+)", "SGLang {}"), (r"build: (\d+) \(\w+\)", "llama.cpp b{}"))
_MARKS = ((r"\[TensorRT-LLM\]|\[TRT-LLM\]", "TensorRT-LLM"), (r"\[TM\]\[", "LMDeploy TurboMind"),
          (r"KV Cache is allocated\.|sglang|mem_fraction_static", "SGLang"),
          (r"llama_kv_cache|llama_context|llm_load_print_meta|llama_new_context", "llama.cpp"),
          (r"executor_base|Initializing an LLM engine|# CPU blocks|V0 LLM engine", "vLLM V0"),
          (r"kv_cache_utils|gpu_worker|EngineCore|V1 LLM engine|KV cache size:", "vLLM V1"))
MEANINGS = {"blocks": "blocks x block size", "grouped": "blocks ÷ groups of layers x block size",
            "concurrency": "maximum concurrency x max_model_len"}


def parse(text: str) -> dict:
    """The table's columns that a start-up log prints, as text, and beside them `lines` and `meaning`.

    lines: column -> (line number, the line). meaning: what "KV cache size" stands for in that version, "" where the log
    has no such line. engine_version is "" where nothing tells the engine.
    """
    log = _Log()
    for at, line in _lines(text):
        log.take(at, line)
    return log.row()


class _Log:
    """What was found so far."""

    def __init__(self):
        self.cells: dict[str, str] = {}
        self.lines: dict[str, tuple[int, str]] = {}
        self.mark = self.version = ""
        self.pools: list[tuple[float, str]] = []
        self.buffers: list[tuple[float, int]] = []
        self.buffer_lines: list[str] = []
        self.windows = False

    def take(self, at: int, line: str) -> None:
        self.mark = self.mark or next((name for pattern, name in _MARKS if re.search(pattern, line)), "")
        if not self.version:
            self.version = next((name.format(found[1].rstrip(".")) for pattern, name in _VERSIONS
                                 if (found := re.search(pattern, line))), "")
        if not _HINT.search(line):
            return
        if _START.search(line) or self.buffers and any(column in self.lines and words in line
                                                       for column, words in _AGAIN):
            self.pools.clear()                              # a log may hold several starts: the last one counts
            self.buffers.clear()
            self.buffer_lines.clear()
        for column, pattern, before in _COMPILED:
            start = line.find(before[0]) if before else 0
            if start >= 0 and (found := pattern.search(line, start)):
                self._put(column, found[1], at, line)
        if "KV Cache is allocated." in line:
            if found := _SGLANG_KV.search(line):
                digits = max(len(part.partition(".")[2]) for part in found.groups())
                self._put("kv_cache_gib", f"{_value(found[1]) + _value(found[2]):.{digits}f}", at, line)
            elif found := _SGLANG_ONE.search(line):
                self._put("kv_cache_gib", found[1], at, line)
        if ("llama_kv_cache" in line or "KV self" in line) and (found := _LLAMA.search(line)):
            self.buffers.append((_value(found[1]), int(found[2] or 0) * int(found[3] or 1)))
            self.buffer_lines.append(found[0])
            self.lines["kv_cache_gib"] = at, line
            self._put("kv_dtype", f"K {found[4]} V {found[5]}", at, line)
        self.windows = self.windows or "llama_kv_cache_iswa" in line
        if _ONE_LINE.search(line) and not self.version:
            self.version = "vLLM 0.25 or newer (by its wording)"

    def _put(self, column: str, cell: str, at: int, line: str) -> None:
        if column not in ("model", "kv_dtype", "block_size"):
            cell = cell.replace(",", "")
            if len(cell) > LONGEST_NUMBER:
                return
        if column == "kv_cache_gib":
            self.pools.append((_value(cell), cell))
            if cell != min(self.pools)[1]:
                return
        self.cells[column], self.lines[column] = cell, (at, line)

    def row(self) -> dict:
        row, meaning = dict(self.cells), ""
        if self.buffers:
            buffers, half = self.buffers, len(self.buffers) // 2
            if not self.windows and self.buffer_lines[:half] == self.buffer_lines[half:]:
                buffers = buffers[half:]                    # two passes of one start, and nothing between them is left
            row["kv_cache_gib"] = f"{sum(size for size, _ in buffers) / 1024:.9g}"
            cells = max(cells for _, cells in buffers) or int(row.get("max_model_len", 0))
            if cells:
                row["kv_tokens"] = str(cells)
        row["engine_version"] = _engine(self.mark, self.version)
        if row["engine_version"].startswith("vLLM") and "tp" in row and "n_gpus" not in row:
            row["n_gpus"] = row["tp"]
        if "kv_tokens" in row and engine(row["engine_version"]).name == "vllm":
            meaning = " or ".join(MEANINGS[wording] for wording in wordings(engine(row["engine_version"])))
        return {**row, "lines": self.lines, "meaning": meaning}


def from_log(path: str | Path) -> dict:
    """`parse` of a file's beginning. OSError where it cannot be read, ValueError where it says nothing of a cache."""
    path = Path(path)
    with open(path, "rb") as file:
        text = file.read(min(MOST_BYTES, os.fstat(file.fileno()).st_size)).decode("utf-8", errors="replace")
    row = parse(text)
    if not row.keys() & {"kv_cache_gib", "kv_tokens", "gpu_blocks", "max_concurrency"}:
        quiet = " (llama-server prints it with --verbosity 4)" if "n_ctx_slot = " in text else ""
        raise ValueError(f"{path} has no line about a KV cache in its first {MOST_BYTES // 2**20} MiB that vLLM, "
                         f"SGLang, llama.cpp, TensorRT-LLM or LMDeploy print{quiet}; give the log from its first line "
                         "on")
    return {"id": path.name, **row}


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines, colour codes removed, cut to a length; no more than MOST_LINES."""
    for at, line in enumerate(islice(StringIO(text[:MOST_BYTES]), MOST_LINES), start=1):
        yield at, re.sub(r"\x1b\[[0-9;]*m", "", line[:LONGEST_LINE]).strip()


def _value(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return float("inf")


def _engine(mark: str, version: str) -> str:
    """Engine with version where one is printed; V0 or V1 is kept, since both were in one release."""
    if not version:
        return mark
    return f"{version}{mark[4:]}" if mark.startswith("vLLM") and version.startswith("vLLM") else version
