"""Which optional libraries really import here, and if not, why: each is tried in a process of its own.

A package that is installed need not work: it may be built for another torch, miss its CUDA part, crash, hang, or be
nothing but a folder that another package left. Only importing it tells, and only a child process may be lost to it.
"""
from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

from kvlab._child import python

LONGEST_REASON = 300
_TRY = """
import importlib
name, *attributes = sys.argv[1:]
try:
    module = importlib.import_module(name)
    found = dict(version=str(getattr(module, "__version__", "") or ""),
                 missing=[a for a in attributes if not hasattr(module, a)])
except BaseException as error:
    found = dict(error=f"{type(error).__name__}: {error}")
answer(**found)
os._exit(0)                             # it imported; what its threads or its clean-up would do now is no matter
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
    found, ended = python(_TRY, module, *attributes, timeout_s=timeout_s)
    why = None
    if "error" in found:
        why = f"{module} is installed but does not import: {found['error']}"
    elif not found:
        hangs = ": it hangs, or this machine is too busy" if ended.startswith("did not answer") else ""
        why = f"importing {module} {ended}{hangs}"
    elif found["missing"]:
        why = f"{module} imports but has no {', '.join(found['missing'])}"
    return Library(module, version or found.get("version") or None, why and _one_line(why))


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


def _one_line(text: str) -> str:
    """One line of bounded length, without the name of the home folder (the sentence goes into rows and reports)."""
    text = " ".join(text.replace(str(Path.home()), "~").split())
    return text if len(text) <= LONGEST_REASON else text[:LONGEST_REASON - 1] + "…"
