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
from types import SimpleNamespace

import pytest

from kvlab import lab as module
from kvlab.lab import lab

ROOT = Path(__file__).parents[1]
needs_jupyterlab = pytest.mark.skipif(importlib.util.find_spec("jupyterlab") is None,
                                      reason="the extra `notebook` is not installed")


# a user whose own servers ask for nothing and listen everywhere, in every spelling that Jupyter reads
OPEN = """
c.IdentityProvider.token = ""
c.PasswordIdentityProvider.token = ""
c.ServerApp.token = ""
c.PasswordIdentityProvider.hashed_password = "argon2:known"
c.ServerApp.ip = "0.0.0.0"
c.ServerApp.allow_unauthenticated_access = True
c.ServerApp.identity_provider_class = "jupyter_server.auth.identity.IdentityProvider"
"""


@needs_jupyterlab
def test_the_arguments_are_of_a_server_on_loopback_and_hold_no_token():
    one = lab("memory_wall", port=8899, browser=False)
    assert str(ROOT / "notebooks" / "memory_wall.ipynb") in one.arguments and one.path == "memory_wall.ipynb"
    assert {"--ServerApp.ip=127.0.0.1", "--ServerApp.sock=", "--no-browser", "--ServerApp.port=8899",
            "--ServerApp.port_retries=0"} <= set(one.arguments)
    assert ("--allow-root" in one.arguments) == (hasattr(os, "geteuid") and os.geteuid() == 0)
    assert not any("token" in argument.lower() for argument in one.arguments) and lab().path == ""


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
    assert lab("-own.ipynb").folder == tmp_path and str(own) in lab("-own.ipynb").arguments


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


class Provider:
    auth_enabled, hashed_password, token = True, "", "ours"


Provider.__module__, Provider.__qualname__ = module.OURS["ServerApp.identity_provider_class"].rsplit(".", 1)


@pytest.mark.parametrize("of, name, value, said", [
    ("server", "ip", "0.0.0.0", "ServerApp.ip"), ("server", "sock", "/somewhere", "ServerApp.sock"),
    ("server", "allow_unauthenticated_access", True, "ServerApp.allow_unauthenticated_access"),
    ("provider", "token", "", "IdentityProvider.token"), ("provider", "auth_enabled", False, "IdentityProvider.token"),
    ("provider", "hashed_password", "argon2:known", "PasswordIdentityProvider.hashed_password"),
    ("provider", "__class__", type("Everybody", (Provider,), {}), "ServerApp.identity_provider_class"),
    ("settings", "identity_provider", Provider(), "IdentityProvider.token")])
def test_a_server_that_would_be_open_after_all_is_not_started(of, name, value, said):
    provider = Provider()
    settings = {"identity_provider": provider}
    server = SimpleNamespace(ip="127.0.0.1", sock="", allow_unauthenticated_access=False, identity_provider=provider,
                             web_app=SimpleNamespace(settings=settings))
    module._check_shut(server, "ours")
    if of == "settings":
        settings[name] = value
    else:
        setattr(server if of == "server" else provider, name, value)
    with pytest.raises(ValueError, match=f"would be open to others: .* holds on to {re.escape(said)};"):
        module._check_shut(server, "ours")


@pytest.fixture
def server(tmp_path):
    """(process, port, its output file) of a real `kvlab lab`; ended afterwards, whatever happened."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JUPYTER")}
    for name in ("server", "lab"):
        (tmp_path / f"jupyter_{name}_config.py").write_text(OPEN)
    (tmp_path / "kernels" / "python3").mkdir(parents=True)
    (tmp_path / "kernels" / "python3" / "kernel.json").write_text(json.dumps(
        dict(argv=["/elsewhere/python"], display_name="elsewhere", language="python")))
    with open(tmp_path / "output", "w+") as output:
        child = subprocess.Popen([sys.executable, "-m", "kvlab", "lab", "--no-browser", "--port", str(port)],
                                 stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=ROOT,
                                 env={**environment, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT),
                                      "JUPYTER_TOKEN": "known", "JUPYTER_CONFIG_DIR": str(tmp_path),
                                      "JUPYTER_PATH": str(tmp_path)})
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
def test_a_real_server_answers_only_here_and_only_with_its_token_whatever_the_user_configured(server):
    import psutil
    child, port, output = server
    until = time.monotonic() + 60
    while not (found := re.search(rf"^kvlab lab: http://127\.0\.0\.1:{port}/lab\?token=(\w{{40,}})$",
                                  output.read_text(), re.M)):
        assert child.poll() is None and time.monotonic() < until, output.read_text()
        time.sleep(0.1)
    token = found[1]
    assert [ask(port, wrong)[0] for wrong in (None, "wrong", "known")] == [403] * 3
    status, kernels = ask(port, token)
    assert status == 200 and kernels["kernelspecs"]["python3"]["spec"]["display_name"] != "elsewhere"
    process = psutil.Process(child.pid)
    assert not [text for text in (*process.cmdline(), *process.environ().values()) if token in text]
    assert process.environ().keys() >= {"JUPYTER_TOKEN"} and "AuthWarning" not in output.read_text()
    listening = [c.laddr for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert ("127.0.0.1", port) in listening and {address.ip for address in listening} == {"127.0.0.1"}
    child.send_signal(signal.SIGTERM)
    assert child.wait(20) == 0
    with socket.socket() as closed:
        assert closed.connect_ex(("127.0.0.1", port)) != 0
