"""What is installed and whether it works: Python, torch, NVIDIA's driver, optional libraries, notebooks, fonts."""
from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from kvlab._child import python, run
from kvlab.doctor._check import Check, Once, deadline
from kvlab.libraries import Library, library
from kvlab.record.environment import environment, load_average
from kvlab.units import display

facts = Once(environment)
_GPU = "an NVIDIA GPU and a CUDA build of torch; how it is installed: docs/formats.md"
# module -> (distribution, what kvlab does with it, what it takes to have it)
OPTIONAL = {
    "flashinfer": ("flashinfer-python", "variant flashinfer", _GPU),
    "triton": ("triton", "compiled kernels", "a CUDA build of torch brings it"),
    **dict.fromkeys(("gguf", "huggingface_hub", "safetensors", "tokenizers"),
                    (None, "models from files", "pip install 'kvlab[models]'")),
    **dict.fromkeys(("jupyterlab", "ipykernel", "ipywidgets", "itables", "papermill"),
                    (None, "notebooks", "pip install 'kvlab[notebook]'")),
    "ray": (None, "kvlab run --engine ray", "pip install 'kvlab[ray]'"),
    "submitit": (None, "kvlab run --engine slurm", "pip install 'kvlab[slurm]'"),
}
SLOW = ("jupyterlab", "papermill", "ray")       # two seconds and more to import
# one process for all that needs torch: to load it twice would take longer than the rest of the diagnosis
_TORCH = """
import torch
cuda = torch.cuda.is_available()
devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
answer(torch=dict(version=torch.__version__, cuda=torch.version.cuda, available=cuda, devices=devices,
                  threads=torch.get_num_threads()))
from kvlab.doctor._metrics import ask
answer(**ask("cuda" if cuda else "cpu"))
"""


def versions() -> Check:
    """Python and kvlab, and the commit where it is a checkout."""
    found = facts()
    commit = f", commit {found['git_commit'][:12]}{' and changes' if found['git_dirty'] else ''}" \
        if found["git_commit"] else ""
    return Check("software", "kvlab", "ok", f"{found['kvlab'] or 'not installed, run from its folder'}{commit}; Python "
                                            f"{found['python']}, {found['platform']}; numpy {found['numpy']}, pandas "
                                            f"{found['pandas']}")


@Once
def torch_child() -> dict:
    """What torch says of itself under "torch", what the probes say (`_metrics.ask`), how the child ended."""
    found, ended = python(_TORCH, timeout_s=deadline.left())
    return {**found, "ended": ended}


def torch() -> Check:
    """torch, and whether it goes with the driver."""
    found = torch_child()
    if "torch" not in found:
        slow = found["ended"].startswith("did not answer")
        status = severity(found["ended"])
        return Check("software", "torch", status, f"{facts()['torch'] or 'not installed'}: loading it {found['ended']}"
                     f"{', and other programs keep the machine busy' if status == 'note' else ''}",
                     "see whether `python -c 'import torch'` ends, with nothing else running" if slow else
                     "install torch again: pip install --force-reinstall torch")
    found = found["torch"]
    build = f"CUDA {found['cuda']}" if found["cuda"] else "CPU"
    where = ", ".join(found["devices"]) or "no CUDA device"
    status, step = "ok", ""
    if facts()["gpus"] and not found["available"]:
        status = "problem"
        step = ("install a CUDA build of torch: the GPU is there and this is a CPU build" if not found["cuda"] else
                f"the driver does not serve CUDA {found['cuda']}: update it, or take an older CUDA build of torch")
    return Check("software", "torch", status, f"{found['version']}, {build} build, {found['threads']} threads; {where}",
                 step)


def severity(ended: str) -> str:
    """What did not answer while other programs keep the machine busy need not be broken."""
    return "note" if "did not answer" in ended and (load_average() or 0) > (os.cpu_count() or 1) else "problem"


def gpus() -> Check:
    """NVIDIA GPUs by the management library."""
    found = facts()
    if not found["gpus"]:
        return Check("software", "NVIDIA GPU", "note", f"none ({found['gpus_note'] or 'NVML lists none'})")
    return Check("software", "NVIDIA GPU", "ok", "; ".join(
        f"{gpu['name']}, {display(gpu['memory_bytes'], 'B')}, driver {gpu['driver']}" for gpu in found["gpus"]))


def pynvml() -> Check:
    """Which distributions bring the module pynvml: the deprecated one of that name hides nvidia-ml-py's."""
    brought = sorted(set(metadata.packages_distributions().get("pynvml", [])))
    old = next((d.version for d in metadata.distributions() if (d.metadata["Name"] or "").lower() == "pynvml"), None)
    if "pynvml" in brought:
        both = "both pynvml and nvidia-ml-py bring" if len(brought) > 1 else "the deprecated package pynvml brings"
        return Check("software", "pynvml", "problem", f"{both} the module pynvml ({old}); which answers is not certain",
                     "pip uninstall pynvml, then pip install --force-reinstall nvidia-ml-py")
    if old is not None:
        return Check("software", "pynvml", "note", f"the deprecated package pynvml {old} is installed beside "
                                                   "nvidia-ml-py; torch warns of it", "pip uninstall pynvml")
    if not brought:
        return Check("software", "pynvml", "problem", "no module pynvml: GPUs cannot be seen",
                     "pip install nvidia-ml-py")
    return Check("software", "pynvml", "ok", f"from {', '.join(brought)}")


