"""Variants that crash, hang, exit or eat memory cost their own rows: real worker processes, real faults."""
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import psutil
import pytest

from kvlab.attention import Comparison, VariantRef, trial
from kvlab.kv.cache import Layout
from kvlab.record.reading import table
from kvlab.shapes import AttentionShape, Workload
from kvlab.studies._run import Job
from kvlab.studies._worker import DIED, Worker, _at_once, _cause_of_death, apart, case_from, worker_each
from kvlab.studies.memory_wall import Decomposition
from kvlab.units import GiB

WORKLOAD = Workload.decode(AttentionShape(4, 2, 16), kv_len=32)
HEAD = """
import os, signal, sys, time
from kvlab.attention import least_cost
from kvlab.attention.naive import Naive

class Base:
    name = "user"
    def why_not(self, trial):
        return None
    def prepare(self, trial, inputs):
        honest = Naive().prepare(trial, inputs)
        return lambda: self.call(honest)
    def cost(self, trial, cache_bytes=0):
        return least_cost(trial)
"""
PIPES = """
import subprocess

def pipes():
    return [n for n in map(int, os.listdir('/proc/self/fd'))
            if os.path.exists(f'/proc/self/fd/{n}') and os.readlink(f'/proc/self/fd/{n}').startswith('pipe:')]
"""
PARENT = """
import json, sys
from kvlab.registry import case_from
from kvlab.studies._run import Job
from kvlab.studies._worker import Worker
case = case_from("kvlab.attention._base:Comparison", json.loads(sys.argv[1]))
Worker(300.0).rows(Job(probes=("kernel_error",)), case)
"""
FAULTS = {
    "Honest": ("return honest()", "ok", ""),
    "Wrong": ("return honest() * 2", "failed", "exceeds the tolerance"),
    "Raises": ("raise RuntimeError('no')", "failed", "RuntimeError: no"),
    "Prints": ("print('{\"rows\": []}'); sys.stdout.flush(); os.write(1, b'\\nnoise\\n'); return honest()", "ok", ""),
    "Asks": ("return input()", "failed", "EOFError"),
    "Exits": ("sys.exit('enough')", "failed", "SystemExit: enough"),
    "Vanishes": ("os._exit(3)", "failed", f"{DIED}: it was ended with exit code 3 in kernel_error"),
    "Killed": ("os.kill(os.getpid(), signal.SIGKILL)", "oom",
               f"{DIED}: it was killed (SIGKILL: out of memory, or by hand)"),
    "Crashes": ("os.kill(os.getpid(), signal.SIGSEGV)", "failed", f"{DIED}: it crashed with signal SIGSEGV"),
}
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and exit codes of POSIX")


def write(folder, faults, name="faults.py"):
    file = folder / name
    file.write_text(HEAD + "".join(f"\nclass {name}(Base):\n    def call(self, honest):\n        {line}\n"
                                   for name, line in faults.items()))
    return file


def compare(*refs, **options):
    return Comparison(tuple(trial(ref, WORKLOAD, **options) for ref in refs))


def status_of(rows):
    return {r["variant"]: (r["status"], r["error"]) for r in rows if r["metric"] == "kernel_error"}


@pytest.fixture(scope="module")
def faulty_run(tmp_path_factory):
    """One sweep of two comparisons, the first with every fault at once; where a process must die it starts anew."""
    folder = tmp_path_factory.mktemp("faults")
    file = write(folder, {name: line for name, (line, _, _) in FAULTS.items()})
    (folder / "broken.py").write_text("raise ImportError('a module that is not there')\nclass Mine: pass\n")
    bad = compare(*(f"{file}:{name}" for name in FAULTS), f"{folder / 'broken.py'}:Mine", "naive")
    good = compare("naive", "sdpa")
    answers = list(worker_each(200.0)(Job(probes=("kernel_error", "roofline")), [bad, good]))
    return (bad, good), answers


def test_each_fault_has_its_own_rows(faulty_run):
    found = status_of(faulty_run[1][0])
    for name, (_, status, sentence) in FAULTS.items():
        assert found[name][0] == status and sentence in found[name][1], (name, found[name])
    assert found["Mine"] == ("failed", "ImportError: a module that is not there")


