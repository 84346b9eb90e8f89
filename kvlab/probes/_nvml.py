"""One GPU as NVIDIA's management library sees it: answers as plain values, every refusal as a reason in words."""
from __future__ import annotations

import ctypes
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOT_MEANT = 2**64 - 1                   # what NVML writes where it has no value
# error code of nvml.h -> what it means here and what to do; the others are told in the library's own words
MEANING = {
    1: "NVML was not opened",
    2: "this driver does not know what was asked",
    3: "this GPU does not offer it",
    4: "permission denied: run as root, or in a container with --cap-add=SYS_ADMIN (or --privileged)",
    6: "NVML has nothing new to tell",
    9: "the NVIDIA library is there but its kernel driver is not loaded: load it (nvidia-smi tells more)",
    12: "no NVIDIA driver answers on this machine: it needs an NVIDIA GPU with its driver",
    13: "this driver is too old for it: install a newer one",
    15: "the GPU has fallen off the bus or was lost: its numbers are void; reset it or restart the machine",
    18: "the driver was upgraded under a running kernel module: restart the machine",
    25: "this driver has another layout of the structure: install a matching nvidia-ml-py",
}


class Unavailable(Exception):
    """NVML does not answer; the message is the reason in words, for the note of a missing reading.

    code: NVML's own number of the error; None where the answer itself is no value.
    """

    def __init__(self, words: str, code: int | None = None):
        super().__init__(words)
        self.code = code


class Gpu:
    """A GPU, or the slice of one (MIG), that NVML can be asked about.

    heard: where it is a list, every call and its plain answer are appended to it, so that tests can replay them.
    """

    def __init__(self, nvml, handle, heard: list | None = None):
        self.nvml, self.handle, self.heard = nvml, handle, heard

    def ask(self, function: str, *arguments):
        """Answer of nvml<function>(this GPU, *arguments): a number, text, a dict of a struct, or a list of them.

        Raises Unavailable with the reason where NVML refuses, or the answer is one of its "no value" marks.
        """
        try:
            answer = _plain(self._call(function, self.handle, *arguments))
        except Unavailable as why:
            self._hear(function, arguments, dict(error=why.code))
            raise
        self._hear(function, arguments, dict(answer=answer))
        if answer == NOT_MEANT:
            raise Unavailable("NVML answers that it has no value")
        return answer

    def field(self, number: int):
        """Value of one of NVML's numbered fields (NVML_FI_…); Unavailable as in `ask`."""
        (one,) = self.ask("DeviceGetFieldValues", [number])
        if one["nvmlReturn"]:
            raise Unavailable(_words(one["nvmlReturn"], f"field {number}"), one["nvmlReturn"])
        if one["value"] is None or one["value"] == NOT_MEANT:
            raise Unavailable("NVML answers that it has no value")
        return one["value"]

    def gpm_sample(self):
        """A sample of the GPU's performance counters now (Hopper and newer). Free it with `free`."""
        sample = None
        try:
            sample, slice_of = self._call("GpmSampleAlloc"), self.slice_of
            if slice_of is None:
                self._call("GpmSampleGet", self.handle, sample)
            else:
                self._call("GpmMigSampleGet", *slice_of, sample)
        except Unavailable as why:
            self._hear("GpmSampleGet", (), dict(error=why.code))
            if sample is not None:
                self.free(sample)
            raise
        self._hear("GpmSampleGet", (), dict(answer=None))
        return sample

    def free(self, sample) -> None:
        try:
            self._call("GpmSampleFree", sample)
        except Unavailable:
            pass                                                     # nothing to be done about it, and nothing lost

    def gpm(self, before, after, metrics: dict[str, int]) -> dict[str, float | Unavailable]:
        """Each metric's mean between two samples, or the reason why NVML has none (its own status, or NaN)."""
        asked = self.nvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = self.nvml.NVML_GPM_METRICS_GET_VERSION, len(metrics)
        asked.sample1, asked.sample2 = before, after
        for place, number in enumerate(metrics.values()):
            asked.metrics[place].metricId = number
        try:
            self._call("GpmMetricsGet", asked)
        except Unavailable as why:
            self._hear("GpmMetricsGet", tuple(metrics.values()), dict(error=why.code))
            raise
        told = [(asked.metrics[i].nvmlReturn, asked.metrics[i].value) for i in range(len(metrics))]
        self._hear("GpmMetricsGet", tuple(metrics.values()), dict(answer=told))
        return {name: _gpm_value(*one) for name, one in zip(metrics, told)}

    @property
    def slice_of(self):
        """(handle of the whole GPU, number of the GPU instance) of a MIG slice; None of a whole GPU."""
        try:
            if not self.ask("DeviceIsMigDeviceHandle"):
                return None
            return (self._call("DeviceGetDeviceHandleFromMigDeviceHandle", self.handle),
                    self.ask("DeviceGetGpuInstanceId"))
        except Unavailable:
            return None

    @property
    def whole(self) -> Gpu:
        """The GPU that a slice is of: clocks, bus width and power belong to it."""
        slice_of = self.slice_of
        return self if slice_of is None else Gpu(self.nvml, slice_of[0], self.heard)

    def _call(self, function: str, *arguments):
        call, old = getattr(self.nvml, f"nvml{function}", None), self.nvml.NVML_ERROR_FUNCTION_NOT_FOUND
        if call is None:
            raise Unavailable(f"the installed nvidia-ml-py has no {function}: install a newer one", old)
        try:
            return call(*arguments)
        except self.nvml.NVMLError as error:
            raise Unavailable(reason(error), error.value) from None
        except getattr(self.nvml, "NVMLLibraryMismatchError", ()):   # what some calls make of a missing function
            raise Unavailable(_words(old, function), old) from None

    def _hear(self, function, arguments, outcome: dict) -> None:
        if self.heard is not None:
            self.heard.append(dict(call=function, arguments=_plain(arguments), at=time.monotonic(), **outcome))


