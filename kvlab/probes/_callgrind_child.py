"""Run under valgrind: each trial of a comparison once, between client requests, after a call that is not counted."""
from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

from kvlab.probes import _target


def main(file: str) -> int:
    """0 where every trial was run; what went wrong with one is told on stderr and costs that trial alone."""
    case, settings = _target.read(Path(file))
    asked, failures = ctypes.PyDLL(settings["library"]), 0           # PyDLL: the interpreter's lock is kept, and quiet
    import torch
    torch.set_num_threads(1)
    gc.disable()
    with torch.no_grad():
        for case_id, (call, *_) in _target.targets(case):
            try:
                call()
                if asked.region_begin(settings["cache_bytes"]):
                    raise MemoryError("no memory for what fills the cache")
                output = call()
                asked.region_end(f"{case_id} call".encode(), f"{case_id} left".encode())
                del output
            except Exception as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
                failures += 1
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