def libraries() -> Iterator[Check]:
    """Each optional library, imported in a process of its own."""
    from kvlab.attention.flash_attn import RELEASES
    asked = [(release.module, release.distribution, (release.function,), f"variant flash_attn, version {version}", _GPU)
             for version, release in RELEASES.items()]
    asked += [(module, distribution, (), use, need) for module, (distribution, use, need) in OPTIONAL.items()]
    with ThreadPoolExecutor(max_workers=len(asked)) as pool:        # one that hangs keeps no other from its turn
        for one, (*_, use, need) in zip(pool.map(_library, asked), asked):
            if one.why_not is None:
                yield Check("libraries", one.name, "ok", one.version or "version unknown")
            elif one.why_not.endswith("is not installed"):
                yield Check("libraries", one.name, "note", f"not installed ({use})", f"needs: {need}")
            else:
                yield Check("libraries", one.name, severity(one.why_not),
                            f"{one.version or 'version unknown'}: {one.why_not}", f"mend or uninstall it ({use})")


def _library(asked) -> Library:
    module, distribution, attributes, *_ = asked
    if module in SLOW and importlib.util.find_spec(module) is not None:
        return Library(module, f"{metadata.version(distribution or module)} (installed, not tried)", None)
    return library(module, attributes=attributes, distribution=distribution, timeout_s=deadline.left())


def kernel() -> Check:
    """Whether a notebook's kernel python3 is this environment's Python."""
    if importlib.util.find_spec("jupyter_client") is None:
        return Check("notebooks", "kernel", "note", "Jupyter is not installed in this environment",
                     "for notebooks: pip install 'kvlab[notebook]'")
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel
    try:
        started = KernelSpecManager().get_kernel_spec("python3").argv[0]
    except NoSuchKernel:
        return Check("notebooks", "kernel", "problem", "there is no kernel python3",
                     f"{Path(sys.executable).name} -m pip install ipykernel")
    if started in ("python", "python3", f"python3.{sys.version_info[1]}"):
        return Check("notebooks", "kernel", "ok", "python3 runs in the environment of the Jupyter that starts it")
    if _folder(started) == _folder(sys.executable):
        return Check("notebooks", "kernel", "ok", "python3 is this environment's Python")
    return Check("notebooks", "kernel", "problem", f"python3 is another environment's: {started}",
                 "start notebooks by `kvlab lab`, or: python -m ipykernel install --sys-prefix")


def jupyter() -> Check:
    """Which Jupyter a shell finds: one of another environment runs notebooks without this kvlab."""
    first = shutil.which("jupyter")
    if first is None:
        return Check("notebooks", "jupyter", "note", "no command jupyter on the PATH; `kvlab lab` needs none")
    if _folder(first) in (_folder(sys.executable), os.path.realpath(sysconfig.get_path("scripts"))):
        return Check("notebooks", "jupyter", "ok", "the command jupyter is this environment's")
    return Check("notebooks", "jupyter", "problem", f"the command jupyter is another environment's: {first}",
                 "start notebooks by `kvlab lab`")


def _folder(program: str) -> str:
    """The folder a program lies in; not where links lead, for a virtual environment's python links out of it."""
    return os.path.realpath(os.path.dirname(os.path.abspath(program)))


def chinese() -> Check:
    """Whether a font with Chinese characters is there for figures."""
    if shutil.which("fc-list"):
        ended = run(["fc-list", ":lang=zh", "family"], timeout_s=deadline.left())
        names, how = ended.stdout.splitlines(), ended.how
    else:
        found, how = python("from matplotlib import font_manager as f\n"
                            "answer(names=sorted({e.name for e in f.fontManager.ttflist}))", timeout_s=deadline.left())
        parts = ("CJK", "Hei", "Song", "Han ", "PingFang", "YaHei", "WenQuanYi", "Ming")
        names = [name for name in found.get("names", ()) if any(part in name for part in parts)]
    if how:
        raise OSError(f"asking for fonts {how}")
    names = set(filter(None, names))
    if names:
        return Check("software", "Chinese fonts", "ok", f"{len(names)}: {sorted(names)[0].split(',')[0]}")
    return Check("software", "Chinese fonts", "note", "none: Chinese in a figure shows as boxes",
                 "for Chinese in figures install a font such as Noto Sans CJK")


def encoding() -> Check:
    """Whether kvlab's text can be printed."""
    name = getattr(sys.stdout, "encoding", None) or "unknown"
    try:
        "×≤µ…中".encode(name)
    except (LookupError, UnicodeEncodeError):
        return Check("software", "encoding", "note", f"stdout is {name}: some characters show as ?",
                     "set PYTHONIOENCODING=utf-8, or a UTF-8 locale")
    return Check("software", "encoding", "ok", f"stdout is {name}")