def test_the_others_of_the_comparison_keep_their_rows(faulty_run):
    rows = faulty_run[1][0]
    for name in ("Honest", "Prints", "naive"):
        own = [r for r in rows if r["variant"] == name]
        assert {r["status"] for r in own} == {"ok"} and {"kernel_error", "ideal_bytes"} <= {r["metric"] for r in own}


def test_every_trial_has_every_metric_and_the_whole_comparisons_id(faulty_run):
    (bad, _), (rows, _) = faulty_run
    table(rows)
    assert {r["comparison_id"] for r in rows} == {bad.comparison_id}
    metrics = {v: sorted(r["metric"] for r in rows if r["variant"] == v) for v in status_of(rows)}
    assert len(metrics) == len(FAULTS) + 2 and len({tuple(m) for m in metrics.values()}) == 1
    assert {r["case_id"] for r in rows} == {t.case_id for t in bad.trials}


def test_the_sweep_goes_on_in_a_new_worker(faulty_run):
    (_, good), (_, rows) = faulty_run
    assert {r["status"] for r in rows} == {"ok"} and {r["comparison_id"] for r in rows} == {good.comparison_id}


def test_one_that_hangs_is_stopped_and_one_that_floods_the_output_too(tmp_path):
    file = write(tmp_path, {"Sleeps": "time.sleep(3600)",
                            "Floods": "\n        while True:\n            print('flood' * 20, flush=True); "
                                      "time.sleep(0.01)"})
    worker = Worker(patience_s=8.0)
    rows = worker.rows(Job(probes=("kernel_error",)), compare(f"{file}:Sleeps", f"{file}:Floods", "naive"))
    found = status_of(rows)
    worker.close()
    for name in ("Sleeps", "Floods"):
        assert found[name] == ("failed", f"{DIED}: no sign of life for 8 s, so it was stopped in kernel_error")
    assert found["naive"][0] == "ok" and worker.process.poll() is not None


def scripted(monkeypatch, *answers):
    """A worker whose conversation is written down: what each `_ask` gives back."""
    worker, asked, answers = Worker(1.0), [], iter(answers)
    monkeypatch.setattr(worker, "_ask", lambda job, case, failures: asked.append(dict(failures)) or next(answers))
    return worker, asked


def test_a_trial_that_brings_the_worker_down_is_left_out_the_next_time(monkeypatch):
    worker, asked = scripted(monkeypatch, (("a", "timer"), {"died": ("oom", "killed")}),
                             (("b", "timer"), {"died": ("failed", "crashed")}), (("c", "timer"), {"rows": [1]}))
    assert worker.rows(Job(), compare("naive")) == [1]
    assert asked == [{}, {"a": ("oom", "killed in timer")},
                     {"a": ("oom", "killed in timer"), "b": ("failed", "crashed in timer")}]


@pytest.mark.parametrize("last", [None, ("", "ceilings")])
def test_a_death_in_kvlabs_own_code_is_laid_at_no_trials_door(monkeypatch, last):
    worker, asked = scripted(monkeypatch, (last, {"died": ("oom", "killed")}))
    case = compare("naive")
    (row,) = worker.rows(Job(), case)
    assert (row["metric"], row["status"], row["error"]) == ("case", "oom", "killed") and asked == [{}]
    assert row["comparison_id"] == row["case_id"] == case.comparison_id and row["scope"] == "comparison"
    table([row])


def test_a_trial_blamed_twice_ends_the_case(monkeypatch):
    again = (("a", "memory"), {"died": ("failed", "crashed")})
    worker, _ = scripted(monkeypatch, again, again)
    assert [r["metric"] for r in worker.rows(Job(), compare("naive"))] == ["case"]


@pytest.mark.parametrize("code, status, what", [
    (-9, "oom", "SIGKILL"), (-11, "failed", "SIGSEGV"), (3, "failed", "exit code 3"), (0, "failed", "exit code 0")])
def test_exit_codes_in_words(code, status, what):
    assert _cause_of_death(code)[0] == status and what in _cause_of_death(code)[1]
    assert _cause_of_death(code)[1].startswith(f"{DIED}: ") and DIED == "the worker process died"


@pytest.mark.parametrize("kind", ["os:system", "subprocess:Popen", "kvlab_user_x:Mine", "kvlabx.a:B"])
def test_only_kvlabs_own_cases_are_made_from_a_message(kind):
    with pytest.raises(ValueError, match="kvlab's own classes"):
        case_from(kind, {})