def _gpm_value(status: int, value: float) -> float | Unavailable:
    if status:
        return Unavailable(_words(status, "GPM metric"))
    if not math.isfinite(value):
        return Unavailable("NVML gave no number (NaN): nothing was counted in this window")
    return value


@contextmanager
def gpu(device: str, heard: list | None = None) -> Iterator[Gpu]:
    """NVML open on the GPU behind torch's device; Unavailable with the reason where there is no library or no such GPU.

    By UUID, then by PCI address: NVML's own numbers count GPUs that CUDA_VISIBLE_DEVICES hides.
    """
    with opened() as nvml:
        yield Gpu(nvml, _handle(nvml, device), heard)


@contextmanager
def opened() -> Iterator:
    """The pynvml module between nvmlInit and nvmlShutdown; Unavailable with the reason where it does not open."""
    try:
        import pynvml
    except ImportError:
        raise Unavailable("the package nvidia-ml-py is not installed") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise Unavailable(reason(error), error.value) from None
    try:
        yield pynvml
    finally:
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            pass                                                     # a GPU that was lost takes the library with it


def why_closed() -> str | None:
    """Why NVML does not answer at all on this machine; None where it does."""
    try:
        with opened():
            return None
    except Unavailable as why:
        return str(why)


def _handle(nvml, device: str):
    import torch
    known = torch.cuda.get_device_properties(device)
    uuid = str(known.uuid)
    named = [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]
    tries = [(nvml.nvmlDeviceGetHandleByUUID, one) for one in named]
    if hasattr(known, "pci_bus_id"):
        tries.append((nvml.nvmlDeviceGetHandleByPciBusId,
                      f"{known.pci_domain_id:08x}:{known.pci_bus_id:02x}:{known.pci_device_id:02x}.0"))
    for find, name in tries:
        try:
            return find(name.encode())
        except nvml.NVMLError as error:
            last = error
    raise Unavailable(f"NVML does not know torch's {device}: {reason(last)}")


def reason(error) -> str:
    """An NVMLError in words: its name, what it means here, what to do."""
    return _words(error.value, str(error))


def _words(code: int, said: str) -> str:
    import pynvml
    names = {getattr(pynvml, n): n.removeprefix("NVML_ERROR_") for n in dir(pynvml) if n.startswith("NVML_ERROR_")}
    name = "".join(part.capitalize() for part in names.get(code, f"error {code}").split("_"))
    return f"{name}: {MEANING.get(code, said)}"


def _plain(value):
    """Structs as dicts, arrays as lists, bytes as text; pointers and handles are left out as None."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, list | tuple | ctypes.Array):
        return [_plain(one) for one in value]
    if isinstance(value, ctypes._SimpleCData):
        return value.value
    if hasattr(value, "usedGpuMemory"):                              # a process, which pynvml makes an own object of
        return dict(pid=value.pid, bytes=value.usedGpuMemory)
    if isinstance(value, ctypes.Structure):
        if hasattr(value, "valueType"):                              # a field value or a sample: a union by type
            return _typed(value)
        return {name: _plain(getattr(value, name)) for name, *_ in value._fields_}
    return value if isinstance(value, int | float | str | bool | None) else None


def _typed(value) -> dict:
    """A field value as a dict, its union read by its type."""
    member = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}.get(value.valueType)
    number = None if member is None else getattr(value.value, member, None)
    return dict(fieldId=value.fieldId, nvmlReturn=value.nvmlReturn, value=number, timestamp=value.timestamp)


class Replayed(Gpu):
    """A GPU that answers from a recording: each call gets the next recorded answer of the same call and arguments.

    For tests only: nothing that measures makes one.
    """

    def __init__(self, recording: list[dict]):
        import pynvml
        super().__init__(pynvml, None)
        self.left = list(recording)

    @classmethod
    def of(cls, path: Path) -> Replayed:
        return cls(json.loads(path.read_text()))

    def ask(self, function: str, *arguments):
        answer = self._next(function, _plain(arguments))
        if answer == NOT_MEANT:
            raise Unavailable("NVML answers that it has no value")
        return answer

    def gpm_sample(self):
        return self._next("GpmSampleGet", [])

    def free(self, sample) -> None:
        pass

    def gpm(self, before, after, metrics):
        told = self._next("GpmMetricsGet", list(metrics.values()))
        return {name: _gpm_value(*one) for name, one in zip(metrics, told)}

    @property
    def slice_of(self):
        return None

    def _next(self, function, arguments):
        for place, one in enumerate(self.left):
            if one["call"] == function and one["arguments"] == arguments:
                # the last answer of its kind stays, so that a reader may ask more often than the recorder did
                again = any(o["call"] == function and o["arguments"] == one["arguments"]
                            for o in self.left[place + 1:])
                if again:
                    self.left.pop(place)
                if "error" in one:
                    raise Unavailable(_words(one["error"], "recorded"), one["error"])
                return one["answer"]
        raise Unavailable(f"the recording holds no answer of {function}{tuple(arguments)}")
