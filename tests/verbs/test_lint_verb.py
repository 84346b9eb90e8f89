"""kvlab lint: exit codes, text, JSON."""
import json
import os
import subprocess
import sys

import pytest


def kvlab(*arguments):
    return subprocess.run([sys.executable, "-m", "kvlab", "lint", *map(str, arguments)], capture_output=True, text=True,
                          timeout=120, env={**os.environ, "PYTHONWARNINGS": "ignore"})


@pytest.fixture
def wrong(tmp_path):
    path = tmp_path / "wrong.sh"
    path.write_text("export VLLM_SCHEDULER_POLICY=fcfs\nvllm serve m --max-model-len 8\n")
    return path


def test_what_does_not_exist_is_1(wrong):
    done = kvlab(wrong)
    assert done.returncode == 1 and done.stderr == ""
    assert f"{wrong}:1: unknown: vllm 0.32.0 has no environment variable VLLM_SCHEDULER_POLICY" in done.stdout
    assert "use --scheduling-policy" in done.stdout and "1 file: 1 ok, 1 unknown" in done.stdout


def test_a_clean_file_is_0(tmp_path):
    (tmp_path / "fine.sh").write_text("vllm serve m --max-model-len 8\n")
    done = kvlab(tmp_path / "fine.sh")
    assert done.returncode == 0 and done.stdout == "1 file: 1 ok\n"


def test_what_is_not_judged_is_said(tmp_path):
    (tmp_path / "x.sh").write_text("trtllm-serve m --kv_cache_free_gpu_memory_fractio 0.9 --backend pytorch\n")
    done = kvlab(tmp_path / "x.sh")
    assert done.returncode == 0 and done.stdout.splitlines()[0] == (
        "not judged: --kv_cache_free_gpu_memory_fractio, --backend: kvlab has no table of the flags of tensorrt_llm")


def test_json(wrong):
    found = json.loads(kvlab(wrong, "--json", "--engine", "vllm", "--version", "0.32.0").stdout)
    assert found["counts"]["unknown"] == 1 and found["counts"]["ok"] == 1 and found["skipped"] == []
    assert found["findings"][0].items() >= dict(line=1, kind="env", name="VLLM_SCHEDULER_POLICY", engine="vllm",
                                                version="0.32.0", verdict="unknown").items()


def test_wrong_use_is_one_sentence_and_2(tmp_path, wrong):
    for arguments, says in (([tmp_path / "none.py"], "No such file"), ([wrong, "--engine", "vlm"], "vllm"),
                            ([wrong, "--version", "0.32.0"], "--engine"), ([], "Missing argument")):
        done = kvlab(*arguments)
        assert done.returncode == 2 and says in done.stderr and len(done.stderr.strip().splitlines()) == 1, arguments


def test_a_hostile_file_cannot_steer_the_terminal(tmp_path):
    (tmp_path / "x.md").write_text("VLLM_PAGED_BLOCKS \x1b[31m\x07")
    done = kvlab(tmp_path / "x.md")
    assert "\x1b" not in done.stdout and "\\x1b[31m" in done.stdout