@pytest.mark.parametrize("case", [
    Decomposition("Qwen/Qwen2-72B", 128),
    compare("naive", "sdpa"),
    Comparison((trial(VariantRef("paged", (("a", True), ("b", 1), ("c", 1.0), ("d", None), ("e", "x"))), WORKLOAD,
                      layout=Layout()),
                trial("naive", WORKLOAD, kv_format="int8/block16", replica=1)))])
def test_a_case_survives_the_message_unchanged(case):
    kind = type(case)
    again = case_from(f"{kind.__module__}:{kind.__qualname__}", json.loads(json.dumps(asdict(case))))
    assert again == case and again.comparison_id == case.comparison_id


def talk(*lines):
    """What a worker answers to these lines, and its exit code once its input ended."""
    root = str(Path(__file__).parents[2])
    worker = subprocess.Popen([sys.executable, "-m", "kvlab.studies._worker"], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(
                                  [root, os.environ.get("PYTHONPATH", "")])})
    worker.stdin.write("".join(line + "\n" for line in lines))
    worker.stdin.flush()
    answers = []
    while sum("rows" in answer for answer in answers) < len(lines):
        answers.append(json.loads(worker.stdout.readline()))
    worker.stdin.close()
    worker.stdout.close()
    return answers, worker.wait(timeout=30)


def test_a_case_that_raises_is_one_failed_row_and_the_next_is_answered(tmp_path):
    def message(case, **more):
        return json.dumps(dict(study="memory_wall", artifacts=str(tmp_path), probes=None, failures={},
                               type=f"{type(case).__module__}:{type(case).__qualname__}", case=asdict(case), **more))
    answers, code = talk(message(Decomposition("no such model", 128)), message(Decomposition("Qwen/Qwen2-72B", 128)))
    assert code == 0
    ready, failed, fine = answers
    assert ready == {"ready": True}
    assert failed["rows"][0]["status"] == "failed" and "no such model" in failed["rows"][0]["error"]
    assert {r["metric"] for r in fine["rows"]} == {"weight_bytes", "kv_bytes", "crossover_tokens", "kv_to_weights"}


def test_a_worker_ends_with_its_parent_in_the_middle_of_a_case_with_what_it_started(tmp_path):
    file = write(tmp_path, {"Waits": "import subprocess; one = subprocess.Popen(['sleep', '600']); "
                                     f"open({str(tmp_path / 'pid')!r}, 'w').write(str(one.pid)); time.sleep(600)"})
    comparison = compare(f"{file}:Waits")
    parent = subprocess.Popen([sys.executable, "-c", PARENT, json.dumps(asdict(comparison))], text=True,
                              stdin=subprocess.DEVNULL)
    for _ in range(600):
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            break
        time.sleep(0.1)
    started = psutil.Process(int((tmp_path / "pid").read_text()))
    worker = started.parent()
    parent.kill()
    parent.wait()
    gone, alive = psutil.wait_procs([started, worker], timeout=10)
    assert not alive and len(gone) == 2


def test_sending_to_a_worker_that_just_died_is_no_error():
    worker = Worker(1.0)

    def gone(text):
        raise BrokenPipeError
    worker.process = SimpleNamespace(stdin=SimpleNamespace(write=gone))
    worker._send({"case": 1})


def test_a_worker_that_does_not_end_by_itself_is_killed_with_all_that_it_started(monkeypatch):
    ended = []

    def wait(timeout=None):
        if timeout:
            raise subprocess.TimeoutExpired("worker", timeout)
        ended.append("waited")
    worker = Worker(1.0)
    worker.process = SimpleNamespace(poll=lambda: None, stdin=SimpleNamespace(close=lambda: None), wait=wait, pid=77)
    monkeypatch.setattr(os, "killpg", lambda group, how: ended.append((group, how)))
    worker.close()
    assert ended == [(77, signal.SIGKILL), "waited"]
    Worker(1.0).close()                                              # one that was never started


def gone(pid):
    """Whether the process ends within a few seconds; a zombie that nobody waits for has ended."""
    for _ in range(200):
        try:
            if "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks into /proc")
@pytest.mark.parametrize("start", ["subprocess.Popen(['sleep', '60'], pass_fds=pipes()).pid",
                                   "os.fork() or time.sleep(60)"], ids=["subprocess", "fork"])
