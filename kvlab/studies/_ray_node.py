"""What runs on a node of a Ray cluster: one Ray process per place, which loads no torch and measures nothing itself.

It keeps a `_worker.Worker`, so that a variant that crashes, hangs or eats memory costs its own rows as it does on one
machine; the worker ends with it. What it answers is plain: dicts, text and bytes.
"""
from __future__ import annotations

import os
import tempfile
from pathlib import Path, PurePosixPath

from kvlab.folders import remove
from kvlab.record.environment import environment
from kvlab.studies._run import Job
from kvlab.studies._worker import Told, Worker
from kvlab.units import MiB, display

MOST_BYTES = 256 * MiB          # of files that one case may send to the runner
LOG = "worker.log"


class Hand:
    """A place's measuring process, for as long as the run needs the place."""

    def __init__(self, patience_s: float):
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")    # so that CUDA counts GPUs as Ray and NVML do
        self.worker, self.folder = Worker(patience_s), Path(tempfile.mkdtemp(prefix="kvlab-ray-"))

    def hello(self, folder: str, files: dict[str, str]) -> dict:
        """Go to where references to files resolve, and say which worker this is, where, and what is wrong with it.

        folder: the runner's current one. files: texts of the variants' files by their paths from there.
        """
        import ray
        context = ray.get_runtime_context()
        gpus = [str(one) for one in context.get_accelerator_ids().get("GPU", [])]
        found = environment()
        if shown := [found["gpus"][int(one)] for one in gpus if one.isdigit() and int(one) < len(found["gpus"])]:
            found["gpus"] = shown
        return dict(worker=context.get_node_id()[:6] + "".join(f"/gpu{one}" for one in gpus), environment=found,
                    problem=settled(Path(folder), files, self.folder / "files"))

    def rows(self, message: dict, comparison_id: str, columns: dict, job: dict, keep: bool) -> dict:
        """The rows of a case, the files that it left (by path, below `MOST_BYTES`), and what it printed.

        message, columns: as `_worker.message_of` and the case say. job: fields of a Job. keep: whether there is a run
        to keep files for.
        """
        made = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            for name in ("samples", "traces") if keep else ():
                (made / name).mkdir()
            rows = self.worker.rows(Job(**job, artifacts=made if keep else None), Told(message, comparison_id, columns))
            files, left_out = gathered(made, MOST_BYTES)
            return dict(rows=without(rows, left_out), files=files, log=printed(made / LOG), left_out=left_out)
        finally:
            remove(made)

    def end(self) -> None:
        """End the measuring process, also in the middle of a case, and leave nothing behind."""
        self.worker.close()
        os.chdir("/")
        remove(self.folder)


def settled(folder: Path, files: dict[str, str], own: Path) -> str:
    """Make the folder in which references resolve the current one; what hinders it, in one sentence, or "".

    It is the runner's where this node has it with the same files, else one of the place's own with their texts. A file
    outside the runner's folder must be on the node.
    """
    inside = {name: text for name, text in files.items() if is_below(name)}
    if not (folder.is_dir() and all(_text(folder / name) == text for name, text in inside.items())):
        folder = own
        for name, text in inside.items():
            (own / name).parent.mkdir(parents=True, exist_ok=True)
            (own / name).write_text(text, encoding="utf-8")
        own.mkdir(exist_ok=True)
    os.chdir(folder)
    other = [name for name, text in files.items() if name not in inside and _text(folder / name) != text]
    return other and (f"it has not the same {PurePosixPath(other[0]).name}, which lies outside the folder that kvlab "
                      "was started in; put it below that folder, or at the same place on every node") or ""


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def is_below(name: str) -> bool:
    """Whether a path, as any system writes it, leads to something below the folder that it starts from."""
    parts = name.replace("\\", "/").split("/")
    return bool(name) and "\0" not in name and ":" not in name and not {"", ".", ".."} & set(parts)


def inside(folder: Path, name: str) -> Path:
    """Where the runner puts a case's file: in a folder of the run, beside none of its own files; else ValueError."""
    if not is_below(name) or "/" not in name:
        raise ValueError(f"a worker sent a file {name!r}, which lies in no folder of the run: what that node sends "
                         "cannot be trusted")
    return folder / name


def gathered(folder: Path, most_bytes: int) -> tuple[dict[str, bytes], dict[str, int]]:
    """(content of the files in the folder's subfolders, sizes of those left out), by path; small ones first."""
    files: dict[str, bytes] = {}
    left_out: dict[str, int] = {}
    found = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink() and path.parent != folder]
    for path in sorted(found, key=lambda path: (path.stat().st_size, path)):
        name, size = path.relative_to(folder).as_posix(), path.stat().st_size
        if size > most_bytes:
            left_out[name] = size
        else:
            files[name] = path.read_bytes()
            most_bytes -= size
    return files, left_out


def printed(log: Path) -> bytes:
    """What a case printed; of more than a MiB the last."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - MiB))
            return file.read()
    except FileNotFoundError:
        return b""


def without(rows: list[dict], left_out: dict[str, int]) -> list[dict]:
    """The rows, none of which names a file that was left out: their notes say so."""
    return [row if row.get("artifact") not in left_out else {**row, "artifact": "", "note": "; ".join(filter(None, [
        row.get("note"), f"its file of {display(left_out[row['artifact']], 'B')} stayed behind: a case may send "
        f"{display(MOST_BYTES, 'B')}"]))} for row in rows]
