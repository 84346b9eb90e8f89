"""A stand-in for Nsight Compute's command line: it reads the case that it is given and prints a made-up table.

Tests only. It starts no child: it says itself what kvlab's child would say. FAKE_NCU in the environment tells which of
ncu's ways to end it takes; every target has two kernels, which read FAKE_NCU_READ bytes (else the ideal) and write 128.
FAKE_NCU_COPIES names one that the driver copies alone: it has none. FAKE_NCU_PASSES: replays per kernel (1; 0: unsaid).
"""
import hashlib
import json
import os
import stat
import sys
import time
from pathlib import Path

RANGES = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
FIRST = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size",
         "Grid Size", "Device", "CC", RANGES, "Id:Domain:Start/Stop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"]
UNITS = {"pct": "%", "bytes": "byte", "duration": "ns", "cycles": "cycle"}
PERMISSION = ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance "
              "Counters on the target device 0. For instructions on enabling permissions and to get more information "
              "see https://developer.nvidia.com/ERR_NVGPUCTRPERM")
REFUSALS = {
    "permission": PERMISSION,
    "library": "==ERROR== An error was reported by the counter measurement library:\n==ERROR== Failed to initialize "
               "the profiler: LibraryNotLoaded. Check that a compatible driver library is loaded.",
    "subscribers": "==ERROR== CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED",
    "concurrent": "==ERROR== An error was reported by the driver\n\n==ERROR== Profiling failed because a driver "
                  "resource was unavailable. Ensure that no other tool (like DCGM) is concurrently collecting "
                  "profiling data.",
    "stub": "==ERROR== Nsight Compute failed to connect to the CUDA driver (stub libcuda.so[.1] on path?).",
    "option": "==ERROR== unrecognised option '--print-kernel-base'. Use --help for further details.",
}


def install(folder: Path, monkeypatch, mode="ok", **environment) -> Path:
    """An executable `ncu` in the folder, first on PATH, in that mode. Other settings: FAKE_NCU_<NAME>=value."""
    script = folder / "ncu"
    script.write_text(f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
                      "from fake_ncu import main\nmain(sys.argv[1:])\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_NCU", mode)
    for name, value in environment.items():
        monkeypatch.setenv(f"FAKE_NCU_{name.upper()}", str(value))
    return script


def unit(metric: str) -> str:
    return next(u for part, u in UNITS.items() if part in metric)


def table(kernels, metrics, units=None, ranges=True) -> str:
    """ncu's raw page as CSV. kernels: (case_id, values per metric) each; the child's last kernel comes after them."""
    units = units or [unit(m) for m in metrics]
    lines = [FIRST + list(metrics), [""] * len(FIRST) + units]
    for i, (case_id, values) in enumerate([*kernels, ("", ["1"] * len(metrics))]):
        name = "spin_kernel" if case_id == "" else f"flash_fwd_kernel<{i}, 2>"
        within = f'1 <default domain>:kvlab-{case_id}:none:none:none' if case_id and ranges else ""
        lines.append([str(i), "4711", "python3.12", "gpu-host-7", name, "1", "7", "(128, 1, 1)", "(132, 1, 1)", "0",
                      "9.0", within, "", *values])
    return "\n".join(",".join('"' + cell + '"' for cell in line) for line in lines) + "\n"


