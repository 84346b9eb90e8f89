"""One process of kvlab at a time on a GPU, and rows that say when others are on it."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_cuda import UUID, fake_cuda
from fake_nvml import compiled, loaded
from made_variants import compare, honest, made, of

from kvlab.probes import _device as device_module
from kvlab.probes import measure
from kvlab.probes._base import Watch
from kvlab.probes._device import HELD, contended, exclusive, lock_file, locked_now, others
from kvlab.probes._nvml import gpu
from kvlab.probes.kernel_error import KernelError


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The fake GPU's lock lies here, also for other processes."""
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    with fake_cuda(l2=2**14):
        monkeypatch.setattr(device_module, "cache_folder", lambda *parts: Path(tmp_path, *parts))
        yield tmp_path


HOLDER = f"""
import sys
from filelock import FileLock
from kvlab.probes._device import lock_file
path = lock_file("{UUID}")
path.parent.mkdir(parents=True, exist_ok=True)
with FileLock(path):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def holder(folder):
    """Another process that holds the lock until its `let_go`."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_the_lock_waits_for_another_process_and_tells_what_it_waits_for(holder):
    told = []

    def tell(words):
        told.append(words)
        if len(told) == 2:
            holder.stdin.write("\n")
            holder.stdin.flush()
    assert locked_now(UUID) and locked_now(f"GPU-{UUID}")
    with exclusive("cuda:0", tell) as why:
        assert why == "" and locked_now(UUID)
    assert told[:2] == ["waiting for the GPU (0 s): another kvlab measures on it",
                        "waiting for the GPU (1 s): another kvlab measures on it"]
    assert not locked_now(UUID)


def test_a_holder_that_is_killed_leaves_no_lock_behind(holder):
    told = []

    def tell(words):
        told.append(words)
        holder.kill()
    with exclusive("cuda:0", tell) as why:
        assert why == "" and told
    assert lock_file(UUID).exists() and not locked_now(UUID)


def test_the_name_of_the_lock_does_not_tell_which_gpu_it_is(folder):
    assert lock_file(UUID) == lock_file(f"GPU-{UUID}") != lock_file("GPU-other")
    assert lock_file(UUID).parent == folder / "locks" and UUID[:8] not in lock_file(UUID).name
    assert not locked_now("GPU-never-seen")


def test_a_child_of_the_process_that_holds_the_lock_does_not_wait_for_it(folder):
    with exclusive("cuda:0", pytest.fail):
        assert os.environ[HELD] == lock_file(UUID).name              # what a child inherits
        with exclusive("cuda:0", pytest.fail) as why:
            assert why == ""
        assert locked_now(UUID)
    assert HELD not in os.environ


def test_a_folder_that_cannot_be_written_keeps_nobody_from_measuring(folder):
    (folder / "locks").write_text("a file")
    with exclusive("cuda:0", pytest.fail) as why:
        assert why.startswith("the GPU is not locked against another kvlab: ")
    rows = measure(compare(honest(), device="cuda"), [KernelError()])
    assert "the GPU is not locked" in of(rows, "kernel_error")[0]["note"]


def test_a_gpu_that_torch_cannot_open_is_not_locked_and_says_so(folder, monkeypatch):
    def broken(device=None):
        raise RuntimeError("CUDA error: device unavailable")
    monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
    with exclusive("cuda:0", pytest.fail) as why:
        assert why == "the GPU is not locked against another kvlab: RuntimeError: CUDA error: device unavailable"
    assert not (folder / "locks").exists()


def test_the_lock_is_held_while_a_comparison_is_measured_and_its_wait_is_told_as_its_own_code(holder):
    seen, told = [], []

    def watched(call, inputs):
        seen.append(locked_now(UUID))
        return call()

    def at(case_id, stage):
        told.append((case_id, stage))
        if stage.startswith("waiting"):
            assert not seen
            holder.stdin.write("\n")
            holder.stdin.flush()
    rows = measure(compare(made("watched", watched), device="cuda"), [KernelError()], watch=Watch(at=at))
    assert seen and all(seen) and not locked_now(UUID) and of(rows, "kernel_error")[0]["kind"] == "measured"
    assert ("", "waiting for the GPU (0 s): another kvlab measures on it") in told


