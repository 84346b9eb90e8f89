"""Which optional libraries really import here, and if not, why: each is tried in a process of its own.

A package that is installed need not work: it may be built for another torch, miss its CUDA part, crash, hang, or be
nothing but a folder that another package left. Only importing it tells, and only a child process may be lost to it.
"""
from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

LONGEST_REASON = 300
_TRY = """
import importlib, json, sys
name, report, *attributes = sys.argv[1:]
try:
    module = importlib.import_module(name)
    found = dict(version=str(getattr(module, "__version__", "") or ""),
                 missing=[a for a in attributes if not hasattr(module, a)])
except BaseException as error:
    found = dict(error=f"{type(error).__name__}: {error}")
with open(report, "w", encoding="utf-8") as file:
    json.dump(found, file)
"""


@dataclass(frozen=True)
class Library:
    """A module that kvlab can use but does not need. why_not: None, or one sentence on why it does not import here."""
    name: str
    version: str | None
    why_not: str | None


@cache
def library(module: str, *, attributes: tuple[str, ...] = (), distribution: str | None = None,
            timeout_s: float = 60) -> Library:
    """Whether `module` imports here and has these attributes; found once per process.

    An absent one is answered without a child process, and without importing the packages it would lie in. A folder
    without __init__.py counts as absent. distribution: the name it is installed under, where that is another one.
    """
    if not _is_there(module):
        return Library(module, None, f"{module} is not installed")
    version = _version(distribution or module.partition(".")[0])
    found = _tried(module, attributes, timeout_s)
    why = found.get("error")
    if not why and found.get("missing"):
        why = f"{module} imports but has no {', '.join(found['missing'])}"
    return Library(module, version or found.get("version") or None, why)


def _is_there(module: str) -> bool:
    """Whether an import would find a file of that name. Parents are looked into, not run: theirs may be the crash."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):                   # a broken entry of sys.modules
        return False
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return False
        spec = PathFinder.find_spec(part, spec.submodule_search_locations)
    return spec is not None and spec.origin is not None             # a namespace package has no origin


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _tried(module: str, attributes: tuple[str, ...], timeout_s: float) -> dict:
    """What a child process found: version and missing attributes, or the error in one line."""
    # -P and this path: the child sees what this process sees, and not what lies in the current folder besides
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    with tempfile.TemporaryDirectory(prefix="kvlab-", ignore_cleanup_errors=True) as folder:
        report, errors = Path(folder, "report.json"), Path(folder, "stderr")
        with errors.open("wb") as stderr:
            child = subprocess.Popen([sys.executable, "-P", "-c", _TRY, module, str(report), *attributes],
                                     env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
                                     stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr)
            try:
                code = child.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return dict(error=f"{module} did not finish importing within {timeout_s:g} s")
            finally:
                _end(child)
        try:
            found = json.loads(report.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            last = _last_line(errors)
            return dict(error=_one_line(f"importing {module} {_how_it_ended(code)}{f': {last}' if last else ''}"))
    if "error" in found:
        found["error"] = _one_line(f"{module} is installed but does not import: {found['error']}")
    return found


def _end(child: subprocess.Popen) -> None:
    """End what is left of the child and of what it started (a compiler, say)."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (AttributeError, ProcessLookupError, PermissionError):           # Windows; or all of it has ended
        child.kill()
    child.wait()


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended Python (exit code {code})"
    try:
        return f"crashed Python ({signal.Signals(-code).name})"
    except ValueError:
        return f"crashed Python (signal {-code})"


def _last_line(errors: Path) -> str:
    with errors.open("rb") as file:
        file.seek(max(0, errors.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _one_line(text: str) -> str:
    """One line of bounded length, without the name of the home folder (the sentence goes into rows and reports)."""
    text = " ".join(text.replace(str(Path.home()), "~").split())
    return text if len(text) <= LONGEST_REASON else text[:LONGEST_REASON - 1] + "…"
