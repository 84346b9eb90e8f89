"""What must hold for every input of a parser: what it raises, how long it takes, what it allocates, what it opens.

Exceptions: only documented ones, raised on purpose (by a `raise`, in kvlab or a library that is named; an OSError may
come from the system), and said in one printable sentence. Time: CPU seconds of this process, by a timer. Memory:
Python's own peak (tracemalloc), on a sample. Paths: CPython's audit events while the parser runs.
"""
from __future__ import annotations

import dis
import os
import resource
import signal
import sys
import threading
import time
import tracemalloc
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.show import printable

if TYPE_CHECKING:
    from fuzz_targets import Target

LONGEST_SENTENCE = 1000         # characters, the input's own path not counted
LIMIT_S = 1.0                   # for every 64 KiB of an input begun; only the patterns of fuzz_hostile.large are longer
ALLOWANCE = 16 * 2**20          # bytes, beside the target's ratio to its input
ROOT = Path(__file__).parents[2]
_LIBRARIES = tuple(dict.fromkeys(os.path.realpath(place) + os.sep for place in (
    sys.prefix, sys.base_prefix, os.path.dirname(os.__file__), ROOT / "kvlab", ROOT / "data")))
_CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod", "os.chown",
            "os.truncate", "os.utime", "os.mkfifo", "os.setxattr", "shutil.")
_NEVER = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "os.fork", "os.startfile", "os.kill",
          "pty.spawn",
          "socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostby", "socket.sendto", "urllib.Request",
          "pickle.find_class", "webbrowser.open", "ctypes.dlopen", "code.__new__")
_OURS = (f"{ROOT / 'kvlab'}/", f"{ROOT / 'tests' / 'fuzz'}/")
_STEERING = {"Cc", "Cs", "Zl", "Zp"}
_RAISES = {dis.opmap["RAISE_VARARGS"], dis.opmap["RERAISE"]}


class Hang(BaseException):
    """The time is up. No Exception, so that no parser catches it."""


class Forbidden(BaseException):
    """A parser would write or start something: said before it happens."""


@dataclass(frozen=True)
class Outcome:
    """What became of one input. found: "" or what is wrong with it; where: the place in kvlab that it came from."""
    accepted: bool
    seconds: float
    found: str = ""
    where: str = ""
    peak: int | None = None     # bytes that Python held at most beyond what it held before; None = not measured


_watching: Path | None = None
_seen: list[str] = []


def _audit(event: str, args: tuple) -> None:
    if _watching is None or threading.current_thread() is not threading.main_thread():
        return
    if event == "open":
        path, mode, flags = args
        if isinstance(path, int):
            return
        if path == "<unknown>":                             # CPython looks for the source of what does not compile
            return
        writes = (isinstance(mode, str) and set(mode) & set("wax+")) or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        _path(path, f"opens {path!r:.200} to write" if writes else f"reads {path!r:.200}", bool(writes))
    elif event in ("os.listdir", "os.scandir", "os.chdir"):
        if args[0] not in sys.path:                         # where a late import looks
            _path(args[0] or ".", f"{event} of {args[0]!r:.200}", False)
    elif event.startswith(_CHANGES):
        _path(args[0], f"{event} of {args[0]!r:.200}", True)
    elif event.startswith(_NEVER):
        _seen.append(f"{event} {args!r:.200}")
        raise Forbidden
    elif event == "exec" and not args[0].co_filename.startswith(("<frozen", *_LIBRARIES)):
        if not os.path.realpath(args[0].co_filename).startswith(_LIBRARIES) and not _importing():
            _seen.append(f"runs code of {args[0].co_filename!r:.200}")


def _importing() -> bool:
    """Whether a module is being imported, in which dataclasses and named tuples run code that they made."""
    frame = sys._getframe()
    while frame and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


def _path(path, said: str, writes: bool) -> None:
    real = os.path.realpath(os.fsdecode(path))
    if not f"{real}/".startswith(f"{_watching}/") and (writes or not f"{real}/".startswith(_LIBRARIES)):
        _seen.append(f"{said}, outside of its folder")
        if writes:
            raise Forbidden


def _late(signum, frame) -> None:
    raise Hang


@contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """Audit events and the CPU timer, for what is judged in `folder`. The hook stays, and does nothing outside."""
    global _watching
    if not getattr(sys, "_kvlab_audited", False):
        sys._kvlab_audited = True                       # hooks cannot be taken away: one is enough
        sys.addaudithook(_audit)
    before = signal.signal(signal.SIGPROF, _late)
    _watching = Path(os.path.realpath(folder))
    try:
        yield
    finally:
        _watching = None
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def judge(target: Target, data: bytes, folder: Path, memory: bool = False) -> Outcome:
    """Write one input and have the target read it. memory: its peak too (several times slower, so not timed)."""
    path = folder / target.file
    path.write_bytes(data)
    accepted, found, where, peak = False, "", "", None
    slower = 1 if sys.gettrace() is None else 4                 # under coverage
    limit_s = slower * LIMIT_S * (-(-max(target.size(data), 1) // 2**16) + target.line_s * data.count(b"\n"))
    with guarded(folder):
        _seen.clear()
        if memory:
            tracemalloc.start()
        began = time.process_time()
        try:
            signal.setitimer(signal.ITIMER_PROF, limit_s * (4 if memory else 1))
            target.read(path)
            signal.setitimer(signal.ITIMER_PROF, 0)
            accepted = True
        except (Hang, Forbidden) as end:
            found, where = "" if memory else f"takes more than {limit_s:g} s of CPU time", _where(end)
        except target.errors as error:
            signal.setitimer(signal.ITIMER_PROF, 0)
            found, where = _sentence(error, path), _where(error)
        except BaseException as error:
            signal.setitimer(signal.ITIMER_PROF, 0)
            if isinstance(error, KeyboardInterrupt):
                raise
            found, where = f"raises {type(error).__name__}: {error!s:.300}", _where(error)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            seconds = time.process_time() - began
            if memory:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
    if _seen:
        found, where = f"{_seen[0]}{f' (and {len(_seen) - 1} more)' if len(_seen) > 1 else ''}", where or "audit"
    elif not found and peak is not None and peak > target.ratio * target.size(data) + ALLOWANCE:
        found = f"holds {peak:,} bytes for an input of {target.size(data):,}"
        where = where or "memory"
    return Outcome(accepted, seconds, found, where, peak)


def _sentence(error: Exception, path: Path) -> str:
    """What is wrong with a documented exception: "" if it was raised on purpose and says one printable sentence."""
    at = _innermost(error)
    if not isinstance(error, OSError) and not _raised(error):
        return f"raises {type(error).__name__} that nobody raised on purpose: {error!s:.300}"
    if not isinstance(error, OSError) and not at.tb_frame.f_code.co_filename.startswith(_OURS):
        return f"lets {type(error).__name__} of {Path(at.tb_frame.f_code.co_filename).name} through: {error!s:.300}"
    cause = error.__cause__
    if type(cause) in (ValueError, KeyError) and not _raised(cause) and str(cause) in str(error) and (
            _innermost(cause).tb_frame.f_code.co_filename.startswith(_OURS)):
        return f"passes on Python's own words: {error!s:.300}"
    said = error.args[0] if isinstance(error, KeyError) and error.args else str(error)
    if not isinstance(said, str) or not said.strip():
        return f"raises {type(error).__name__} without a word"
    text = said.replace(str(path), path.name).replace(str(path.parent), "")
    if len(text) > LONGEST_SENTENCE:
        return f"says {len(text):,} characters: {text:.200}"
    shown = printable(text)
    return "" if not _STEERING & {unicodedata.category(c) for c in shown} else (
        f"says what a terminal cannot show: {shown!r:.300}")


def _innermost(error: BaseException):
    at = error.__traceback__
    while at.tb_next:
        at = at.tb_next
    return at


def _raised(error: BaseException) -> bool:
    """Whether a `raise` in kvlab or a library made it, and not an operation of Python's that failed."""
    at = _innermost(error)
    return at.tb_frame.f_code.co_code[at.tb_lasti] in _RAISES


def _where(error: BaseException) -> str:
    """The innermost line of kvlab that the error passed through."""
    found, at = "", error.__traceback__
    while at:
        file = at.tb_frame.f_code.co_filename
        if file.startswith(_OURS[0]) or not found:
            found = f"{Path(file).name}:{at.tb_lineno}"
        at = at.tb_next
    return found


def resident() -> int:
    """The most bytes that this process ever had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
