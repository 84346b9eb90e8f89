"""A real engine's start-up log: llama.cpp with slots, streams and cache types, read and held against the model."""
import subprocess
import sys

import pytest
from live_llama import model_file

from kvlab.serving.server_logs import check
from kvlab.serving.startup_log import parse

SERVER = """
import os, sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port, params.n_ctx, params.n_gpu_layers = sys.argv[1], 0, 4096, 0
params.n_parallel, params.kv_unified, params.verbosity = int(sys.argv[2]), sys.argv[3] == "unified", int(sys.argv[5])
if sys.argv[4] != "f16":
    params.cache_type_k = params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{sys.argv[4].upper()}")
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
time.sleep(2)                                             # a thread of its own writes the log
os._exit(0)                                               # stopping a server that was just started can hang
"""
INFO, DEBUG = 4, 9              # llama.cpp prints its buffers from 4 on; above it the pass that fits parameters, too
MIB = {"f16": 90, "q8_0": 90 * 34 / 64}         # 4,096 cells × 30 layers × 3 heads × 64 × 2 × 2 B


@pytest.mark.parametrize("slots, streams, kind, verbosity", [
    (1, "apart", "f16", INFO), (2, "apart", "f16", INFO), (2, "unified", "q8_0", INFO), (4, "apart", "q8_0", INFO),
    (4, "unified", "f16", INFO), (4, "apart", "f16", DEBUG)])
def test_the_log_of_a_start_agrees(slots, streams, kind, verbosity):
    asked = [str(model_file()), str(slots), streams, kind, str(verbosity)]
    started = subprocess.run([sys.executable, "-c", SERVER, *asked],
                             capture_output=True, text=True, errors="replace", timeout=60)
    log = started.stdout + started.stderr
    if "llama_kv_cache: size" not in log:
        pytest.skip("xllamacpp's server did not start here")
    assert log.count("llama_kv_cache: size") == (2 if verbosity == DEBUG else 1)
    kept = "\n".join(line for line in log.splitlines() if "general.name" in line or "llama_kv_cache: size" in line)
    for text in (log, kept):                                # a whole log, and what a search through it leaves
        row = parse(text)
        (found,) = check([row])
        assert (row["kv_tokens"], found["verdict"]) == ("4096", "agreed"), found
        assert found["logged"] * 1024 == pytest.approx(MIB[kind], abs=0.01)
