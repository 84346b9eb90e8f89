"""kvlab lab: what it starts, what it refuses, and that the server listens on this machine only and asks for a token."""
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from kvlab import lab as module
from kvlab.lab import lab, start

ROOT = Path(__file__).parents[1]
needs_jupyterlab = pytest.mark.skipif(importlib.util.find_spec("jupyterlab") is None,
                                      reason="the extra `notebook` is not installed")


@needs_jupyterlab
def test_the_command_is_this_pythons_on_loopback_without_a_token_in_it(monkeypatch):
    monkeypatch.setenv("JUPYTER_TOKEN", "a-secret")
    monkeypatch.setenv("JUPYTER_PATH", "somewhere")
    one = lab("memory_wall", port=8899, browser=False)
    assert one.command[:4] == [sys.executable, "-m", "jupyterlab", "--ServerApp.ip=127.0.0.1"]
    assert str(ROOT / "notebooks" / "memory_wall.ipynb") in one.command
    assert {"--no-browser", "--ServerApp.port=8899", "--ServerApp.port_retries=0"} <= set(one.command)
    assert ("--allow-root" in one.command) == (hasattr(os, "geteuid") and os.geteuid() == 0)
    assert not any("a-secret" in argument or "token" in argument.lower() for argument in one.command)
    assert one.environment["JUPYTER_TOKEN"] == "a-secret"
    assert one.environment["JUPYTER_PATH"].split(os.pathsep) == [str(Path(sys.prefix, "share", "jupyter")), "somewhere"]


@needs_jupyterlab
def test_the_folder_is_the_checkouts_then_the_current_ones_then_said_to_be_missing(monkeypatch, tmp_path):
    assert (lab().folder, lab().said) == (ROOT / "notebooks", ())
    monkeypatch.setattr(module, "__file__", str(tmp_path / "site-packages" / "kvlab" / "lab.py"))
    monkeypatch.chdir(tmp_path)
    assert lab().folder == tmp_path and "no folder notebooks" in lab().said[0]
    (tmp_path / "notebooks").mkdir()
    assert lab().folder == tmp_path / "notebooks" and lab().said == ()
    own = tmp_path / "-own.ipynb"
    own.write_text("{}")
    assert lab("-own.ipynb").folder == tmp_path and str(own) in lab("-own.ipynb").command


@needs_jupyterlab
def test_what_does_not_exist_or_cannot_be_is_refused():
    with pytest.raises(KeyError, match="Did you mean 'memory_wall'"):
        lab("memory_wal")
    with pytest.raises(KeyError, match="no notebook named"):
        lab(str(ROOT / "README.md"))
    for port in (0, 80, 70000):
        with pytest.raises(ValueError, match="must be 1024"):
            lab(port=port)


def test_without_jupyterlab_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=re.escape("pip install 'kvlab[notebook]'")):
        lab()


def test_where_a_process_cannot_be_replaced_ctrl_c_is_left_to_jupyter(monkeypatch):
    class Child:
        waits = iter([KeyboardInterrupt, KeyboardInterrupt, 3])

        def __init__(self, command, env):
            assert command == ["python"] and env == {"A": "1"}

        def wait(self):
            answer = next(self.waits)
            if answer is KeyboardInterrupt:
                raise KeyboardInterrupt
            return answer
    monkeypatch.setattr(module.os, "name", "nt")
    monkeypatch.setattr(module.subprocess, "Popen", Child)
    assert start(module.Lab(["python"], {"A": "1"}, ROOT.parent, ())) == 3


@pytest.fixture
def server(tmp_path):
    """(process, port, its output file) of a real `kvlab lab`; ended afterwards, whatever happened."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JUPYTER")}
    with open(tmp_path / "output", "w+") as output:
        child = subprocess.Popen([sys.executable, "-m", "kvlab", "lab", "--no-browser", "--port", str(port)],
                                 stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=ROOT,
                                 env={**environment, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)})
        try:
            yield child, port, tmp_path / "output"
        finally:
            child.kill()
            child.wait()


def ask(port, token=None):
    """(status, body) of the server's own state, with or without a token."""
    headers = {"Authorization": f"token {token}"} if token else {}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/api/kernelspecs", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, None


@needs_jupyterlab
@pytest.mark.skipif(sys.platform == "win32", reason="ended by a signal")
def test_a_real_server_answers_only_here_and_only_with_its_token(server):
    import psutil
    child, port, output = server
    until = time.monotonic() + 60
    while not (found := re.search(rf"http://127\.0\.0\.1:{port}/lab\?token=(\w+)", output.read_text())):
        assert child.poll() is None and time.monotonic() < until, output.read_text()
        time.sleep(0.1)
    token = found[1]
    assert ask(port)[0] == 403 and ask(port, "wrong")[0] == 403
    status, kernels = ask(port, token)
    assert status == 200 and "python3" in kernels["kernelspecs"]
    process = psutil.Process(child.pid)
    assert not any(token in argument for argument in process.cmdline())
    listening = [c.laddr for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert ("127.0.0.1", port) in listening and {address.ip for address in listening} == {"127.0.0.1"}
    child.send_signal(signal.SIGTERM)
    assert child.wait(20) == 0
    with socket.socket() as closed:
        assert closed.connect_ex(("127.0.0.1", port)) != 0