def main(arguments):
    mode, _, which = os.environ.get("FAKE_NCU", "ok").partition(":")
    if "--version" in arguments:
        if mode == "mute":
            time.sleep(60)
        print("NVIDIA (R) Nsight Compute Command Line Profiler\nCopyright (c) 2018-2025 NVIDIA Corporation\n"
              f"Version {os.environ.get('FAKE_NCU_VERSION', '2025.3.1.0')} (build 36398880) (public-release)")
        return
    options = {name: value for name, value in zip(arguments, arguments[1:]) if name.startswith("--")}
    if seen := os.environ.get("FAKE_NCU_SEEN"):                      # where a test looks at the command line
        with open(seen, "a") as file:
            print(os.environ.get("LC_ALL"), *arguments, file=file)
    log = open(options["--log-file"], "w")
    print("==PROF== Connected to process 4711 (/home/someone/venv/bin/python3.12)", file=log)
    if mode in REFUSALS:
        _told(arguments[-1], stop_after=0)
        print(REFUSALS[mode], "==PROF== Trying to shutdown target application",
              "==ERROR== The application returned an error code (9).", sep="\n", file=log, flush=True)
        sys.exit(9)
    metrics = options["--metrics"].split(",")
    if mode == "unknown" and (odd := [m for m in metrics if which in m]):
        print(f"==ERROR== Failed to find metric {odd[0]}", file=log, flush=True)
        sys.exit(1)
    if mode == "none":
        _told(arguments[-1])
        print("==WARNING== No kernels were profiled.", file=log, flush=True)
        return
    if mode == "hang":
        time.sleep(60)
    ended = _told(arguments[-1], which if mode in ("crash", "sticky") else None,
                  which if mode in ("failed", "sticky") else None)
    if ended is None:
        print("==ERROR== The application returned an error code (11).", file=log, flush=True)
        sys.exit(11)
    counted = list(_kernels(arguments[-1], metrics, options["--cache-control"]))
    text = table(counted, metrics,
                 ["Kbyte" if mode == "kbyte" and u == "byte" else u for u in map(unit, metrics)], mode != "noranges")
    if mode == "cell":
        text = text.replace('"40.5"', f'"{which}"').replace('"64"', f'"{which}"')
    if n := int(os.environ.get("FAKE_NCU_PASSES", 1)):
        for i in range(len(counted) + 1):
            passes = "1 pass" if n == 1 else f"{n} passes"
            print(f'==PROF== Profiling "flash_fwd_kernel" - {i}: 0%....50%....100% - {passes}', file=log)
    log.write(text[:len(text) - int(which)] if mode == "cut" else text)
    print("==PROF== Disconnected from process 4711", file=log, flush=True)


def _targets(path):
    """(case_id, name) of each trial in the case's file, or of the operation: kvlab's ids are hashes of the JSON."""
    case = json.loads(Path(path).read_text())["case"]
    return [(hashlib.sha256(json.dumps(one, sort_keys=True).encode()).hexdigest()[:12],
             one["variant"]["ref"] if "variant" in one else one["name"]) for one in case.get("trials", [case])]


def _told(path, stop_at=None, fails=None, stop_after=None):
    """What the child says of each target; the targets that went well, or None where one ended the child."""
    for i, (case_id, name) in enumerate(_targets(path)):
        print(json.dumps(dict(began=case_id)), flush=True)
        print("what a variant prints", '{"not": "ours"}', "[1]", sep="\n")
        if fails == name:
            print(json.dumps(dict(failed=case_id, error="odd head_dim in /home/someone/x.py")), flush=True)
        if stop_at == name or i == stop_after:
            return None
        if fails != name:
            print(json.dumps(dict(done=case_id)), flush=True)
    return [case_id for case_id, _ in _targets(path)]


def _read_bytes(path) -> list[int]:
    """What each target reads: as told, else what kvlab says that it must read at least."""
    if "FAKE_NCU_READ" in os.environ:
        return [int(os.environ["FAKE_NCU_READ"])] * len(_targets(path))
    from kvlab.probes._target import read
    from kvlab.probes._traffic import ideal_of
    case, _ = read(Path(path))
    return [ideal_of(one).read_bytes for one in getattr(case, "trials", [case])]


def _kernels(path, metrics, cache_control):
    """Two kernels of each target: three quarters of its reads and then the rest. With empty caches twice as much."""
    for (case_id, name), read in zip(_targets(path), _read_bytes(path)):
        if name == os.environ.get("FAKE_NCU_COPIES"):
            continue
        read *= 2 if cache_control == "all" else 1
        for i, part in enumerate((read * 3 // 4, read - read * 3 // 4)):
            values = {"dram__bytes_read.sum": f"{part:,}", "dram__bytes_write.sum": "64",
                      "gpu__time_duration.sum": f"{20000 - 5000 * i:,}", "sm__cycles_active.avg": "750",
                      "sm__cycles_elapsed.max": "1,000", "sm__warps_active.avg.pct_of_peak_sustained_active": "40.5",
                      "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": f"{12.5 + 7 * i}",
                      "lts__t_sector_hit_rate.pct": "62.5"}
            yield case_id, [values[m] for m in metrics]
