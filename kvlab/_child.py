"""Programs that may crash, hang or start others: run for a while, ended with all that they started, told in words."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from tempfile import TemporaryFile

LARGEST_OUTPUT = 2**20                  # characters of it that are kept
# its own prints go to stderr, so that nothing but answers arrives: a library may print what it likes while it loads
_ANSWER = """
import json, os, sys
_answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)
def answer(**found):
    print(json.dumps(found), file=_answers, flush=True)
"""


@dataclass(frozen=True)
class Ended:
    """What a program printed, its exit code (below 0: the signal that ended it; None: it was given up)."""
    stdout: str
    stderr: str
    code: int | None
    timeout_s: float

    @property
    def how(self) -> str:
        """How it ended, with the last line that it printed; "" where it ended well."""
        if self.code is None:
            return f"did not answer within {round(self.timeout_s) or self.timeout_s:g} s"
        if self.code == 0:
            return ""
        last = (self.stderr.strip() or self.stdout.strip()).splitlines()[-1:]
        return ": ".join([_words(self.code), *last])


def run(command: Sequence[str], *, timeout_s: float, env: dict[str, str] | None = None) -> Ended:
    """The program's end. Raises OSError where it cannot be started."""
    # files, not pipes: what it left running may hold a pipe open long after it
    with TemporaryFile() as stdout, TemporaryFile() as stderr:
        child = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
                                 start_new_session=True)
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(child)
        return Ended(_text(stdout), _text(stderr), code, timeout_s)


def python(code: str, *arguments: str, timeout_s: float) -> tuple[dict, str]:
    """(all that the code gave to `answer(name=value)`, "" or how it ended), by a Python that sees what this one sees.

    Answers given before a crash or the end of patience count; none at all is never a good end.
    """
    # -P and this path: and not what lies in the current folder besides
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    ended = run([sys.executable, "-P", "-c", _ANSWER + code, *arguments], timeout_s=timeout_s,
                env={**os.environ, "PYTHONPATH": path})
    found: dict = {}
    for line in ended.stdout.splitlines():
        try:
            found.update(json.loads(line))
        except ValueError:                                          # it was ended in the middle of a line
            break
    return found, ended.how or ("" if found else _words(0))


def _end(child: subprocess.Popen) -> None:
    """End what is left of the child and of what it started (a compiler, say)."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (AttributeError, ProcessLookupError, PermissionError):           # Windows; or all of it has ended
        child.kill()
    child.wait()


def _words(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"crashed ({signal.Signals(-code).name})"
    except ValueError:
        return f"crashed (signal {-code})"


def _text(file) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - LARGEST_OUTPUT))
    return file.read().decode(errors="replace")
