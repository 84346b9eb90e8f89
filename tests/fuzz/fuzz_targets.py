"""The parsers that are fuzzed: what each reads, from which small real inputs, and how what was changed is wrapped up.

A body is what is changed by structure; `wrap` makes the file of it (a gzip file, a GGUF header, lines with their
checksum), so that what lies behind a checksum or a length is reached too.
"""
from __future__ import annotations

import contextlib
import io
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

TESTS = Path(__file__).parents[1]


def _as_it_is(chance: Random, body: bytes) -> bytes:
    return body


@dataclass(frozen=True)
class Target:
    """A parser. read: reads the file (named `file`) as a user's command would. errors: the documented exceptions.

    size: bytes of an input, by which its time and memory are judged: of a packed file those it unpacks to. ratio: of
    its peak memory to its size at most. line_s: CPU seconds that each of its lines may take beside the limit of all.
    """
    name: str
    file: str
    read: Callable[[Path], object]
    seeds: Callable[[], list[bytes]]
    wrap: Callable[[Random, bytes], bytes] = _as_it_is
    errors: tuple[type[BaseException], ...] = (ValueError, KeyError, OSError)
    size: Callable[[bytes], int] = len
    ratio: int = 10
    line_s: float = 0.0


RARELY = [True]                 # whether slow steps are left out of most inputs


def some(data: object) -> bool:
    """Whether this input takes the steps that cost milliseconds, such as a printed table: one in eight does."""
    return not (RARELY[0] and zlib.crc32(repr(data)[:200].encode("utf-8", "replace")) % 8)


def shown(data: object, show: Callable, *arguments) -> None:
    """Print as a command would, of some inputs; only what a terminal can show."""
    if not some(data):
        return
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        show(*arguments)
    wrong = out.getvalue().replace("\n", "").replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert wrong.isprintable() or not any(ord(c) < 32 or 0x7f <= ord(c) < 0xa0 for c in wrong), (
        f"prints {next(c for c in wrong if not c.isprintable())!r}")


def warm(target: Target, folder: Path) -> None:
    """Read the seeds unwatched, so that late imports and tables that are read once are no part of an input's cost."""
    RARELY[0] = False
    for body in target.seeds():
        path = folder / target.file
        path.write_bytes(target.wrap(Random(1), body))
        with contextlib.suppress(*target.errors):
            target.read(path)
    RARELY[0] = True


def targets() -> dict[str, Target]:
    """All targets by name."""
    from fuzz_cli import CLI_TARGETS
    from fuzz_logs import LOG_TARGETS
    from fuzz_models import MODEL_TARGETS
    from fuzz_records import RECORD_TARGETS
    return {target.name: target for target in (*MODEL_TARGETS, *LOG_TARGETS, *RECORD_TARGETS, *CLI_TARGETS)}
