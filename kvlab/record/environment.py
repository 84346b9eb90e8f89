"""Where numbers come from: hardware, software and load, without host name, user name or absolute path."""
from __future__ import annotations

import errno
import os
import platform
import re
import secrets
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Annotated, Any, BinaryIO

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    JsonValue,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from kvlab.hushed import hushed, hushed_words
from kvlab.record.export import CHECKSUM, StoreError, sealed, unsealed
from kvlab.record.migrate import check_schema_version
from kvlab.record.reading import SCHEMA_VERSION
from kvlab.units import MiB

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "OMP_WAIT_POLICY", "KMP_AFFINITY",
                     "KMP_BLOCKTIME", "GOMP_CPU_AFFINITY", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_NEVER_ASSUMED = ("study", "run_id", "created_utc", "environment")   # of a stored run: the defaults are this machine's
_STORED = "stored"                                      # a manifest from disk: what it says was cut when it was written
_ABSOLUTE = re.compile(r"(?:^|(?<=[=,:\s'\"]))(?!//\w)(?:[A-Za-z]:[\\/]|/(?=\S)|~(?=[A-Za-z/])|\\\\)[^=,'\"]*")


def environment() -> dict[str, JsonValue]:
    """This machine and its software, as plain JSON values; what cannot be known is null.

    Takes well below a second: torch is not imported, and only git is started, where kvlab lies in a checkout.
    """
    import psutil
    cache_bytes, cache_source = last_level_cache()
    gpus, gpus_note = _gpus()
    cpu_info = _read("/proc/cpuinfo")
    return {
        "kvlab": _version("kvlab"), "python": platform.python_version(), "platform": _platform(),
        **{name: _version(name) for name in ("torch", "numpy", "pandas", "triton")}, **_git(),
        "cpu": _cpu_model(), "logical_cores": os.cpu_count(), "caches_bytes": _caches(),
        "last_level_cache_bytes": cache_bytes, "last_level_cache_source": cache_source,
        "memory_bytes": psutil.virtual_memory().total,
        "transparent_huge_pages": _first(r"\[(\w+)\]", _read("/sys/kernel/mm/transparent_hugepage/enabled")),
        "virtual_machine": bool(re.search(r"^flags.*\bhypervisor\b", cpu_info, re.M)) if cpu_info else None,
        "load_average": load_average(), "gpus": gpus, "gpus_note": gpus_note,
        "thread_variables": {name: os.environ[name] for name in _THREAD_VARIABLES if name in os.environ},
    }


def last_level_cache() -> tuple[int, str]:
    """Bytes of the largest-level CPU cache and where the number is from: sysfs, sysctl, or assumed (32 MiB)."""
    caches = _caches()
    if caches:
        return caches[max(caches)], "sysfs"
    if sys.platform == "darwin":
        for name in ("hw.l3cachesize", "hw.perflevel0.l2cachesize", "hw.l2cachesize"):
            text = _output("sysctl", "-n", name)
            if text and text.isdigit() and int(text):
                return int(text), "sysctl"
    return 32 * MiB, "assumed"


def free_memory() -> int:
    """Bytes of main memory that can be had without swapping."""
    import psutil
    return psutil.virtual_memory().available


def cpu_name() -> str:
    """What a number measured on this CPU is about: its model and logical cores."""
    return f"{_cpu_model()}, {os.cpu_count()} logical cores"


def load_average() -> float | None:
    """Runnable processes over the last minute; None where the system does not say (Windows)."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def cpu_steal_seconds() -> float | None:
    """Seconds since boot, over all CPUs, in which a hypervisor ran something else; None outside Linux."""
    steal = _first(r"^cpu +(?:\d+ +){7}(\d+)", _read("/proc/stat"))
    return None if steal is None else int(steal) / os.sysconf("SC_CLK_TCK")


def portable(text: str) -> str:
    """The text with each absolute path cut to what says nothing of the machine.

    Relative to the current folder where it lies below it, else the last part; the home folder is "~".
    """
    return _ABSOLUTE.sub(lambda found: _portable_path(found.group()), text)


def _portable_path(text: str) -> str:
    path = PureWindowsPath(text) if re.match(r"[A-Za-z]:|\\", text) else PurePosixPath(text)
    home, here = Path(os.path.expanduser("~")), Path.cwd()
    if str(path) == str(home) or text.startswith("~") and len(path.parts) == 1:
        return "~"
    if str(path).startswith(f"{here}{os.sep}") and (here == home or not home.is_relative_to(here)):
        return Path(path).relative_to(here).as_posix()       # not from above the home folder: that would name the user
    return path.name or "/"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _first(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text, re.M)
    return found.group(1).strip() if found else None


def _output(*command: str) -> str | None:
    """What the command prints; None if it is absent, fails or takes longer than two seconds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=2, check=True,
                              stdin=subprocess.DEVNULL, env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"})
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _platform() -> str:
    """System, kernel version and architecture; a kernel's local suffix is left out: it can name a site."""
    return f"{platform.system()} {re.findall(r'^[0-9.]*', platform.release())[0]} {platform.machine()}"


