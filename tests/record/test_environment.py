"""The environment says what matters and nothing about who or where."""
import getpass
import json
import os
import platform
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvlab.record import environment as module
from kvlab.record.environment import (
    Manifest,
    VariantSource,
    cpu_name,
    cpu_steal_seconds,
    environment,
    free_memory,
    last_level_cache,
    load_average,
    portable,
)
from kvlab.record.export import StoreError
from kvlab.units import MiB


def strings(value):
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from (name, *strings(inner))
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)
    elif isinstance(value, str):
        yield value


def test_environment_is_plain_json_and_complete():
    found = environment()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["python"] == platform.python_version() and found["logical_cores"] == os.cpu_count()
    assert re.match(r"\d+\.\d+", found["torch"]) and re.match(r"\d+\.\d+", found["pandas"])
    assert found["memory_bytes"] > 2**28 and found["last_level_cache_bytes"] > 2**17
    assert found["cpu"] and (found["gpus"] or found["gpus_note"])
    assert {"kvlab", "git_commit", "git_dirty", "transparent_huge_pages", "virtual_machine"} < set(found)


def test_environment_names_no_host_user_or_path(monkeypatch):
    def asked():
        raise AssertionError("asked for a name")
    for owner, name in ((platform, "node"), (socket, "gethostname"), (getpass, "getuser"), (os, "getlogin")):
        monkeypatch.setattr(owner, name, asked)
    for text in strings(environment()):
        assert not re.search(r"(^|\s)(/|~|[A-Za-z]:\\)", text), text
        assert str(Path.cwd()) not in text


