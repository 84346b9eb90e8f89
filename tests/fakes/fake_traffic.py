"""Calls of operations and trials that tell the fake NVML the bytes they move by their formula. Tests only."""
import time
from contextlib import contextmanager
from unittest import mock

from kvlab.attention import Trial
from kvlab.probes._base import room_on
from kvlab.probes._known import Operation
from kvlab.probes._traffic import model_of

CALL_S = 0.01                   # a call, by virtual_time


@contextmanager
def told(fake, factor=None):
    """Every call of an Operation or a Trial tells the fake its bytes, times factor[name] where there is one.

    It takes CALL_S by the clock of virtual_time, under which this must run.
    """
    factor = factor or {}

    def counting(case, name, calls):
        cost = model_of(case, room_on(case.device)[1])
        nbytes = (cost.read_bytes + cost.write_bytes) * factor.get(name, 1.0)

        def one(call):
            def run():
                output = call()
                time.sleep(CALL_S)
                fake.traffic(nbytes)
                return output
            return run
        return [one(call) for call in calls]

    calls, prepare = Operation.calls, Trial.prepare
    with mock.patch.object(Operation, "calls", lambda op, n=1: counting(op, op.name, calls(op, n))), \
            mock.patch.object(Trial, "prepare", lambda t, inputs: counting(t, t.variant.label, prepare(t, inputs))):
        yield
