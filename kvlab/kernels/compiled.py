"""C files compiled at first use, into the user's cache folder: nothing is built at install, nothing is built twice."""
from __future__ import annotations

import ctypes
import hashlib
import platform
import shutil
import sys
from functools import cache
from pathlib import Path

from kvlab._child import run
from kvlab.folders import cache_folder, passing, settle

COMPILERS = ("cc", "gcc", "clang")
TIMEOUT_S = 60
# sums may be reordered, so that loops become vectors; -ffast-math would also make this process flush denormals to 0.
# Without AVX: a simulator of caches runs such code several times faster, and bytes do not depend on it.
FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math",
         *(("-march=x86-64-v2",) if platform.machine() in ("x86_64", "AMD64") else ()))


class CannotCompile(Exception):
    """Why there is no program or library, in one sentence with what to do."""


@cache
def compiler() -> tuple[str, str]:
    """(path, version) of the first C compiler on PATH that answers; CannotCompile where there is none."""
    if sys.platform == "win32":
        raise CannotCompile("kvlab's C kernels are built by gcc or clang and are not built on Windows; use WSL")
    broken = []
    for name in COMPILERS:
        if (where := shutil.which(name)) is None:
            continue
        try:
            ended = run([where, "--version"], timeout_s=TIMEOUT_S)
        except OSError as error:
            broken.append(f"{name} cannot be started ({error.strerror})")
            continue
        if not ended.how:
            return where, ended.stdout
        broken.append(f"{name} --version {ended.how}")
    none = f"none of {', '.join(COMPILERS)} is on PATH"
    raise CannotCompile(f"no C compiler answers here ({'; '.join(broken) or none}); install gcc or clang that works "
                        "(Debian: apt-get install gcc libc6-dev)")


def compiled(sources: tuple[Path, ...], *, shared: bool, flags: tuple[str, ...] = ()) -> Path:
    """The library (shared) or program made from the first of these files; the others are what it includes.

    It lies in the cache folder under a hash of all texts, the flags, the compiler's version, the machine's kind and
    the C library's version, and is written whole or not at all. CannotCompile says why there is none.
    """
    where, version = compiler()
    flags = (*FLAGS, *flags, *(("-shared", "-fPIC") if shared else ()))
    told = [*(s.read_text() for s in sources), *flags, version, platform.machine(), *platform.libc_ver()]
    named = hashlib.sha256("\0".join(told).encode()).hexdigest()[:16]
    place = cache_folder("compiled", f"{sources[0].stem}-{named}{'.so' if shared else ''}")
    if place.is_file():
        return place
    try:
        with passing(place.parent) as folder:
            made = folder / place.name
            ended = run([where, *flags, str(sources[0]), "-o", str(made), "-lm"], timeout_s=TIMEOUT_S)
            if ended.how or not made.is_file():
                told = ended.stderr.splitlines()
                why = next((line for line in told if "cannot find" in line or "error: " in line), "")
                why = why.rpartition("error: ")[2] or ended.how or "it left no file"
                raise CannotCompile(f"{Path(where).name} cannot compile {sources[0].name}: {why}")
            settle(made, place)
    except OSError as error:
        raise CannotCompile(f"{sources[0].name} cannot be compiled into {place.parent} ({error.strerror or error}); "
                            "set KVLAB_CACHE to a folder that can be written") from None
    return place


def loaded(sources: tuple[Path, ...], flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The library made from these files, in this process. Raises CannotCompile."""
    place = compiled(sources, shared=True, flags=flags)
    try:
        return ctypes.CDLL(str(place))
    except OSError as error:                            # cut short by a full disk, say, or a folder without execution
        raise CannotCompile(f"{place} was compiled and cannot be loaded ({error}); delete it, or set KVLAB_CACHE to "
                            "another folder") from None


def why_not(sources: tuple[Path, ...], *, shared: bool, flags: tuple[str, ...] = ()) -> str | None:
    """Why these cannot be compiled here, or None: it compiles them, once."""
    try:
        compiled(sources, shared=shared, flags=flags)
    except CannotCompile as error:
        return str(error)
    return None
