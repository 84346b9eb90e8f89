"""A stand-in for a Triton kernel: its launches are not run, and tell which tensors' devices were current."""
from contextlib import contextmanager


def watched_launches(monkeypatch, *kernels) -> list[list]:
    """Replace (module, name) of kernels; each launch adds the list of tensors that torch.cuda.device_of was given."""
    import torch
    current, launched = [], []

    @contextmanager
    def device_of(tensor):
        current.append(tensor)
        yield
        current.pop()

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **constants: launched.append(list(current))
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    for module, name in kernels:
        monkeypatch.setattr(module, name, Kernel())
    return launched
