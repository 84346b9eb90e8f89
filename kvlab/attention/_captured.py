"""q, K and V that a model really computed, as a trial's data: which tokens an input copy takes, and what does not fit.

Legend: B = sequence, T = query token, S = kv token, Q = query head, K = kv head, D = head_dim, E = v_head_dim.
"""
from __future__ import annotations

import math
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.attention import _captured_file as files

if TYPE_CHECKING:
    from torch import Tensor

    from kvlab.attention._base import Trial

DRAWN = ("gaussian", "outlier")
_KEPT: dict[tuple, str] = {}    # (path, size, time of change) of a person's file -> its name as data
ALLOWED = ("gaussian, outlier, file:<the 64 hex digits of a captured file's SHA-256> (kvlab.capture makes one; "
           "kvlab.trial and kvlab.measure also take the file's path)")


def is_file(data: str) -> bool:
    """Whether this is the name of captured tensors, be they here or not."""
    return isinstance(data, str) and re.fullmatch(r"file:[0-9a-f]{64}", data) is not None


def named(data: str | Path) -> str:
    """A trial's data from what a person gives: its name as it is, or the path of a file, which is kept for later runs.

    A path's file is copied into the cache folder under its hash, once per process and change of the file. ValueError
    where it holds no captured tensors.
    """
    if not isinstance(data, str | os.PathLike) or data in DRAWN or str(data).startswith("file:"):
        return data                                                 # a Trial says what is wrong with it
    path = Path(data).expanduser()
    if not path.is_file():
        raise ValueError(f"data={str(data)!r}; allowed: {ALLOWED}; there is no such file here")
    stat = path.stat()
    version = path.resolve(), stat.st_size, stat.st_mtime_ns
    try:
        files.facts_of(_KEPT[version])
    except (KeyError, ValueError):                                  # new, or its copy was lost or damaged meanwhile
        _KEPT[version] = _keep(path)
    return _KEPT[version]


def _keep(path: Path) -> str:
    with files.new_file() as fresh:
        shutil.copyfile(path, fresh)
        try:
            files.read(fresh)
        except ValueError as error:
            raise ValueError(f"{path} {error}") from None
        return files.keep(fresh)[0]


def why_not(trial: Trial) -> str | None:
    """Why this trial cannot take its captured tensors, in one sentence; None too where its data is drawn."""
    if not is_file(trial.data):
        return None
    import torch
    try:
        facts = files.facts_of(trial.data)
    except ValueError as error:
        return str(error)
    s, longest = trial.workload.shape, max(trial.workload.kv_lens)
    if s.v_in_k:
        return "captured tensors hold K and V apart, and in this shape V is a view of K (v_in_k)"
    for name, wanted in (("num_q_heads", s.num_q_heads), ("num_kv_heads", s.num_kv_heads), ("head_dim", s.head_dim),
                         ("v_head_dim", s.v_dim)):
        if (there := getattr(facts, name)) != wanted:
            return f"the captured tensors have {name}={there}, and the workload's shape {name}={wanted}"
    for name in ("window", "softcap"):
        if name in facts.about and facts.about[name] != getattr(s, name):
            return (f"the captured layer has {name}={facts.about[name]!r:.40}, and the workload's shape "
                    f"{name}={getattr(s, name)}: its attention would not be the model's")
    if longest > facts.tokens:
        return f"kv_len={longest}, and {facts.tokens} tokens were captured; take fewer, or capture a longer text"
    if trial.format.static and not facts.calibrates:
        return (f"{trial.kv_format} needs a calibration pass over another text, which these captured tensors do not "
                "hold; capture them with calibration=TEXT")
    limit = torch.finfo(trial.torch_dtype).max
    for name, largest in zip("qkv", facts.largest):
        if largest > limit:
            return f"the captured {name} reaches {largest:.3g}, which dtype {trial.dtype} cannot hold"
    return None


def originals(trial: Trial, seed: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """q of the batch, and k, v of each sequence, from the trial's file, in its dtype and on its device.

    A sequence is kv_len neighbouring tokens; its q are those of the last q_len of them. With seed 0 the first one
    begins at the text's first token, so that its attention is exactly what the model computed; others begin elsewhere
    and see only the tokens from there on, without the first one, to which many models give much weight. Behind a
    shared prefix a sequence goes on with its own tokens.
    """
    import torch
    w = trial.workload
    tokens = files.facts_of(trial.data).tokens
    starts = [start(seed * w.batch_size + b, tokens - n) for b, n in enumerate(w.kv_lens)]
    with files.opened(files.place(trial.data)) as file:
        q, k, v = (_reader(file, name, trial) for name in "qkv")
        q_TQD = torch.cat([q(at + n - q_len, at + n) for at, n, q_len in zip(starts, w.kv_lens, w.q_lens)])
        k_all, v_all = ([x(at, at + n) for at, n in zip(starts, w.kv_lens)] for x in (k, v))
    for side in (k_all, v_all):
        for x_SKW in side[1:]:
            x_SKW[:w.shared_prefix] = side[0][:w.shared_prefix]
    return q_TQD, k_all, v_all


def calibration(trial: Trial) -> tuple[Tensor, Tensor]:
    """(k_SKD, v_SKE) of the file's other text, its first token included: that one alone may set a channel's range."""
    files.facts_of(trial.data)
    with files.opened(files.place(trial.data)) as file:
        return tuple(_reader(file, name, trial)(0, files.CALIBRATION_TOKENS) for name in files.CALIBRATION)


def repeats(trial: Trial) -> str:
    """For a row's note: that sequences or input copies hold the same tokens, since the capture is too short; or ""."""
    if not is_file(trial.data):
        return ""
    tokens, w = files.facts_of(trial.data).tokens, trial.workload
    places = tokens - max(w.kv_lens) + 1
    if places > 1 and places >= w.batch_size:
        return ""
    return (f"; the capture's {tokens} tokens have {places} place{'s' if places > 1 else ''} for a sequence of "
            f"{max(w.kv_lens)}: sequences and input copies hold the same tokens")


def start(index: int, room: int) -> int:
    """Where the index-th sequence begins, of room + 1 places: 0 first, all places once before any comes again.

    Steps of the golden section's share of the places keep neighbours in the count far apart in the text.
    """
    places = room + 1
    step = next(s for s in range(max(1, round(places * 0.618)), places + 1) if math.gcd(s, places) == 1)
    return index * step % places


def _reader(file, name: str, trial: Trial):
    """Rows from … to of one of the file's tensors, as a tensor of the trial's own."""
    part = file.get_slice(name)
    def rows(begin, end):           # copied: slices of one memory-mapped file may be views of the same memory
        return part[begin:end].to(device=trial.device, dtype=trial.torch_dtype, copy=True)
    return rows
