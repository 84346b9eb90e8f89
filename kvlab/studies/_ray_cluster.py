"""A Ray cluster as kvlab sees it: how it is reached or started, where there is room on it, what died and why."""
from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from kvlab.studies._worker import cores
from kvlab.units import GiB

STARTS = 3                      # tries of a Ray of this machine
STORE_BYTES = 200_000_000       # of shared memory for answers; what does not fit goes through files
# nothing is sent to Ray's makers; and a node runs the kvlab that is installed there, not a copy from here
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
_ours = False                   # whether this process is connected by `connected`, not by its caller


class Place(NamedTuple):
    """What one measuring process has to itself: its share of a node."""
    number: int
    node: str                   # Ray's id, hex
    cpus: float
    gpus: int
    memory: int                 # bytes


def places(nodes: Iterable[dict], kind: str, threads: int = 1) -> list[Place]:
    """Where cases of a kind can be measured at the same time, over the nodes as `ray.nodes()` lists them.

    cuda: a GPU each, with its share of the CPUs. timed: a whole node. beside (no times): `threads` CPUs and a GiB.
    """
    found = []
    for node in nodes:
        has = node["Resources"] if node["Alive"] else {}
        cpus, gpus, memory = (int(has.get(name, 0)) for name in ("CPU", "GPU", "memory"))
        if kind == "cuda":
            found += [Place(i, node["NodeID"], cpus // gpus, 1, 0) for i in range(gpus)]
        elif kind == "timed" and cpus:
            found.append(Place(0, node["NodeID"], cpus, 0, 0))
        elif cpus:
            n = max(1, min(cpus // threads, memory // GiB))
            found += [Place(i, node["NodeID"], min(threads, cpus), 0, min(GiB, memory // n)) for i in range(n)]
    return found


def connected(address: str | None) -> tuple[Any, bool]:
    """(the module ray, whether the connection is to be ended): to the cluster at an address, or a Ray started here.

    A connection that the caller has made is used as it is. ValueError says in one sentence what hinders it.
    """
    global _ours
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        from ray.util import scheduling_strategies  # noqa: F401
    except ImportError as error:
        raise ValueError(f"--engine ray needs ray ({error}); install it with: pip install 'kvlab[ray]'") from None
    if ray.is_initialized() and not _ours:
        there = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", there):
            raise ValueError(f"this process is connected to the Ray cluster at {there}, not {shown(address)}; call "
                             "ray.shutdown() first")
        return ray, False
    if not ray.is_initialized():
        with _own_sigterm():
            if address is None:
                _start(ray)
            else:
                _reach(ray, address)
        _ours = True
        _hush()
    return ray, True


def disconnect(ray) -> None:
    """End the connection; a Ray that was started here ends with all its processes."""
    global _ours
    ray.shutdown()
    _ours = False
    _hush(False)


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep what SIGTERM does here: Ray would print its stack and die of it, where kvlab ends the run."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _start(ray) -> None:
    """A Ray of this machine. Its start has a fixed limit of time, which a busy machine misses."""
    for attempt in range(1, STARTS + 1):
        try:
            ray.init(address="local", num_cpus=cores(), include_dashboard=False, log_to_driver=False,
                     object_store_memory=STORE_BYTES, logging_level=logging.CRITICAL)
            return
        except Exception as error:
            ray.shutdown()
            why = first_line(error)
        if attempt < STARTS:
            say(f"Ray did not start ({why}); tried again, {attempt + 1} of {STARTS}")
    raise ValueError(f"Ray did not start on this machine in {STARTS} tries ({why}): it has 15 s for that, too few on a "
                     "busy machine (ray-project/ray #65983); try again when the load is lower, or take --engine local")


def _reach(ray, address: str) -> None:
    if address.startswith("ray://"):
        raise ValueError("--address ray://… is Ray's client for other machines, which kvlab does not speak; start "
                         "kvlab on a node of the cluster, with --address auto or <head>:6379")
    remedy = "start kvlab on a node of a running cluster, with --address auto or <head>:6379"
    try:
        if found := re.fullmatch(r"\[?([^\[\]@]+)\]?:(\d{1,5})", address):
            socket.create_connection((found[1], int(found[2])), timeout=10).close()     # Ray itself takes two minutes
        ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
    except Exception as error:
        ray.shutdown()
        raise ValueError(f"there is no Ray cluster at {shown(address)} ({first_line(error)}); {remedy}") from None


def _hush(quiet: bool = True) -> None:
    """Keep Ray from printing what died, in colour, to the standard output: kvlab says it, to stderr."""
    with contextlib.suppress(ImportError, AttributeError):
        from ray._private import worker
        if quiet:
            worker.kvlab_kept = worker.print_to_stdstream
            worker.print_to_stdstream = lambda *what, **how: None
        else:
            worker.print_to_stdstream = worker.kvlab_kept


def loss(error: Exception) -> tuple[str, str, bool]:
    """(what became of a process that Ray lost, the status of a row that says so, whether it could never start)."""
    kind, text = type(error).__name__, str(error)
    if "OutOfMemory" in kind or "OutOfMemory" in text or "running low on memory" in text:
        return "its node ran out of memory, and Ray ended it", "oom", False
    if "Node" in kind or "Raylet" in kind or "Unschedulable" in kind or "node has died" in text:
        return "the node died or was lost", "failed", False
    if "creation task" in text:
        return "it does not start", "failed", True
    if kind in ("ActorDiedError", "WorkerCrashedError"):
        return "its process was killed or crashed", "failed", False
    if kind == "ActorUnavailableError":
        return "it can no longer be reached", "failed", False
    return f"{kind}: {first_line(error)}", "failed", False


def machines(environments: dict[str, dict]) -> str:
    """A sentence where workers, by their environments, differ in CPU, GPUs or torch; else ""."""
    kinds: dict[tuple, list[str]] = {}
    for worker, found in sorted(environments.items()):
        gpus = sorted({gpu["name"] for gpu in found.get("gpus") or ()})
        kinds.setdefault((found.get("cpu"), ", ".join(gpus), found.get("torch")), []).append(worker)
    if len(kinds) < 2:
        return ""
    return "the cases are of several machines, so compare times of one worker only: " + "; ".join(
        f"{', '.join(workers)} ({', '.join(filter(None, [cpu, gpus, f'torch {torch}']))})"
        for (cpu, gpus, torch), workers in kinds.items())


def shown(address: str) -> str:
    """An address or another text as it may be printed: without users, passwords and tokens."""
    return re.sub(r"\?\S*", "", re.sub(r"[^\s/'\"]+@", "", address))


def first_line(error: BaseException) -> str:
    """What an error says first, bounded."""
    return shown(_lines(error)[0])[:200].rstrip(".")


def last_line(error: BaseException) -> str:
    """What an error of another process says at the end of its traceback, bounded."""
    return _lines(error)[-1][:300].rstrip(".")


def _lines(error: BaseException) -> list[str]:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    return [line.strip() for line in plain.splitlines() if line.strip()] or [type(error).__name__]


def say(text: str) -> None:
    """A line to stderr, above the progress bar."""
    from tqdm import tqdm
    tqdm.write(f"kvlab: {text}", file=sys.stderr)
