"""kvlab doctor with every fake: libraries that break in each way, drivers, counters, kernels, fonts, folders."""
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from fake_nvml import UUID, compiled, loaded, run

from kvlab import doctor
from kvlab.doctor import CHECKS, _check, _gpus, _machine, _metrics, _software, as_markdown, examine, next_steps, plain
from kvlab.doctor import print_checks as print_all
from kvlab.doctor._check import Check
from kvlab.libraries import library
from kvlab.units import GiB

ROOT = Path(__file__).parents[1]
FACTS = {"kvlab": "0.1.0", "python": "3.11.7", "platform": "Linux 6.1 x86_64", "torch": "2.13.0", "numpy": "2.4",
         "pandas": "3.1", "git_commit": None, "git_dirty": None, "cpu": "a CPU", "logical_cores": 8,
         "caches_bytes": {"L3": 2**25}, "virtual_machine": False, "transparent_huge_pages": "madvise", "gpus": [],
         "gpus_note": "NVML: none"}
H200 = {"name": "NVIDIA H200", "driver": "570.1", "memory_bytes": 141 * 10**9}
TORCH = {"version": "2.13.0", "cuda": None, "available": False, "devices": [], "threads": 8}
SAID = {"torch": TORCH, "ended": ""}


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A loaded machine must not decide a test."""
    monkeypatch.setattr(_check, "PATIENCE_S", 60)


@pytest.fixture
def facts(monkeypatch):
    """Sets what the machine, and torch, are taken to say."""
    def become(torch=SAID, **changed):
        monkeypatch.setattr(_software, "facts", lambda: {**FACTS, **changed})
        monkeypatch.setattr(_machine, "facts", lambda: {**FACTS, **changed})
        monkeypatch.setattr(_software, "torch_child", lambda: torch)
    become()
    return become


def by_name(checks):
    return {check.name: check for check in checks}


def write(path, text="", mode=0o644):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


# ------------------------------------------------------------------------------------------------ libraries

@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """A folder on the path for packages that are not what they seem; only they are asked for."""
    library.cache_clear()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(_software, "OPTIONAL", {})
    yield tmp_path
    library.cache_clear()
    _software.torch_child.forget()


def test_a_folder_of_the_name_flash_attn_is_not_flash_attn(fakes):
    write(fakes / "flash_attn" / "readme.txt")
    assert by_name(_software.libraries())["flash_attn"].found == "not installed (variant flash_attn, version 2)"


@pytest.mark.parametrize("code, said", [
    ("raise ImportError('libcudart.so.12: cannot open shared object file')", "ImportError: libcudart.so.12"),
    ("raise SystemExit('no licence')", "no licence"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
    ("__version__ = '2.8'", "has no flash_attn_with_kvcache"),
])
def test_a_library_that_is_there_and_does_not_work_is_a_problem_with_its_reason(fakes, code, said):
    write(fakes / "flash_attn" / "__init__.py", code)
    found = by_name(_software.libraries())["flash_attn"]
    assert found.status == "problem" and said in found.found and "mend or uninstall" in found.next_step


def test_several_that_hang_share_one_deadline(fakes, monkeypatch):
    """Five libraries, torch, fonts and all commands: each is given up, and all together take what one takes."""
    monkeypatch.setattr(_check, "PATIENCE_S", 6)
    monkeypatch.setattr(_software, "load_average", lambda: 0.0)
    for name in (*(hanging := [f"hanging_{i}" for i in range(5)]), "torch"):
        write(fakes / name / "__init__.py", "import time; time.sleep(600)")
    write(fakes / "crashing" / "__init__.py", "import os; os.abort()")
    monkeypatch.setattr(_software, "OPTIONAL", dict.fromkeys([*hanging, "crashing"], (None, "", "")))
    for name in ("fc-list", *_machine.COMMANDS):
        write(fakes / "bin" / name, "#!/bin/sh\nexec /bin/sleep 600\n", 0o755)
    monkeypatch.setenv("PATH", str(fakes / "bin"))
    monkeypatch.setattr(doctor, "CHECKS", (_software.torch, _software.chinese, _software.libraries, _machine.commands,
                                           _metrics.metrics))
    began = time.monotonic()
    found = by_name(examine())
    assert time.monotonic() - began < 4 * _check.PATIENCE_S         # one after the other would take more than ten
    for name in (*hanging, "torch", "chinese", "all metrics", *_machine.COMMANDS):
        said = found[name].found
        assert found[name].status == "problem" and re.search(r"did not answer within ([1-6]|0\.\d+) s", said), name
    assert "SIGABRT" in found["crashing"].found and "hangs" in found["hanging_0"].found


def test_what_is_asked_late_gets_what_is_left(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(_check, "monotonic", lambda: now)
    with _check.deadline.running():
        assert _check.deadline.left() == 60
        now += 45
        assert _check.deadline.left() == 15
        now += 45
        assert 0 < _check.deadline.left() < 0.1
    assert _check.deadline.left() == 60


def test_a_library_that_works_says_its_version_and_slow_ones_are_said_to_be_untried(fakes, monkeypatch):
    write(fakes / "gguf" / "__init__.py", "__version__ = '9.9'")
    write(fakes / "papermill" / "__init__.py", "raise RuntimeError('imported after all')")
    write(fakes / "papermill-7.7.dist-info" / "METADATA", "Metadata-Version: 2.1\nName: papermill\nVersion: 7.7\n")
    monkeypatch.setattr(_software, "OPTIONAL", {"gguf": ("gguf-fake", "", ""), "papermill": (None, "", "")})
    found = by_name(_software.libraries())
    assert (found["gguf"].status, found["gguf"].found) == ("ok", "9.9")
    assert found["papermill"].found == "7.7 (installed, not tried)"


def distribution(folder, name, version, module=True):
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    write(info / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    write(info / "RECORD", "pynvml.py,,\n" if module else "pynvml_utils/__init__.py,,\n")


@pytest.mark.parametrize("installed, status, said", [
    ([("nvidia-ml-py", "13.6", True)], "ok", "from nvidia-ml-py"),
    ([("nvidia-ml-py", "13.6", True), ("pynvml", "11.5", True)], "problem", "both pynvml and nvidia-ml-py"),
    ([("pynvml", "11.5", True)], "problem", "the deprecated package pynvml brings the module pynvml (11.5)"),
    ([("nvidia-ml-py", "13.6", True), ("pynvml", "13.0", False)], "note", "pynvml 13.0 is installed beside"),
    ([], "problem", "no module pynvml"),
])
def test_the_deprecated_pynvml_is_found_alone_and_beside_the_right_one(tmp_path, monkeypatch, installed, status, said):
    for name, version, module in installed:
        distribution(tmp_path, name, version, module)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = _software.pynvml()
    assert found.status == status and said in found.found
    assert ("pip uninstall pynvml" in found.next_step) == (status != "ok" and bool(installed))


# ------------------------------------------------------------------------------------------------ torch and GPUs

@pytest.mark.parametrize("torch, gpus, status, said", [
    (TORCH, [], "ok", "CPU build, 8 threads; no CUDA device"),
    (TORCH, [H200], "problem", "install a CUDA build of torch"),
    ({**TORCH, "cuda": "13.0"}, [H200], "problem", "the driver does not serve CUDA 13.0"),
    ({**TORCH, "cuda": "12.8", "available": True, "devices": ["NVIDIA H200"]}, [H200], "ok", "CUDA 12.8 build"),
    (None, [], "problem", "2.13.0: loading it crashed (SIGSEGV)"),
])
def test_torch_and_the_driver_are_held_against_each_other(facts, torch, gpus, status, said):
    facts({"torch": torch, "ended": ""} if torch else {"ended": "crashed (SIGSEGV)"}, gpus=gpus)
    found = _software.torch()
    assert found.status == status and said in found.found + found.next_step


@pytest.mark.parametrize("code, said", [("import os; os.abort()", "SIGABRT"),
                                        ("raise OSError('libtorch_cpu.so: undefined symbol')", "undefined symbol")])
def test_a_torch_that_breaks_costs_its_own_line_only(tmp_path, monkeypatch, code, said):
    write(tmp_path / "torch" / "__init__.py", code)
    done = subprocess.run([sys.executable, "-m", "kvlab", "doctor", "--json"], capture_output=True, text=True,
                          timeout=120, env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 0 and found["torch"]["status"] == "problem" and said in found["torch"]["found"]
    assert found["memory"]["status"] == "ok" and found["jupyter"]["group"] == "notebooks"
    assert "metrics" in {check["group"] for check in found.values()}


def test_a_slow_answer_of_torch_is_no_problem_of_torch_while_the_machine_is_busy(facts, monkeypatch):
    facts({"ended": "did not answer within 6 s"})
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for load, status in ((7.0, "note"), (0.1, "problem"), (None, "problem")):
        monkeypatch.setattr(_software, "load_average", lambda load=load: load)
        assert _software.torch().status == status
    assert "busy" not in _software.torch().found


def test_gpus_are_listed(facts):
    facts(gpus=[H200])
    assert _software.gpus().found == "NVIDIA H200, 131 GiB, driver 570.1"
    facts()
    assert _software.gpus().found == "none (NVML: none)"


@pytest.fixture(scope="module")
def fake_library(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def seen(fake_library, tmp_path, monkeypatch):
    """The lines about NVML and its GPUs under switches of the fake library."""
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))

    def look(library=fake_library, **switches):
        with loaded(library, **switches):
            return by_name([_gpus.nvml(), *_gpus.gpus()])
    return look


def test_a_gpu_has_lines_of_its_clocks_modes_counters_and_processes(seen):
    found = seen()
    assert list(found) == ["NVML", "GPU 0 clock", "GPU 0 modes", "GPU 0 GPM", "GPU 0 processes"]
    assert {check.status for check in found.values()} == {"ok"} and {c.next_step for c in found.values()} == {""}
    assert found["NVML"].found == "13.999.99.fake, driver 999.99.fake"
    assert found["GPU 0 clock"].found == "SM 1755 of 1980 MHz, memory 3201 of 3201 MHz"
    assert found["GPU 0 modes"].found == "MIG off; ECC on, 0 uncorrected errors since the driver was loaded"
    assert found["GPU 0 GPM"].found == "there, and may be read"
    assert found["GPU 0 processes"].found == "no other processes on it"


@pytest.mark.parametrize("switches, name, status, said, step", [
    (dict(reasons=0x1 | 0x4 | 0x40), "clock", "note", "held back now: power limit, heat (hardware)", ""),
    (dict(sm_mhz=0), "clock", "note", "a clock of 0 is none", ""),
    (dict(mig=1), "modes", "note", "MIG on", "CUDA_VISIBLE_DEVICES"), (dict(mig=1), "GPM", "ok", "for the slice", ""),
    (dict(ecc_errors=2), "modes", "problem", "2 uncorrected errors", "cannot be trusted"),
    (dict(ecc=0), "modes", "ok", "ECC off", ""),
    (dict(error="DeviceGetMigMode=3,DeviceGetEccMode=3"), "modes", "ok", "MIG not offered; ECC not offered", ""),
    (dict(gpm=0), "GPM", "note", "this GPU has none", "ncu"),
    (dict(error="GpmSampleGet=4"), "GPM", "note", "NoPermission: permission denied", "--cap-add=SYS_ADMIN"),
    (dict(processes="4242"), "processes", "note", "1 other process on it", "CUDA_VISIBLE_DEVICES"),
    (dict(processes="4242,own,4243"), "processes", "note", "2 other processes on it", "contended"),
    (dict(error="DeviceGetComputeRunningProcesses=3"), "processes", "note", "NotSupported: this GPU does not", ""),
    *((dict(error="*=15"), name, "problem", "GpuIsLost: the GPU has fallen off", "reset it")
      for name in ("clock", "modes", "GPM", "processes")),
])
def test_what_is_wrong_with_a_gpu_is_its_own_line(seen, switches, name, status, said, step):
    found = seen(**switches)[f"GPU 0 {name}"]
    assert found.status == status and said in found.found, found
    assert step in found.next_step and bool(step) == bool(found.next_step), found


def test_each_gpu_has_its_lines_and_one_that_cannot_be_opened_has_one(seen):
    assert len(seen(gpus=2)) == 1 + 2 * 4
    found = seen(gpus=2, error="DeviceGetHandleByIndex=4@1")
    assert found["GPU 0 clock"].status == "ok" and found["GPU 1"].status == "problem"
    assert "GPU 1 clock" not in found


def test_an_old_driver_says_what_it_lacks(seen, tmp_path):
    found = seen(library=compiled(tmp_path, old=True))
    assert found["GPU 0 clock"].status == "ok"
    for name in ("GPM", "processes"):
        check = found[f"GPU 0 {name}"]
        assert (check.found, check.next_step) == ("FunctionNotFound: this driver is too old for it",
                                                  "install a newer one")


@pytest.mark.parametrize("code, status, said, step", [
    (9, "problem", "DriverNotLoaded: the NVIDIA library is there but its kernel driver is not loaded", "load it"),
    (4, "problem", "NoPermission: permission denied", "run as root"),
    (18, "problem", "LibRmVersionMismatch: ", "restart the machine"),
    (12, "note", "LibraryNotFound: no NVIDIA driver answers on this machine: it needs an NVIDIA GPU", ""),
])
def test_a_library_that_does_not_open_is_one_line_with_the_remedy(seen, code, status, said, step):
    found = seen(init=code)
    assert list(found) == ["NVML"] and found["NVML"].status == status
    assert found["NVML"].found.startswith(said) and found["NVML"].next_step.startswith(step)


def test_a_gpu_that_is_measured_on_now_is_said_to_be_locked(seen, tmp_path):
    from filelock import FileLock

    from kvlab.probes._device import lock_file
    (tmp_path / "locks").mkdir()
    with FileLock(lock_file(UUID)):
        found = seen()["GPU 0 processes"]
    assert found.status == "note" and "locked: a kvlab measures on it now" in found.found
    assert UUID[:12] not in found.found and seen()["GPU 0 processes"].status == "ok"


@pytest.mark.parametrize("switches, name, said", [
    (dict(init=9), "NVML", "DriverNotLoaded"), (dict(error="*=15@12"), "GPU 0 processes", "GpuIsLost"),
    (dict(processes="4242"), "GPU 0 processes", "1 other process on it")])
def test_the_command_itself_under_a_fake_driver(fake_library, switches, name, said):
    done = run(fake_library, "-m", "kvlab", "doctor", "--json", **switches)
    found = {check["name"]: check["found"] for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 0 and said in found[name] and "could not be checked" not in done.stdout
    assert "driver" in found["NVIDIA GPU"] or "NVML" in found["NVIDIA GPU"]


# ------------------------------------------------------------------------------------------------ notebooks, fonts

def kernelspec(folder, program):
    write(folder / "kernels" / "python3" / "kernel.json",
          json.dumps(dict(argv=[program, "-m", "ipykernel_launcher"], display_name="Python 3", language="python")))
    return str(folder)


def test_a_kernel_of_another_environment_is_found_even_if_its_python_is_a_link_to_this_one(tmp_path, monkeypatch):
    pytest.importorskip("jupyter_client", reason="the extra `notebook` is not installed")
    other = tmp_path / "other" / "bin" / "python"
    other.parent.mkdir(parents=True)
    other.symlink_to(os.path.realpath(sys.executable))
    for program, status in ((str(other), "problem"), ("/elsewhere/bin/python3", "problem"), (sys.executable, "ok"),
                            ("python", "ok")):
        monkeypatch.setenv("JUPYTER_PATH", kernelspec(tmp_path / status / str(len(program)), program))
        found = _software.kernel()
        assert found.status == status, found
        assert (program in found.found and "kvlab lab" in found.next_step) == (status == "problem")


def test_without_jupyter_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(_software.importlib.util, "find_spec", lambda name: None)
    assert "kvlab[notebook]" in _software.kernel().next_step and _software.kernel().status == "note"


def test_the_first_jupyter_on_the_path_decides(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no command jupyter" in _software.jupyter().found
    write(tmp_path / "jupyter", "#!/bin/sh\n", 0o755)
    found = _software.jupyter()
    assert found.status == "problem" and str(tmp_path) in found.found and "kvlab lab" in found.next_step
    monkeypatch.setattr(_software.sysconfig, "get_path", lambda name: str(tmp_path))
    assert _software.jupyter().status == "ok"


@pytest.mark.skipif(os.name != "posix", reason="fontconfig is asked on POSIX systems")
@pytest.mark.parametrize("script, status", [("", "note"), ("echo Noto Sans CJK SC,Noto Sans CJK", "ok")])
def test_fonts_for_chinese_by_fontconfig(tmp_path, monkeypatch, script, status):
    write(tmp_path / "fc-list", f"#!/bin/sh\n{script}\n", 0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = _software.chinese()
    assert found.status == status and ("Noto Sans CJK SC" in found.found) == (status == "ok")


@pytest.mark.parametrize("fonts, status", [(["DejaVu Sans", "STIX"], "note"),
                                           (["DejaVu Sans", "Microsoft YaHei"], "ok")])
def test_fonts_for_chinese_by_matplotlib_where_there_is_no_fontconfig(monkeypatch, fonts, status):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(_software, "python", lambda code, timeout_s: (dict(names=fonts), ""))
    assert _software.chinese().status == status
    monkeypatch.setattr(_software, "python", lambda code, timeout_s: ({}, "ended with exit code 1: no matplotlib"))
    (found,) = doctor._asked(_software.chinese)
    assert found.status == "problem"
    assert found.found == "could not be checked: OSError: asking for fonts ended with exit code 1: no matplotlib"


# ------------------------------------------------------------------------------------------------ the machine

@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(_check, "ROOT", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 1000, raising=False)
    return tmp_path


@pytest.mark.parametrize("params, user, status, said", [
    (None, 1000, "note", "no NVIDIA driver is loaded"),
    ("ResmanDebugLevel: 4294967295\nRmProfilingAdminOnly: 1\n", 1000, "note", "only root may read them (Rm"),
    ("RmProfilingAdminOnly: 1\n", 0, "ok", "and this is root"), ("RmProfilingAdminOnly: 0\n", 1000, "ok", "every user"),
])
def test_who_may_read_gpu_counters(root, monkeypatch, params, user, status, said):
    if params is not None:
        write(root / "proc/driver/nvidia/params", params)
    monkeypatch.setattr(os, "geteuid", lambda: user, raising=False)
    found = by_name(_machine.counters())["GPU counters"]
    assert found.status == status and said in found.found
    assert ("NVreg_RestrictProfilingToAdminUsers=0" in found.next_step) == ("Rm" in said)


@pytest.mark.parametrize("units, paranoid, status, said", [
    ([], None, "note", "offers none"), (["software"], "2", "note", "hidden, as in most virtual machines"),
    (["cpu", "software"], "4", "note", "perf_event_paranoid 4"), (["cpu"], "2", "ok", "the probe perf"),
    (["cpu_core"], "garbage", "ok", "the probe perf"),
])
def test_who_may_read_cpu_counters(root, units, paranoid, status, said):
    for unit in units:
        (root / "sys/bus/event_source/devices" / unit).mkdir(parents=True)
    if paranoid:
        write(root / "proc/sys/kernel/perf_event_paranoid", paranoid)
    found = by_name(_machine.counters())["CPU counters"]
    assert found.status == status and said in found.found


def test_clocks_load_steal_and_huge_pages(root, facts, monkeypatch):
    assert "governor not told" in _machine.clocks().found
    write(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n")
    assert _machine.clocks().status == "note" and "governor powersave" in _machine.clocks().found
    monkeypatch.setattr(psutil, "cpu_freq", lambda: None)
    assert "clock unknown" in _machine.clocks().found
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for load, status in ((0.5, "ok"), (7.9, "note"), (None, "ok")):
        monkeypatch.setattr(_machine, "load_average", lambda load=load: load)
        assert _machine.load().status == status
    facts(virtual_machine=True)
    times = type(psutil.cpu_times())
    monkeypatch.setattr(psutil, "cpu_times", lambda: times(*[0.0] * (len(times._fields) - 1), 1.0)._replace(
        **({"user": 9.0, "guest_nice": 0.0} | ({"steal": 1.0} if "steal" in times._fields else {}))))
    found = _machine.processor()
    assert "transparent huge pages: madvise" in found.found and "a virtual machine" in found.found
    if "steal" in times._fields:
        assert found.status == "note" and "10.0 % of its time taken by others" in found.found


def test_memory_counts_a_containers_limit_and_short_disk_is_a_problem(root, monkeypatch, tmp_path):
    monkeypatch.setattr(_machine, "free_memory", lambda: 8 * GiB)
    assert _machine.memory().status == "ok"
    write(root / "sys/fs/cgroup/memory.max", "max\n")
    assert "container" not in _machine.memory().found
    write(root / "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")       # version 1: no limit
    assert "container" not in _machine.memory().found
    write(root / "sys/fs/cgroup/memory.max", f"{GiB}\n")
    found = _machine.memory()
    assert found.status == "problem" and "this container may use 1 GiB" in found.found
    monkeypatch.setattr(_machine.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1}))
    assert _machine.disk().status == "problem" and "--out" in _machine.disk().next_step


def test_folders_that_cannot_be_written_are_named_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "new" / "cache"))
    assert _machine.writable().status == "ok" and list(tmp_path.iterdir()) == []
    write(tmp_path / "a_file")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "a_file" / "cache"))
    found = _machine.writable()
    assert found.status == "note" and "Not a directory" in found.found and "HF_HOME" in found.next_step


def test_commands_that_fail_or_say_nothing_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(_check, "PATIENCE_S", 1)
    for name, script in (("ncu", "echo NVIDIA; echo Version 2026.2.1"), ("nvidia-smi", "echo no driver >&2; exit 9"),
                         ("nsys", "exec /bin/sleep 60"), ("g++", "exit 0")):
        write(tmp_path / name, f"#!/bin/sh\n{script}\n", 0o755)
    write(tmp_path / "chromium", "#!/nothing/here\n", 0o755)
    found = {name: (check.status, check.found) for name, check in by_name(_machine.commands()).items()}
    assert found["ncu"] == ("ok", "Version 2026.2.1") and found["valgrind"][1].startswith("not installed")
    assert found["nvidia-smi"] == ("problem", "`--version` ended with exit code 9: no driver")
    assert found["nsys"] == ("problem", "`--version` did not answer within 1 s")
    assert found["g++"] == ("ok", "version unknown")
    assert found["chromium"][0] == "problem" and found["chromium"][1].startswith("it cannot be started: ")


# ------------------------------------------------------------------------------------------------ metrics

def test_what_is_said_of_metrics_is_what_their_rows_say(monkeypatch):
    """Readings of one real call on this machine: kind and method stand in the doctor's words."""
    from kvlab.attention import Comparison, trial
    from kvlab.probes import measure
    from kvlab.probes.ceilings import Ceilings
    from kvlab.probes.format_error import FormatError
    from kvlab.probes.kernel_error import KernelError
    from kvlab.probes.memory import Memory
    from kvlab.probes.nvml import Nvml
    from kvlab.probes.roofline import Roofline
    from kvlab.probes.timer import Timer
    from kvlab.shapes import AttentionShape, Workload
    monkeypatch.setattr("kvlab.probes._base.last_level_cache", lambda: (2**20, "test"))     # few input copies: fast
    monkeypatch.setattr("kvlab.probes.ceilings.room_on", lambda device: (2**30, 2**20))
    one = trial("sdpa", Workload.decode(AttentionShape(8, 2, 64), kv_len=64))
    probes = (KernelError(), FormatError(), Ceilings(samples=1), Timer(cap_s=0.2), Roofline(), Memory(), Nvml())
    said, seen = {}, set()
    for check in _metrics.metrics():
        source, named, words = check.found.partition(": ")
        probe = source.removeprefix("from ") if source.startswith("from ") else None
        said[check.name, probe] = words if probe else check.found
    for row in measure(Comparison((one,)), probes):
        words = said.get((row["metric"], row["source"])) or said[row["metric"], None]
        seen.add(row["metric"])
        assert words.startswith(f"{row['kind']}: ") or row["metric"].endswith("_amplification"), (row["metric"], words)
        if row["kind"] != "missing":
            method = row["method"] if row["kind"] == "measured" else row["method"].partition(":")[0]
            assert method.partition(",")[0] in words, (row["method"], words)
    assert {"latency_s", "hbm_bytes", "peak_extra_bytes", "power_instant", "read_ceiling"} <= seen