@pytest.mark.parametrize("then, why", [
    ("time.sleep(3600)", "no sign of life for 8 s, so it was stopped in kernel_error"),
    ("os._exit(3)", "it was ended with exit code 3 in kernel_error"),
    ("return honest()", None)], ids=["hangs", "exits", "ends well"])
def test_what_a_variant_started_neither_delays_nor_survives_its_worker(tmp_path, start, then, why):
    """The child holds the pipe of the answers, so that no end of file tells that the worker is dead."""
    file = write(tmp_path, {"Starts": f"""
        if not os.path.exists({str(tmp_path / 'pid')!r}):
            child = {start}
            open({str(tmp_path / 'pid')!r}, 'w').write(str(child))
        {then}"""})
    file.write_text(file.read_text() + PIPES)
    worker = Worker(patience_s=8.0 if "sleep" in then else 3600.0)
    rows = worker.rows(Job(probes=("kernel_error",)), compare(f"{file}:Starts", "naive"))
    found = status_of(rows)
    assert found["Starts"] == (("ok", "") if why is None else ("failed", f"{DIED}: {why}"))
    assert found["naive"] == ("ok", "")
    worker.close()
    assert worker.process.poll() is not None and gone(int((tmp_path / "pid").read_text()))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks into /proc")
def test_a_counters_program_in_a_session_of_its_own_ends_with_a_worker_that_hangs(tmp_path):
    file = write(tmp_path, {"Starts": f"""
        import subprocess
        child = subprocess.Popen(['sleep', '60'], start_new_session=True)
        open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))
        time.sleep(3600)"""})
    worker = Worker(patience_s=8.0)
    worker.rows(Job(probes=("kernel_error",)), compare(f"{file}:Starts"))
    worker.close()
    assert gone(int((tmp_path / "pid").read_text()))


def test_what_variants_print_goes_to_the_runs_log_or_to_stderr(tmp_path, capfd):
    file = write(tmp_path, {"Prints": "print('said by', type(self).__name__, flush=True); "
                                      "os.write(1, b'and below\\n'); return honest()"})
    case = compare(f"{file}:Prints")
    for artifacts in (None, tmp_path):
        (rows,) = worker_each(200.0)(Job(artifacts=artifacts, probes=("kernel_error",)), [case])
        assert status_of(rows) == {"Prints": ("ok", "")}
        captured = capfd.readouterr()
        assert captured.out == "" and ("said by Prints\nand below" in captured.err) == (artifacts is None)
    assert "said by Prints\nand below\n" in (tmp_path / "worker.log").read_text()
    first = (tmp_path / "worker.log").read_bytes()
    list(worker_each(200.0)(Job(artifacts=tmp_path, probes=("kernel_error",)), [case]))
    assert (tmp_path / "worker.log").read_bytes().startswith(first + b"said by"), "a resumed run's log goes on"


@dataclass(frozen=True)
class Untimed:
    """A case that gives no times."""
    timed: ClassVar[bool] = False
    number: int

    @property
    def comparison_id(self):
        return str(self.number)

    def columns(self):
        return {}


def test_cases_without_times_run_beside_each_other_and_timed_ones_alone_after_them(monkeypatch):
    running, most, order = set(), [], []
    together = threading.Barrier(2, timeout=30)

    def rows(worker, job, case):
        running.add(case.number)
        most.append(len(running))
        if not getattr(case, "timed", True):
            together.wait()                                                # ends only with two at once
        running.discard(case.number)
        order.append(case.number)
        return [dict(comparison_id=str(case.number))]
    monkeypatch.setattr(Worker, "rows", rows)
    monkeypatch.setattr("kvlab.studies._worker._at_once", lambda threads: 2)
    timed = [SimpleNamespace(number=number) for number in (0, 5)]
    found = list(worker_each(1.0)(Job(), [timed[0], *map(Untimed, range(1, 5)), timed[1]]))
    assert sorted(rows[0]["comparison_id"] for rows in found) == list("012345")
    assert order[-2:] == [0, 5] and most[-2:] == [1, 1] and max(most) == 2


def test_a_closed_worker_starts_no_process_again():
    worker = Worker(1.0)
    worker.close()
    assert worker.rows(Job(), SimpleNamespace(comparison_id="a", columns=lambda: {}))[0]["error"] == (
        "the run was stopped") and worker.process is None


