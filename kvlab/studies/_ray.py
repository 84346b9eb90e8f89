"""Cases on a Ray cluster: one Ray process per place (a GPU, a node, a core), each with a measuring process of its own.

Ray starts the processes (`_ray_node.Hand`), holds each one's CPUs and GPU for it, and says which died. kvlab hands each
a case at a time, so it knows where a case is and since when, and tries it again elsewhere where that place was lost.
Ray's tasks would be less code, but Ray ends a process that had a GPU after each task: torch would be loaded and kernels
tuned for every case anew; and without that, two processes could hold one GPU's memory.
"""
from __future__ import annotations

import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from heapq import nlargest
from itertools import islice
from pathlib import Path
from typing import Any

from kvlab.record.environment import environment
from kvlab.record.export import atomic_write, explained
from kvlab.studies._ray_cluster import Place, connected, disconnect, last_line, loss, machines, places, say
from kvlab.studies._ray_node import LOG, MOST_BYTES, Hand, inside
from kvlab.studies._run import Case, Each, Job, failed_case
from kvlab.studies._worker import apart, message_of
from kvlab.units import display

ATTEMPTS = 3                    # of a case whose process dies under it; of a node to start one
SLOW_S, SLOW_TIMES, FEW = 60.0, 5.0, 3      # what takes longer than both, once a few are finished, is said to be slow


def is_slow(took_s: float, finished: list[float]) -> bool:
    """Whether a case has been at work for longer than 60 s and 5 times the median of those that are finished."""
    return took_s > SLOW_S and len(finished) >= FEW and took_s > SLOW_TIMES * statistics.median(finished)


def ray_each(address: str | None, patience_s: float, met: Callable[[str, dict], None]) -> Each:
    """An `each` that runs cases on the Ray cluster at an address, or on a Ray of this machine that ends with it.

    met: told the id and the environment of each worker. Connects at once; ValueError says why that fails.
    """
    ray, ours = connected(address)

    def each(job: Job, cases: Iterable[Case]) -> Iterator[list[dict]]:
        untimed, alone = apart(cases)
        kinds: dict[str, list[Case]] = {"beside": untimed, "timed": [], "cuda": []}
        for case in alone:
            kinds["cuda" if getattr(case, "device", "cpu").startswith("cuda") else "timed"].append(case)
        crew = _Crew(ray, job, patience_s, met, local=ours and address is None)
        try:
            for kind, some in kinds.items():
                yield from crew.answers(kind, some)
            crew.sum_up()
        finally:
            if ours:
                disconnect(ray)
    return each


@dataclass(eq=False)
class _Task:
    """A case that waits or is being run."""
    case: Case
    tries: int = 0
    died_on: set[str] = field(default_factory=set)          # nodes


@dataclass(eq=False)
class _Member:
    """A Ray process in its place: what it does now, and since when."""
    place: Place
    actor: Any
    doing: Any                                              # Ray's reference of the answer that is due, or None
    name: str = ""                                          # the worker's id, once it has said hello
    task: _Task | None = None
    since: float = field(default_factory=time.monotonic)
    said: bool = False

    @property
    def where(self) -> str:
        return self.name or self.place.node[:6]