def _git() -> dict[str, JsonValue]:
    """Commit of the checkout that kvlab itself lies in, and whether files differ from it."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():             # not further up: that would be the repository of somebody's project
        return {"git_commit": None, "git_dirty": None}
    status = _output("git", "-C", str(root), "status", "--porcelain")
    return {"git_commit": _output("git", "-C", str(root), "rev-parse", "--verify", "HEAD"),
            "git_dirty": None if status is None else bool(status)}


def _cpu_model() -> str:
    named = _first(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"))
    if named is None and sys.platform == "darwin":
        named = _output("sysctl", "-n", "machdep.cpu.brand_string")
    return named or platform.processor() or platform.machine()


def _caches() -> dict[str, int]:
    """Bytes of the data caches that the first CPU sees, by level ("L1", "L2", …); empty outside Linux."""
    found = {}
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        level, size = _read(f"{index}/level").strip(), re.match(r"(\d+)([KMG]?)", _read(f"{index}/size"))
        if level and size and _read(f"{index}/type").strip() != "Instruction":
            found[f"L{level}"] = int(size[1]) * {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[size[2]]
    return dict(sorted(found.items()))


def _gpus() -> tuple[list[dict[str, JsonValue]], str]:
    """Name, driver and memory of each NVIDIA GPU, and why the list is empty if it is."""
    try:
        import pynvml
    except ImportError:
        return [], "pynvml is not installed (package nvidia-ml-py)"
    try:
        pynvml.nvmlInit()
        try:
            driver = pynvml.nvmlSystemGetDriverVersion()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            return [{"name": pynvml.nvmlDeviceGetName(handle), "driver": driver,
                     "memory_bytes": pynvml.nvmlDeviceGetMemoryInfo(handle).total} for handle in handles], ""
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return [], f"NVML: {error}"


def opened_file(path: Path) -> BinaryIO:
    """A regular file, to read; OSError where there is none: a pipe in a stranger's folder would wait for ever."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file")
    return path.open("rb")


class VariantSource(BaseModel):
    """A variant of the run: its reference and, for a user's file, the source text and its SHA-256 (hex)."""
    model_config = ConfigDict(extra="forbid", frozen=True)
    ref: str
    sha256: str = ""
    source: str = ""

    @field_validator("ref")
    @classmethod
    def _no_absolute_path(cls, ref: str) -> str:
        return portable(ref)


_WITHOUT = "the readings beside it can still be read: give kvlab query or export the file readings.jsonl itself"


class Manifest(BaseModel):
    """What a run was: written before its first reading, enough to run it again.

    created_utc, run_id and environment fill themselves in. Absolute paths in argv, models, options and variant
    references are cut by `portable`, credentials and tokens by `hushed`.
    """
    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: int = SCHEMA_VERSION
    study: str
    created_utc: str = Field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
    run_id: str = Field(default_factory=lambda data: f"{re.sub('[-:]', '', data['created_utc'])}-"
                                                     f"{secrets.token_hex(3)}")
    argv: Annotated[list[str], FailFast()] = []
    size: str = ""
    device: str = ""
    seeds: Annotated[list[int], FailFast()] = []
    variants: Annotated[list[VariantSource], FailFast()] = []
    models: Annotated[list[str], FailFast()] = []
    options: dict[str, JsonValue] = {}
    cases: int | None = None                            # that the run is to have; None: of a run that did not say
    environment: dict[str, JsonValue] = Field(default_factory=environment)

    @field_validator("argv", "models", "options")
    @classmethod
    def _told(cls, value: Any, about: ValidationInfo) -> Any:
        return value if about.context == _STORED else cls._cut(value)

    @classmethod
    def _cut(cls, value: Any) -> Any:
        if isinstance(value, str):
            return portable(hushed(value))
        if isinstance(value, list):
            texts = hushed_words(value) if all(isinstance(item, str) for item in value) else value
            return [cls._cut(item) for item in texts]
        if isinstance(value, dict):
            return {name: cls._cut(item) for name, item in value.items()}
        return value

    @model_validator(mode="before")
    @classmethod
    def _unchanged(cls, content: Any) -> Any:
        return unsealed(content) if isinstance(content, dict) else content

    def text(self) -> bytes:
        """What manifest.json holds: the fields, and a checksum of them."""
        return sealed(self.model_dump(mode="json"))

    @classmethod
    def read(cls, run: Path) -> Manifest:
        """The manifest of a run directory.

        Refused: a folder without one, another schema version, damage.
        """
        import json
        path = run / "manifest.json"
        try:
            with opened_file(path) as file:
                content = json.load(file)
        except OSError as error:
            raise StoreError(error.errno, f"{run} is no run directory: its manifest.json cannot be read "
                                          f"({error.strerror}); kvlab ls runs lists the runs of a folder") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is damaged ({error}); {_WITHOUT}") from None
        version = content.get("schema_version") if isinstance(content, dict) else None
        check_schema_version(version, str(run))
        fields = {*cls.model_fields, CHECKSUM}
        for name in (*_NEVER_ASSUMED, *content):            # before all else: each of a stranger's would be an error
            if name not in content or name not in fields:
                what = "unknown" if name in content else "missing"
                raise ValueError(f"{path} is damaged: {name!r:.40} is {what}; {_WITHOUT}")
        try:
            return cls.model_validate(content, context=_STORED)
        except ValidationError as error:
            first = error.errors()[0]
            where = f" at {'.'.join(map(str, first['loc'])):.80}" if first["loc"] else ""
            raise ValueError(f"{path} is damaged{where}: {first['msg'].removeprefix('Value error, ')}; "
                             f"{_WITHOUT}") from None
