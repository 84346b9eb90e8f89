"""What runs under Nsight Compute: each trial of a case once, after the timer's own flush, in a range of its name.

Its standard output is a line of JSON as each trial begins and ends, so that a crash can be laid at one's door.
"""
from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from kvlab.attention import Comparison
from kvlab.attention._base import no_device
from kvlab.kernels.flush import Flush
from kvlab.probes._target import read, targets


def main(path: str) -> None:
    """Run the case of that file, and last of all one kernel by which a table that is whole is known."""
    import torch
    case, _ = read(Path(path))
    if why := no_device(case.device):
        raise SystemExit(f"under ncu {why}")
    # a comparison of its own for each trial, so that one whose inputs or planning fail costs no other
    alone = [Comparison((trial,)) for trial in case.trials] if isinstance(case, Comparison) else [case]
    with torch.no_grad(), torch.cuda.device(case.device):
        flush = Flush(case.device)
        for one in alone:
            case_id = one.trials[0].case_id if isinstance(one, Comparison) else one.case_id
            _say(began=case_id)
            try:
                for _, calls in targets(one):
                    _count(calls[0], flush, case_id)
            except (Exception, SystemExit) as error:
                _say(failed=case_id, error=f"{type(error).__name__}: {error}"[:500])
                try:
                    torch.cuda.synchronize()
                except Exception:                                    # a CUDA error that sticks: no other can run
                    os._exit(1)
            else:
                _say(done=case_id)
        with torch.cuda.profiler.profile():
            torch.cuda._sleep(1)
            torch.cuda.synchronize()


def _count(call, flush, case_id: str) -> None:
    """One call as the timer makes it. The flush comes before the profiler: its kernel is none of the call's."""
    import torch
    call()                                                           # libraries load and choose at a first call
    torch.cuda.synchronize()
    flush()
    torch.cuda.synchronize()
    with torch.cuda.profiler.profile(), torch.cuda.nvtx.range(f"kvlab-{case_id}"):
        call()
        torch.cuda.synchronize()


def _say(**told: str) -> None:
    print("\n" + json.dumps(told), flush=True)                       # what a variant printed may lack its line's end


if __name__ == "__main__":
    main(sys.argv[1])