class _Crew:
    """The Ray processes of a run."""

    def __init__(self, ray, job: Job, patience_s: float, met: Callable[[str, dict], None], local: bool):
        self.ray, self.job, self.patience_s, self.met = ray, job, patience_s, met
        self.wait_s = 0.0 if local else patience_s          # for a node to join that has what is wanted
        self.here = environment() | ({"git_commit": None} if local else {})
        self.members: list[_Member] = []
        self.environments: dict[str, dict] = {}             # by worker
        self.lost: Counter[str] = Counter()                 # processes by node that died before they said hello
        self.files: dict[str, str] = {}                     # texts of the variants' files by path
        self.took: list[float] = []                         # seconds of the finished cases of this kind
        self.slowest: list[tuple[float, str, str]] = []     # of all: seconds, case, worker
        self.slow = self.waits = False                      # whether it was said that a case is slow, that all wait
        self.logged, self.looked = "", 0.0                  # whose printing the log ends with; the last look at nodes
        self.nowhere: float | None = None                   # since when no process is there

    def answers(self, kind: str, cases: list[Case]) -> Iterator[list[dict]]:
        """The rows of one case after another; what died is run again."""
        waiting = deque(map(_Task, cases))
        threads = max((getattr(case, "threads", 1) for case in cases), default=1)
        self.files = _texts(cases)
        self.looked, self.nowhere, self.took = 0.0, None, []
        try:
            while waiting or any(member.task for member in self.members):
                if time.monotonic() >= self.looked + 1:
                    self.looked = time.monotonic()
                    self._hire(kind, threads, waiting)
                    self._say_slow()
                self._hand_out(waiting)
                member = self._next()
                if member and (rows := self._answer(member, waiting)):
                    yield rows
        finally:
            self._dismiss()

    def _hire(self, kind: str, threads: int, waiting: deque[_Task]) -> None:
        """Start processes in the places that there are now and that have none, as many as there are cases for."""
        taken = {(one.place.node, one.place.number) for one in self.members}
        avoid = waiting[0].died_on if waiting else set()
        free = [place for place in places(self.ray.nodes(), kind, threads)
                if (place.node, place.number) not in taken and self.lost[place.node] < ATTEMPTS]
        free.sort(key=lambda place: (place.node in avoid, place.number))
        # a process for which Ray has found no room within a minute may wait for days: others are started meanwhile
        coming = sum(not one.task and bool(one.name or self.looked - one.since < SLOW_S) for one in self.members)
        for place in free[:max(0, len(waiting) - coming)]:
            actor = self.ray.remote(Hand).options(
                num_cpus=place.cpus, num_gpus=place.gpus, memory=place.memory or None, max_restarts=0,
                max_concurrency=2,                          # so that `end` is heard in the middle of a case
                scheduling_strategy=self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                    place.node, soft=False)).remote(self.patience_s)
            self.members.append(_Member(place, actor, actor.hello.remote(str(Path.cwd()), self.files)))
        ready = any(one.name for one in self.members)
        self.nowhere = None if ready else self.nowhere or self.looked
        if not ready:
            self._nowhere(kind, self.looked - self.nowhere)

    def _nowhere(self, kind: str, for_s: float) -> None:
        """No process is there yet: said once; refused where none is even starting and none will."""
        what = "GPU" if kind == "cuda" else "CPU"
        bad = ", ".join(node[:6] for node, times in self.lost.items() if times >= ATTEMPTS)
        none = f"no node of the Ray cluster has a {what} for kvlab" + (
            f" (its processes do not start on {bad})" if bad else "")
        if not self.members and for_s >= self.wait_s:
            raise ValueError(f"{none}; add a node that has one, or take another --device or --engine local")
        if not self.waits and for_s >= (SLOW_S if self.members else 0):
            self.waits = True
            say(f"waiting: every {what} is taken by other work on the cluster" if self.members else
                f"{none}; waiting {self.wait_s:.0f} s for one")

    def _hand_out(self, waiting: deque[_Task]) -> None:
        """A case to each process that has none, none to a node where it died while others are at work."""
        nodes = {one.place.node for one in self.members if one.name}
        for member in [one for one in self.members if one.name and not one.task]:
            node = member.place.node
            task = next((task for task in islice(waiting, len(self.members) + 1)
                         if node not in task.died_on or nodes <= task.died_on), None)
            if task:
                waiting.remove(task)
                member.task, member.since, member.said, job, case = task, time.monotonic(), False, self.job, task.case
                member.doing = member.actor.rows.remote(message_of(case), case.comparison_id, case.columns(), dict(
                    study=job.study, probes=job.probes, also=job.also), job.artifacts is not None)

    def _next(self) -> _Member | None:
        """A process that has answered or died, if one has within a second."""
        doing = {one.doing: one for one in self.members if one.doing is not None}
        if not doing:
            time.sleep(0.2)
            return None
        done, _ = self.ray.wait(list(doing), timeout=1)
        if not done:
            return None
        member = doing[done[0]]
        self.members.remove(member)                         # to the end, so that each has its turn
        self.members.append(member)
        return member

    def _answer(self, member: _Member, waiting: deque[_Task]) -> list[dict] | None:
        """The rows that came, kept files first; None for a hello, and where the case is tried again."""
        errors, task = self.ray.exceptions, member.task
        try:
            answer = self.ray.get(member.doing)
        except errors.RayTaskError as error:
            raise ValueError(f"kvlab itself failed on node {member.where}: {last_line(error)}; mend that node, then "
                             "go on with --resume") from None
        except errors.RayError as error:
            return self._lost(member, waiting, error)
        member.task = member.doing = None
        if task is None:
            self._welcome(member, answer)
            return None
        took_s, case_id = time.monotonic() - member.since, task.case.comparison_id
        self.took.append(took_s)
        self.slowest = nlargest(3, [*self.slowest, (took_s, case_id, member.name)])
        self._keep(member, case_id, answer)
        return [{**row, "worker": member.name} for row in answer["rows"]]

    def _lost(self, member: _Member, waiting: deque[_Task], error: Exception) -> list[dict] | None:
        """A process died: its case waits again, or after three times is a failed row."""
        self.members.remove(member)
        self.ray.kill(member.actor)                         # one that is only out of reach would keep the place
        task, node = member.task, member.place.node
        why, status, cannot = loss(error)
        if task is None:
            if cannot:
                raise ValueError(f"kvlab does not start on node {member.where}: {last_line(error)}; install kvlab "
                                 f"{self.here['kvlab']} into the Python that Ray runs on there")
            self.lost[node] += 1
            if self.lost[node] == ATTEMPTS:
                say(f"node {node[:6]} is left out: {why}, {ATTEMPTS} times before it could measure")
            return None
        task.tries += 1
        task.died_on.add(node)
        died = f"its Ray worker on node {member.where} died ({why})"
        if task.tries < ATTEMPTS:
            say(f"case {task.case.comparison_id}: {died}; tried again, {task.tries + 1} of {ATTEMPTS}")
            waiting.appendleft(task)
            return None
        say(f"case {task.case.comparison_id}: {died}; given up after {ATTEMPTS} tries")
        return [{**row, "worker": member.name} for row in
                failed_case(task.case, f"{died}, the last of {ATTEMPTS} tries", status)]

    def _welcome(self, member: _Member, hello: dict) -> None:
        """Take in a process that said hello; refused where it runs another kvlab or lacks a variant's file."""
        found, here = hello["environment"], self.here
        other = [f"{what} {str(found.get(name))[:12]}, here {str(here[name])[:12]}"
                 for name, what in (("kvlab", "kvlab"), ("git_commit", "commit"))
                 if found.get(name) != here[name] and (name == "kvlab" or None not in (found.get(name), here[name]))]
        problem = hello["problem"] or other and f"it has {' and '.join(other)}; install the same there"
        if problem:
            raise ValueError(f"node {hello['worker']}: {problem}")
        member.name = hello["worker"]
        self.lost[member.place.node] = 0
        if member.name not in self.environments:
            self.environments[member.name] = found
            self.met(member.name, found)

    def _keep(self, member: _Member, case_id: str, answer: dict) -> None:
        """Write the case's files into the run, before its rows say that they are there."""
        folder = self.job.artifacts
        if folder is None:
            return
        with explained(folder):
            for name, content in answer["files"].items():
                path = inside(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                atomic_write(path, content)
            if answer["log"]:
                with open(folder / LOG, "ab") as log:
                    log.write(b"" if self.logged == member.name else f"== {member.name} ==\n".encode())
                    log.write(answer["log"])
                self.logged = member.name
        for name, size in answer["left_out"].items():
            say(f"case {case_id}: {name} ({display(size, 'B')}) stayed on {member.name}: a case may send "
                f"{display(MOST_BYTES, 'B')}")

    def _say_slow(self) -> None:
        now = time.monotonic()
        for one in self.members:
            if one.task and not one.said and is_slow(now - one.since, self.took):
                one.said = self.slow = True
                say(f"case {one.task.case.comparison_id} has been with {one.name} for {now - one.since:.0f} s; half of "
                    f"those finished took less than {statistics.median(self.took):.1f} s")

    def sum_up(self) -> None:
        """Say at the end what was slow, and whether the cases are of machines that differ."""
        if self.slow:
            say("the slowest cases: " + ", ".join(f"{case_id} {took_s:.0f} s on {name}"
                                                  for took_s, case_id, name in self.slowest))
        if said := machines(self.environments):
            say(said)

    def _dismiss(self) -> None:
        """End all processes, also busy ones, with their measuring processes."""
        if ending := [one.actor.end.remote() for one in self.members if one.name]:
            self.ray.wait(ending, num_returns=len(ending), timeout=5)
        for one in self.members:
            self.ray.kill(one.actor)
        self.members.clear()


def _texts(cases: Iterable[Case]) -> dict[str, str]:
    """The text of each file that holds a variant of the cases, by its path as their references have it."""
    refs: set[str] = set()

    def look(at: Any) -> None:
        if isinstance(at, dict):
            if set(at) == {"ref", "knobs"} and ".py:" in at["ref"]:
                refs.add(at["ref"].rpartition(":")[0])
            at = list(at.values())
        if isinstance(at, list | tuple):
            for one in at:
                look(one)
    for case in cases:
        look(asdict(case))
    return {name: Path(name).read_text(encoding="utf-8") for name in sorted(refs)}