def test_environment_does_not_import_torch():
    code = ("import sys; from kvlab.record.environment import environment; environment();"
            "assert 'torch' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_thread_variables_are_recorded(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert environment()["thread_variables"]["OMP_NUM_THREADS"] == "3"


def test_git_state_of_a_checkout_and_only_of_kvlabs_own(tmp_path, monkeypatch):
    package = tmp_path / "kvlab" / "record"
    package.mkdir(parents=True)
    monkeypatch.setattr(module, "__file__", str(package / "environment.py"))
    assert module._git() == {"git_commit": None, "git_dirty": None}
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    clean = module._git()
    assert re.fullmatch("[0-9a-f]{40}", clean["git_commit"]) and clean["git_dirty"] is False
    (tmp_path / "new.txt").write_text("x")
    assert module._git() == {**clean, "git_dirty": True}
    inner = tmp_path / "venv" / "lib" / "kvlab" / "record"              # somebody's project, kvlab in its venv
    inner.mkdir(parents=True)
    monkeypatch.setattr(module, "__file__", str(inner / "environment.py"))
    assert module._git() == {"git_commit": None, "git_dirty": None}


def test_a_command_that_is_absent_fails_or_hangs_gives_nothing(monkeypatch):
    assert module._output("kvlab-no-such-program") is None
    assert module._output(sys.executable, "-c", "raise SystemExit(3)") is None
    with monkeypatch.context() as patch:
        def hang(*args, timeout, **options):
            raise subprocess.TimeoutExpired(args, timeout)
        patch.setattr(subprocess, "run", hang)
        assert module._output(sys.executable, "-c", "print()") is None


def test_last_level_cache_by_system(monkeypatch):
    monkeypatch.setattr(module, "_caches", lambda: {"L1": 1, "L2": 5, "L3": 3})
    assert last_level_cache() == (3, "sysfs")
    monkeypatch.setattr(module, "_caches", dict)
    monkeypatch.setattr(sys, "platform", "darwin")
    answers = {"hw.l3cachesize": None, "hw.perflevel0.l2cachesize": "16777216"}
    monkeypatch.setattr(module, "_output", lambda *command: answers.get(command[-1]))
    assert last_level_cache() == (16 * MiB, "sysctl")
    monkeypatch.setattr(module, "_output", lambda *command: None)
    assert last_level_cache() == (32 * MiB, "assumed")
    monkeypatch.setattr(sys, "platform", "win32")
    assert last_level_cache() == (32 * MiB, "assumed")


def test_what_proc_says_on_linux_and_elsewhere(monkeypatch):
    monkeypatch.setattr(module, "_read", {
        "/proc/stat": "cpu  1 2 3 4 5 6 7 250 9 10\ncpu0 1 2 3 4 5 6 7 99 9 10\n",
        "/proc/cpuinfo": "processor : 0\nmodel name\t: Test CPU 9000\nflags\t\t: fpu hypervisor sse\n",
        "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n"}.get)
    monkeypatch.setattr(module, "_caches", dict)
    monkeypatch.setattr(os, "sysconf", lambda name: 100, raising=False)
    assert cpu_steal_seconds() == 2.5
    assert cpu_name() == f"Test CPU 9000, {os.cpu_count()} logical cores"
    found = environment()
    assert (found["virtual_machine"], found["transparent_huge_pages"]) == (True, "madvise")
    monkeypatch.setattr(module, "_read", lambda path: "")
    found = environment()
    assert (found["virtual_machine"], found["transparent_huge_pages"], cpu_steal_seconds()) == (None, None, None)
    monkeypatch.delattr(os, "getloadavg", raising=False)
    assert load_average() is None


def test_memory_load_and_devices():
    assert 0 < free_memory() < environment()["memory_bytes"]
    assert load_average() is None or load_average() >= 0


class FakeNVML:
    class NVMLError(Exception):
        pass

    def __init__(self, error=None):
        self.error, self.open = error, 0

    def nvmlInit(self):
        if self.error:
            raise self.NVMLError(self.error)
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlSystemGetDriverVersion(self):
        return "570.1"

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetName(self, handle):
        return f"GPU {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle):
        return type("Info", (), {"total": 80 * 2**30})


def test_gpus_or_the_reason_why_there_are_none(monkeypatch):
    nvml = FakeNVML()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    expected = [{"name": f"GPU {i}", "driver": "570.1", "memory_bytes": 80 * 2**30} for i in (0, 1)]
    assert module._gpus() == (expected, "") and nvml.open == 0
    monkeypatch.setitem(sys.modules, "pynvml", FakeNVML("Library Not Found"))
    assert module._gpus() == ([], "NVML: Library Not Found")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert module._gpus()[0] == [] and "nvidia-ml-py" in module._gpus()[1]


@pytest.mark.skipif(os.name == "nt", reason="POSIX paths")
def test_absolute_paths_are_cut(monkeypatch, tmp_path):
    home = tmp_path / "people" / "ada"
    work = home / "work"
    work.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(work)
    for before, after in {
        f"{work}/sub/my.py:Mine": "sub/my.py:Mine", "/opt/x/bin/kvlab": "kvlab", f"--out={home}": "--out=~",
        f"sdpa,{home}/v.py:A,{work}/w.py:B": "sdpa,v.py:A,w.py:B", "~grace": "~", "~grace/x.py": "x.py",
        f"file:{home}/k.pt": "file:k.pt", r"C:\Users\ada\v.py": "v.py", r"--out=D:\a\b": r"--out=b", "/": "/",
        f"'{home}/a b/c d.py'": "'c d.py'", f"cannot open {home}/x": "cannot open x",
        "Qwen/Qwen2-72B": "Qwen/Qwen2-72B", "sub/my.py": "sub/my.py", "../up.py": "../up.py", "1 / 2": "1 / 2",
        "http://127.0.0.1:8000/v1": "http://127.0.0.1:8000/v1", "int8/token": "int8/token", "~5 ms": "~5 ms",
    }.items():
        assert portable(before) == after
        assert portable(after) == after
    monkeypatch.chdir(tmp_path / "people")                               # relative to here would name the user
    assert portable(f"{home}/v.py") == "v.py"


def test_manifest_round_trip_without_absolute_paths(tmp_path):
    manifest = Manifest(study="memory_wall", argv=["/opt/bin/kvlab", "run"], size="small", device="cpu", seeds=[0, 1],
                        models=["/data/m", "Qwen/Qwen2-72B"], options={"out": "/data/out", "n": [1, "/b/c"]},
                        variants=[VariantSource(ref="/data/my.py:Mine", sha256="ab", source="class Mine: ...")])
    assert manifest.argv == ["kvlab", "run"] and manifest.models == ["m", "Qwen/Qwen2-72B"]
    assert manifest.options == {"out": "out", "n": [1, "c"]} and manifest.variants[0].ref == "my.py:Mine"
    assert re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{6}", manifest.run_id)
    assert manifest.run_id[:16] == re.sub("[-:]", "", manifest.created_utc)
    assert manifest.environment["python"] == platform.python_version()
    (tmp_path / "manifest.json").write_text(manifest.model_dump_json())
    assert Manifest.read(tmp_path) == manifest


@pytest.mark.parametrize(("text", "error", "words"), [
    ('{"schema_version": 99, "study": "x", "new_field": 1}', ValueError, "schema version 99, and this kvlab reads"),
    ("[]", ValueError, "schema version None"),
    ('{"schema_version": 1, "stu', ValueError, "damaged"),
    ('{"schema_version": 1, "study": "x", "size": 3}', ValueError, "damaged: 'run_id' is missing"),
    ('{"schema_version": 1, "study": "x", "run_id": "r", "created_utc": "", "environment": {}, "size": 3}', ValueError,
     "damaged at size"),
    (None, StoreError, "no run directory"),
])
def test_a_manifest_that_cannot_be_read_is_one_sentence(tmp_path, text, error, words):
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(error, match=words) as refused:
        Manifest.read(tmp_path)
    assert "\n" not in str(refused.value)