def test_the_tables_name_nothing_that_does_not_exist():
    from kvlab.probes import probes
    found = list(_metrics.metrics())
    names = {check.name for check in found}
    of_probes = {f"{probe}.{metric}" for probe in probes for metric in probes[probe].metrics}
    assert set(_metrics.ROWS) <= {*names, *probes, *of_probes} and set(_metrics.BETTER) <= names
    assert {check.name for check in found if check.found.startswith("see its rows (probe")} == set()


def test_a_metric_of_several_probes_has_a_line_for_each_and_its_need_is_said_once():
    lines = [check for check in _metrics.metrics() if check.name == "hbm_bytes"]
    assert {check.found.partition(": ")[0] for check in lines} >= {"from roofline", "from gpm", "from callgrind"}
    assert [bool(check.next_step) for check in lines] == [True] + [False] * (len(lines) - 1)
    assert "gpm" in lines[0].next_step and "ncu" in lines[0].next_step and "callgrind" in lines[0].next_step


def test_a_new_probe_appears_by_itself():
    """Its metric, and that it cannot run here, without a line about it in the doctor."""
    code = ("from kvlab.probes import probes; from kvlab.doctor import _metrics\n"
            "class New:\n    name, metrics = 'new', {'new_metric': 's'}\n"
            "    def why_not(self, trial): return f'needs luck on {trial.device}'\n"
            "import kvlab.probes\n"
            "kvlab.probes.probes = {'new': New}\n"
            "known = _metrics.ask('cpu')\n"
            "assert known['why'] == {'new': 'needs luck on cpu'}, known\n"
            "(one,) = [m for m in known['metrics'] if m['origin'] == 'probe new']\n"
            "print(_metrics._check(one['name'], one['origin'], known).found)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.stdout == "missing: needs luck on cpu\n", done.stderr


def test_probes_that_cannot_be_asked_are_a_line(monkeypatch):
    monkeypatch.setattr(_metrics, "torch_child", lambda: {"torch": TORCH, "ended": "crashed (SIGSEGV)"})
    (found,) = _metrics.metrics()
    assert found.status == "problem" and found.found == "the probes cannot be asked: their process crashed (SIGSEGV)"


# ------------------------------------------------------------------------------------------------ the whole

def test_a_check_that_raises_is_a_line_and_the_others_go_on(monkeypatch):
    def memory():
        raise ZeroDivisionError("oh")
    memory.__module__ = "kvlab.doctor._machine"
    monkeypatch.setattr(doctor, "CHECKS", (_software.encoding, memory, _machine.disk))
    found = by_name(examine())
    assert found["memory"].found == "could not be checked: ZeroDivisionError: oh" and len(found) == 3


def test_nothing_is_printed_that_names_the_machine_its_user_or_a_folder(monkeypatch):
    monkeypatch.setattr(doctor.socket, "gethostname", lambda: "labhost17")
    monkeypatch.setattr(doctor.getpass, "getuser", lambda: "alice")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/alice"))
    found = [Check("software", "a", "problem", "ImportError (/home/alice/env/lib/x.so): on labhost17, for alice | 1",
                   "look into /srv/secret/place"), Check("software", "b", "ok", "alicent")]
    for text in (as_markdown(found), json.dumps(plain(found))):
        assert not [word for word in ("/home", "alice/", "labhost17", "/srv", "secret", "for alice ") if word in text]
        assert "alicent" in text and "x.so" in text
    assert "\\| 1 |" in as_markdown(found)


def test_what_a_library_says_cannot_command_the_terminal(capsys):
    found = [Check("libraries", "lib\x1b[2J", "problem", "\x1b]0;title\x07 failed \x9b31m", "mend\x1b[1m it")]
    print_all(found)
    for text in (capsys.readouterr().out, as_markdown(found)):
        assert "failed" in text and "\\x1b" in text and not {"\x1b", "\x07", "\x9b"} & set(text)


def test_next_steps_are_few_and_what_is_broken_comes_first():
    found = [Check("machine", "load", "note", "busy", "wait"),
             Check("libraries", "flashinfer", "note", "none", "a GPU"),
             Check("metrics", "power_instant", "note", "missing", "a GPU"),
             *(Check("software", f"p{i}", "problem", "broken", "mend it") for i in range(2))]
    assert next_steps(found) == ["p0: mend it", "p1: mend it", "load: wait"]
    assert next_steps(found[1:3]) == ["nothing is in the way; try: kvlab run memory_wall --size smoke"]
    with pytest.raises(ValueError, match="allowed: ok, note, problem"):
        Check("a", "b", "fine", "c")


def test_a_terminal_without_unicode_gets_question_marks_and_is_told(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    found = [_software.encoding()]
    print_all(found)
    sys.stdout.flush()
    assert found[0].status == "note" and b"PYTHONIOENCODING" in raw.getvalue() and b"?" in raw.getvalue()


@pytest.fixture(scope="module")
def here():
    """Everything the doctor says of this machine, in a process of its own, and what that process had loaded."""
    code = ("import contextlib, io, json, sys; from kvlab.doctor import _check, as_markdown, examine,"
            " plain, print_checks\n"
            "_check.PATIENCE_S = 60\n"
            "found = examine()\n"
            "loaded = sorted({'torch', 'matplotlib', 'pandas'} & set(sys.modules))\n"
            "with contextlib.redirect_stdout(io.StringIO()) as text: print_checks(found)\n"
            "print(json.dumps(dict(plain=plain(found), markdown=as_markdown(found), text=text.getvalue(),"
            " loaded=loaded)))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return json.loads(done.stdout)


def test_there_is_a_line_for_every_thing_and_no_check_broke(here):
    for text in (here["text"], here["markdown"], json.dumps(here["plain"])):
        for name in ("torch", "pynvml", "kernel", "GPU counters", "flashinfer", "ncu", "hbm_bytes", "memory"):
            assert name in text
        assert "could not be checked" not in text and "cannot be asked" not in text
    assert {check["group"] for check in here["plain"]["checks"]} == set(doctor.GROUPS)
    assert 1 <= len(here["plain"]["next_steps"]) <= 3 and len(CHECKS) > 15


def test_markdown_and_json_of_this_machine_name_no_folder_of_it(here):
    for text in (here["markdown"], json.dumps(here["plain"])):
        assert str(ROOT) not in text and os.path.expanduser("~/") not in text and sys.prefix not in text


def test_the_doctor_itself_loads_neither_torch_nor_matplotlib_nor_pandas(here):
    assert here["loaded"] == []


@pytest.mark.parametrize("option, begins", [([], "!"), (["--markdown"], "### kvlab doctor"), (["--json"], "{")])
def test_the_command_ends_well_whatever_was_found(monkeypatch, capsys, option, begins):
    from kvlab.cli import main
    monkeypatch.setattr(doctor, "examine", lambda: [Check("machine", "disk", "problem", "full", "make room")])
    monkeypatch.setattr(sys, "argv", ["kvlab", "doctor", *option])
    with pytest.raises(SystemExit) as ended:
        main()
    out = capsys.readouterr().out
    assert ended.value.code == 0 and "make room" in out and begins in out
