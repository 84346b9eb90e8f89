"""Tokens and passwords stand nowhere: not in what is printed, stored, exported or complained about."""
import json
import os
import subprocess
import sys

import pytest
from fake_engine import FakeEngine, vllm_page
from typer.testing import CliRunner

from kvlab.cli import app
from kvlab.hushed import HIDDEN, hushed, hushed_words
from kvlab.record.environment import Manifest, environment

SECRET = "s3cr3t-value-0123"
VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "KVLAB_TOKEN", "JUPYTER_TOKEN", "RAY_AUTH_TOKEN", "WANDB_API_KEY",
             "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "PGPASSWORD", "DJANGO_SECRET_KEY", "GITHUB_PAT")


@pytest.fixture
def armed(monkeypatch):
    """Every variable that may hold a token holds SECRET."""
    for name in VARIABLES:
        monkeypatch.setenv(name, SECRET)


@pytest.mark.parametrize("text, told", [
    (f"http://me:{SECRET}@host:8000/metrics", f"http://{HIDDEN}@host:8000/metrics"),
    (f"ray://{SECRET}@head:10001", f"ray://{HIDDEN}@head:10001"),
    (f"https://h/m?x=1&token={SECRET}&y=2", f"https://h/m?x=1&token={HIDDEN}&y=2"),
    (f"https://h/?X-Amz-Signature={SECRET}", f"https://h/?X-Amz-Signature={HIDDEN}"),
    (f"--hf-token={SECRET} --size small", f"--hf-token={HIDDEN} --size small"),
    (f"run --token {SECRET} --size small", f"run --token {HIDDEN} --size small"),
    (f"Authorization: Bearer {SECRET}", f"Authorization: Bearer {HIDDEN}"),
    (f'{{"Authorization": "Basic {SECRET}"}}', f'{{"Authorization": "Basic {HIDDEN}"}}'),
    (f"server said: bad bearer {SECRET}", f"server said: bad bearer {HIDDEN}"),
    ("hf_AbCdEfGhIjKlMnOpQrSt in a log", f"{HIDDEN} in a log"), ("key sk-abcdefghijklmnop1234", f"key {HIDDEN}")])
def test_what_looks_like_a_secret_is_hidden(text, told):
    assert hushed(text) == told


@pytest.mark.parametrize("text", [
    "kvlab run kv_quant --variants paged --size small", "int8/token,int4/token/g32", "--max-batched-tokens 8192",
    "--token-env MY_TOKEN", "max_num_batched_tokens=8192", "https://host.invalid/paper#section", "a@b", "tokens/s",
    "vllm:generation_tokens_total", "--kv-format fp8_e4m3/token", "docs at https://a.invalid/b?page=2"])
def test_what_is_none_stays(text):
    assert hushed(text) == text


def test_a_word_behind_an_option_is_hidden_and_what_a_variable_holds_is_too(armed):
    assert hushed_words(["kvlab", "--password", "x", "--size", "small"]) == ["kvlab", "--password", HIDDEN, "--size",
                                                                             "small"]
    assert hushed_words(["--token", "--size", "small"]) == ["--token", "--size", "small"]
    assert hushed(f"the server repeats {SECRET}!") == f"the server repeats {HIDDEN}!"


def test_a_manifest_holds_no_secret_of_its_command_line_options_or_machine(armed):
    words = ["kvlab", "run", "soak", "--address", f"ray://me:{SECRET}@head:10001", "--token", SECRET,
             f"--model=https://h/m?token={SECRET}"]
    one = Manifest(study="soak", argv=words, options={"address": f"ray://:{SECRET}@h", "more": [{"a": SECRET}]},
                   models=[f"https://u:{SECRET}@h/m"])
    stored = one.model_dump_json()
    assert SECRET not in stored and f"ray://{HIDDEN}@head:10001" in stored and "soak" in stored
    assert SECRET not in json.dumps(environment())


@pytest.mark.parametrize("answers", [[vllm_page()], [{"body": "no", "status": 401}],
                                     [{"status": 302, "headers": {"Location": f"http://h/?token={SECRET}"}}]])
def test_watch_says_and_stores_no_credential_of_its_address(answers, tmp_path, armed):
    with FakeEngine(*answers) as engine:
        address = engine.url.replace("//", f"//me:{SECRET}@") + f"/metrics?token={SECRET}"
        for more in ([], ["--json"], ["--out", str(tmp_path / "w.parquet")]):
            done = CliRunner().invoke(app, ["watch", address, "--once", *more], standalone_mode=False)
            assert SECRET not in done.output + str(done.exception)
        assert SECRET in str(engine.seen[0][1]), "it was sent to the server that was named"
    stored = tmp_path / "w.parquet"
    if stored.exists():
        from kvlab.record.store import read_table
        assert SECRET not in read_table(stored).to_csv()


def test_no_command_repeats_a_secret_in_its_errors_or_in_doctors_report(armed, tmp_path):
    """In a process of its own: what a shell would show, errors of wrong use included."""
    script = """
import contextlib, io, sys
from unittest import mock
from kvlab import cli
for words in WORDS:
    with mock.patch.object(sys, "argv", ["kvlab", *words]), contextlib.suppress(SystemExit):
        cli.main()
"""
    words = [["watch", f"http://me:{SECRET}@127.0.0.1:9/x", "--once"], ["watch", f"ftp://me:{SECRET}@h"],
             ["report", f"http://me:{SECRET}@h"], ["size", f"https://u:{SECRET}@h/m?token={SECRET}", "--kv-len", "9"],
             ["run", "nothing", "--token", SECRET], ["compare", SECRET, f"--token={SECRET}"], ["doctor", "--json"]]
    done = subprocess.run([sys.executable, "-c", f"WORDS = {words!r}\n{script}"], capture_output=True, text=True,
                          cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert "Traceback" not in done.stderr and done.stderr.count("kvlab: ") >= 5, done.stderr[-2000:]
    assert '"next_step"' in done.stdout, "doctor told what it has to tell"
    assert SECRET not in done.stdout + done.stderr