def test_a_comparison_on_the_cpu_neither_locks_nor_looks(folder, monkeypatch):
    monkeypatch.setattr(device_module, "exclusive", pytest.fail)
    monkeypatch.setattr(device_module, "contended", pytest.fail)
    row, = measure(compare(honest()), [KernelError()])
    assert row["kind"] == "measured" and not (folder / "locks").exists()


# ------------------------------------------------------------------------------------------------ others

@pytest.mark.parametrize("processes, present, count, said", [
    ("own", True, 0, ""), ("own,4242,4243", True, 2, ""), ("4242", False, 1, ""), ("", False, 0, ""),
    ("4242,4243", True, 1, "not listed by its own number, as in a container: one is taken for it"),
    ("", True, None, "NVML lists no process on the GPU, not even this one"),
])
def test_processes_of_others_are_counted_without_ours(library, processes, present, count, said):
    with fake_cuda(l2=2**14), loaded(library, processes=processes), gpu("cuda:0") as one:
        found, words = others(one, present)
        assert found == count and (said in words if said else words == "")


def test_children_and_parents_are_ours(library):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with fake_cuda(l2=2**14), loaded(library, processes=f"own,{child.pid},{os.getppid()},42"), gpu("cuda:0") as one:
            assert others(one) == (1, "")
    finally:
        child.communicate(b"\n")


def test_where_processes_cannot_be_listed_the_reason_is_told(library):
    with fake_cuda(l2=2**14), loaded(library, error="DeviceGetComputeRunningProcesses=4"), gpu("cuda:0") as one:
        count, words = others(one)
        assert count is None and words.startswith("NoPermission: ")
        assert contended("cuda:0") == (None, "NoPermission")
    with fake_cuda(l2=2**14), loaded(library, init=9):
        assert contended("cuda:0") == (None, "DriverNotLoaded")


@pytest.mark.parametrize("switches, said", [
    (dict(processes="own,4242,4243"), "contended: 2 other processes on the GPU"),
    (dict(processes="own,4242"), "contended: 1 other process on the GPU"),
    (dict(processes="own"), None), (dict(init=9), "contended: unknown (DriverNotLoaded)"),
    (dict(processes=""), "contended: unknown (NVML lists no process on the GPU, not even this one)"),
])
def test_every_measured_row_says_that_others_were_on_the_gpu(library, switches, said):
    class Two:
        name, metrics, needs, rotates = "two", {"counted": "count", "formula": "count", "absent": "count"}, (), False

        def why_not(self, trial):
            return None

        def measure(self, bench):
            from kvlab.record.reading import Reading, missing
            for trial in bench.trials:
                yield trial, Reading("counted", 1, "count", "measured", note="its own")
                yield trial, Reading("formula", 1, "count", "modelled")
                yield trial, missing("absent", "count", "none here")
    with fake_cuda(l2=2**14), loaded(library, **switches):
        rows = {r["metric"]: r["note"] for r in measure(compare(honest(), device="cuda"), [KernelError(), Two()])}
    assert rows["counted"] == (f"its own; {said}" if said else "its own")
    assert rows["formula"] == "" and rows["absent"] == "none here"
    assert ("contended" in rows["kernel_error"]) is (said is not None)


def test_one_who_comes_while_a_comparison_runs_is_seen_at_its_end(library, monkeypatch):
    def comes(call, inputs):
        monkeypatch.setenv("FAKE_PROCESSES", "own,4242")
        return call()
    with fake_cuda(l2=2**14), loaded(library, processes="own"):
        row, = measure(compare(made("comes", comes), device="cuda"), [KernelError()])
    assert row["note"].endswith("contended: 1 other process on the GPU")


def test_threads_are_put_back_where_the_lock_is_interrupted(holder):
    before = torch.get_num_threads()

    def interrupted(case_id, stage):
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        measure(compare(honest(), device="cuda"), [KernelError()], watch=Watch(at=interrupted))
    assert torch.get_num_threads() == before and HELD not in os.environ