def shells(monkeypatch, lives):
    """Workers that live so, one after another; the list of those that were started."""
    popen, started = subprocess.Popen, []

    def start(command, **options):
        started.append(lives[len(started)])
        return popen(["sh", "-c", started[-1]], **options)
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr("kvlab.studies._worker.asdict", lambda case: {})
    return started


ANSWERS = """echo '{"ready": true}'; read line; echo '{"rows": [1]}'; exit 4"""


def test_workers_that_die_before_the_first_was_ready_cost_no_case(monkeypatch):
    started = shells(monkeypatch, ["exit 3", "exit 3", ANSWERS])
    assert Worker(60.0).rows(Job(), Untimed(1)) == [1] and len(started) == 3


@pytest.mark.parametrize("dies", ["exit 3", "sleep 60"])
def test_three_workers_of_which_none_is_ready_end_the_run(monkeypatch, dies):
    monkeypatch.setattr("kvlab.studies._worker.START_S", 0)
    started = shells(monkeypatch, [dies] * 3)
    with pytest.raises(ValueError, match="no worker process starts on this machine: .* 3 times in a row"):
        Worker(60.0 if dies == "exit 3" else 0.2).rows(Job(), Untimed(1))
    assert len(started) == 3


def test_once_a_worker_was_ready_a_later_one_that_dies_costs_its_case_only(monkeypatch):
    started = shells(monkeypatch, [ANSWERS, *["exit 3"] * 4, ANSWERS])
    worker = Worker(60.0)
    assert worker.rows(Job(), Untimed(1)) == [1]
    worker.process.wait()
    for _ in range(4):
        assert worker.rows(Job(), Untimed(1))[0]["error"] == f"{DIED}: it was ended with exit code 3"
    assert worker.rows(Job(), Untimed(1)) == [1] and len(started) == 6


SAYS = """echo '{"ready": true}'; read line; echo '{"at": ["%s", "inputs"]}'; sleep %s; echo '{"rows": [1]}'; read x"""


def test_a_worker_is_given_more_time_where_no_trial_is_at_work(monkeypatch):
    """The first comparison of a process imports for seconds before any trial's call."""
    shells(monkeypatch, [SAYS % ("", 1.5), SAYS % ("a", 60)])
    for last, answer in (("", {"rows": [1]}),
                         ("a", {"died": ("failed", f"{DIED}: no sign of life for 0 s, so it was stopped")})):
        worker = Worker(0.4)
        assert worker._ask(Job(), Untimed(1), {}) == ((last, "inputs"), answer)
        worker.close()


def test_no_more_workers_than_there_are_cores_and_memory_for(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    for free, workers in ((64 * GiB, 6), (3 * GiB, 3), (0, 1)):
        monkeypatch.setattr("kvlab.studies._worker.free_memory", lambda free=free: free)
        assert _at_once() == workers
    monkeypatch.setattr("kvlab.studies._worker.free_memory", lambda: 64 * GiB)
    assert [_at_once(threads) for threads in (2, 4, 16)] == [3, 1, 1]


def test_what_runs_beside_others_gives_no_times_and_leaves_gpus_alone():
    alone = [SimpleNamespace(), SimpleNamespace(timed=True), SimpleNamespace(timed=False, device="cuda")]
    beside = [Untimed(1), SimpleNamespace(timed=False, device="cpu")]
    assert apart([alone[0], beside[0], *alone[1:], beside[1]]) == (beside, alone)


def test_a_caller_that_has_enough_ends_all_workers_at_once_with_what_they_started(monkeypatch):
    popen, close, started, together = subprocess.Popen, Worker.close, [], threading.Barrier(3, timeout=30)

    def start(command, **options):                           # answers one case, ends with its input, leaves a program
        started.append(popen(["sh", "-c", "sleep 60 & echo '{\"rows\": [1]}'; cat >/dev/null"], **options))
        return started[-1]

    def closed(worker):
        together.wait()                                      # ends only with three at once
        close(worker)
    monkeypatch.setattr("kvlab.studies._worker._at_once", lambda threads: 3)
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(Worker, "close", closed)
    monkeypatch.setattr("kvlab.studies._worker.asdict", lambda case: {})
    answers = worker_each(60.0)(Job(), map(Untimed, range(9)))
    assert next(answers) == [1]
    answers.close()
    assert len(started) == 3 and all(process.poll() is not None for process in started)
    for process in started:
        with pytest.raises(ProcessLookupError):
            for _ in range(200):
                os.killpg(process.pid, 0)
                time.sleep(0.02)
