"""Known operations: what they compute, and that each is a kernel on a GPU."""
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvlab.probes._known import OPERATIONS, Operation

# what torch hands to the driver on a GPU where both sides are contiguous and of one dtype: no kernel runs
DRIVER = ("copy_", "clone", "_to_copy", "zero_", "zeros")


class Noted(TorchDispatchMode):
    """The names of torch's operators that were called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_one_kernel_and_none_of_the_drivers_copies(name):
    call, = Operation(name, 2**16).calls()
    with Noted() as noted:
        call()
    assert len(noted.names) == 1 and not set(noted.names) & set(DRIVER)


def test_the_copy_moves_every_number_once_to_a_buffer_of_its_own():
    call, other = Operation("copy", 2**16).calls(2)
    first, second = call(), other()
    assert first.numel() * 4 == 2**16 and first.data_ptr() != second.data_ptr()
    assert torch.equal(call(), first) and not torch.equal(first, second) and first.abs().sum() > 0
