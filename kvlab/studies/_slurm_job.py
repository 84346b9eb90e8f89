"""What a Slurm job does: it takes one case after another from its runner's board (see `_slurm`) and answers each."""
from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

from kvlab.record.environment import environment
from kvlab.record.export import atomic_write
from kvlab.registry import case_from
from kvlab.studies._run import Job
from kvlab.studies._worker import DIED, TERMINATED, Worker

LAST_S = 3.0                    # in which a job whose worker was killed ends itself, if it does


def take(folder: str) -> None:
    """What a Slurm job does: take a case, run it in a worker, answer, until none is left or the runner has ended."""
    import submitit
    board, job_id = Path(folder), submitit.JobEnvironment().job_id
    job = json.loads((board / "job.json").read_bytes())
    own = board / "taken" / job_id
    own.mkdir(parents=True, exist_ok=True)
    atomic_write(board / "workers" / f"{job_id}.json", json.dumps(environment()).encode())
    how = Job(job["study"], Path(job["artifacts"]), also=tuple(job["also"]))
    worker = Worker(job["patience_s"])
    try:
        for file in _taken(board, own):
            given = json.loads(file.read_bytes())
            rows = worker.rows(how, case_from(given["type"], given["case"]))
            if any(TERMINATED in row["error"] for row in rows):
                return                                  # the job is being cancelled: the case is tried in another
            if any(DIED in row["error"] for row in rows):
                time.sleep(LAST_S)                      # killed with the whole job, it would not answer either
            answer = [{**row, "worker": f"slurm-{job_id}"} for row in rows]
            atomic_write(board / "answers" / file.name, json.dumps(answer).encode())
            file.unlink(missing_ok=True)
    finally:
        worker.close()


def _taken(board: Path, own: Path) -> Iterator[Path]:
    """One case after another that is now this job's, until there is none for a while or the board is taken away."""
    patient = True
    while (board / "job.json").exists():
        found = list((board / "todo").glob("*.json"))
        if not found and not patient:
            return
        if not found:
            time.sleep(LAST_S)                          # until the runner has written more, if it has any
        patient = bool(found)
        for file in found[random.randrange(len(found) or 1):]:      # not all jobs after the same one
            try:
                mine = file.rename(own / file.name)
            except OSError:                             # another job was quicker: look again
                break
            yield mine
            if not (board / "job.json").exists():
                return
