"""The Ray engine: a real cluster of this machine, whose processes and nodes are killed; its plain parts without Ray."""
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from kvlab.attention import Comparison, trial
from kvlab.record.environment import environment
from kvlab.record.store import RunStore
from kvlab.shapes import AttentionShape, Workload
from kvlab.studies import _ray, _ray_cluster, _ray_node, soak
from kvlab.studies._ray import _Crew, _Member, _Task, is_slow, ray_each
from kvlab.studies._ray_cluster import Place, loss, machines, places, shown
from kvlab.studies._run import Job, run
from kvlab.units import GiB, MiB

WORKLOAD = Workload.decode(AttentionShape(4, 2, 16), kv_len=32)
MINE = """
import os, signal
from kvlab.attention.naive import Naive

class Mine(Naive):
    name = "mine"
    def prepare(self, trial, inputs):
        print("said by", self.name, flush=True)
        return super().prepare(trial, inputs)

class Kills(Naive):
    name = "kills"
    def prepare(self, trial, inputs):
        os.kill(os.getppid(), signal.SIGKILL)                   # Ray's process, above the one that measures
"""
DRIVER = """
from kvlab.cli import main
from kvlab.studies import soak
soak.cases = lambda *size, **options: [soak.Tiny(index, work_s=0.2) for index in range(12)]
main()
"""


# Ray itself

@pytest.fixture(scope="module")
def cluster():
    """A Ray of 2 CPUs for all tests of this file; its start has a fixed limit of time, so it is tried again."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'kvlab[ray]'")
    if sys.platform == "win32":
        pytest.skip("signals of POSIX")
    os.environ.update(_ray_cluster.QUIET)
    from ray.cluster_utils import Cluster
    for _ in range(3):
        made = Cluster()
        try:
            made.add_node(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000)
            break
        except Exception as error:                              # whatever it is, Ray's own trouble is not kvlab's
            made.shutdown()
            why = _ray_cluster.first_line(error)
    else:
        pytest.skip(f"Ray did not start here in 3 tries: {why} (ray-project/ray #65983: a busy machine)")
    yield made
    made.shutdown()


def hands(node):
    """kvlab's Ray processes on a node."""
    found = []
    for one in psutil.Process(node.all_processes["raylet"][0].process.pid).children():
        with contextlib.suppress(psutil.Error):                 # it ends just now
            if one.cmdline() and one.cmdline()[0].startswith("ray::Hand"):
                found.append(one)
    return found


def work(monkeypatch, n, work_s=0.2):
    monkeypatch.setattr(soak, "cases", lambda *size, **options: [soak.Tiny(i, work_s=work_s) for i in range(n)])


def go(cluster, path, **more):
    """A run, after which the places are free again and the cluster is still there."""
    store = run("soak", **({} if "resume" in more else dict(size="smoke", out=path)), engine="ray",
                address=cluster.address, progress=False, **more)
    until = time.monotonic() + 60                           # Ray ends its processes when it gets round to it
    while hands(cluster.head_node):
        assert time.monotonic() < until
        time.sleep(0.1)
    return store


def each_once(store, n):
    """Whether every case is there once, with the right checksum."""
    sums = {row["seed"]: row["value"] for row in store.rows() if row["metric"] == "checksum"}
    assert len([row for row in store.rows() if row["metric"] == "checksum"]) == n
    assert sums == {index: soak.checksum(index) for index in range(n)}


def after(monkeypatch, commits, then):
    """Do something once, when so many cases are committed."""
    append = RunStore.append

    def appended(store, *what):
        append(store, *what)
        if len(store.committed) == commits:
            then()
    monkeypatch.setattr(RunStore, "append", appended)


def test_a_run_on_a_cluster_has_every_case_once_and_says_who_measured_it(cluster, tmp_path, capfd):
    store = go(cluster, tmp_path)
    each_once(store, 100)
    (worker, found), = store.workers.items()
    assert {row["worker"] for row in store.rows()} == {worker} and len(worker) == 6
    assert found["kvlab"] == environment()["kvlab"] and store.manifest.options["engine"] == "ray"
    assert "".join(capfd.readouterr()) == ""


def test_a_process_killed_in_mid_run_costs_no_case(cluster, tmp_path, monkeypatch, capfd):
    work(monkeypatch, 16)
    after(monkeypatch, 5, lambda: hands(cluster.head_node)[0].kill())
    store = go(cluster, tmp_path)
    each_once(store, 16)
    out, said = capfd.readouterr()
    (line,) = said.strip().splitlines()
    node = next(iter(store.workers))
    assert line.startswith("kvlab: case tiny-00000") and line.endswith(
        f": its Ray worker on node {node} died (its process was killed or crashed); tried again, 2 of 3") and not out


def test_a_variants_file_with_its_samples_and_one_that_always_kills_its_process(cluster, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_ray, "ATTEMPTS", 2)                    # a process takes seconds to start
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(MINE)
    (tmp_path / "run").mkdir()
    good = Comparison((trial("my.py:Mine", WORKLOAD), trial("naive", WORKLOAD)))
    bad = Comparison((trial("my.py:Kills", WORKLOAD),))
    job = Job(artifacts=tmp_path / "run", probes=("kernel_error", "timer"))
    answers = {rows[0]["comparison_id"]: rows for rows in ray_each(cluster.address, 300.0, lambda *of: None)(
        job, [bad, good])}
    (failed,), rows = answers[bad.comparison_id], answers[good.comparison_id]
    assert failed["status"] == "failed" and failed["worker"] and "the last of 2 tries" in failed["error"]
    assert [line.rpartition("; ")[2] for line in capsys.readouterr().err.splitlines()] == [
        "tried again, 2 of 2", "given up after 2 tries"]
    times = [row for row in rows if row["metric"] == "latency_s"]
    assert {(row["variant"], row["status"]) for row in times} == {("mine", "ok"), ("naive", "ok")}
    samples = {row["artifact"] for row in times}
    assert samples and all((tmp_path / "run" / name).stat().st_size for name in samples)
    first, *others = (tmp_path / "run" / "worker.log").read_text().splitlines()
    assert first == f"== {rows[0]['worker']} ==" and set(others) == {"said by mine"}


def test_what_a_cluster_lacks_and_what_a_node_has_other_is_refused_by_name(cluster, monkeypatch):
    case = Comparison((trial("naive", WORKLOAD, device="cuda"),))
    with pytest.raises(ValueError, match="no node of the Ray cluster has a GPU for kvlab; add a node"):
        list(ray_each(cluster.address, 0.0, lambda *of: None)(Job(), [case]))
    monkeypatch.setattr(_ray, "environment", lambda: {**environment(), "kvlab": "0.0.1"})
    with pytest.raises(ValueError, match=rf"node \w{{6}}: it has kvlab {environment()['kvlab']}, here 0.0.1; install"):
        list(ray_each(cluster.address, 60.0, lambda *of: None)(Job("soak"), [soak.Tiny(0)]))
    with pytest.raises(ValueError, match="kvlab itself failed on node .*: TypeError: .*; mend that node, .* --resume"):
        monkeypatch.undo()
        monkeypatch.setattr(_ray, "message_of", lambda case: {1: object})
        list(ray_each(cluster.address, 60.0, lambda *of: None)(Job("soak"), [soak.Tiny(0)]))


def marked(mark):
    """Processes that have the mark in their environment."""
    found = []
    for one in psutil.process_iter():
        try:
            if one.environ().get("KVLAB_TEST_MARK") == mark and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
        except psutil.Error:
            pass
    return found


@pytest.mark.parametrize("end", [lambda pid: os.killpg(pid, signal.SIGINT), lambda pid: os.kill(pid, signal.SIGTERM)],
                         ids=["Ctrl-C", "kill"])
def test_a_ray_of_this_machine_ends_with_its_run_which_is_completed(cluster, tmp_path, monkeypatch, end):
    mark = str(tmp_path)
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, "run", "soak", "--size", "smoke", "--engine", "ray",
                               "--out", str(tmp_path)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                              env={**os.environ, "KVLAB_TEST_MARK": mark}, start_new_session=True)
    while not (found := [p for p in tmp_path.glob("soak/*/*.jsonl") if p.read_bytes().count(b'"commit"') >= 3]):
        if driver.poll() is not None:
            pytest.skip(f"a second Ray did not start: {driver.stderr.read()}")
        time.sleep(0.1)
    assert len(marked(mark)) > 4
    end(driver.pid)
    said = driver.communicate(timeout=120)[1]
    assert driver.returncode == 130 and "SIGTERM" not in said and "Traceback" not in said, said
    assert f"cases kept. Go on with: kvlab run soak --resume {tmp_path}/soak" in said and "interrupted" in said
    until = time.monotonic() + 30
    while (left := marked(mark)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left
    work(monkeypatch, 12)
    before = found[0].read_bytes()
    store = go(cluster, None, resume=found[0].parent)
    each_once(store, 12)
    assert found[0].read_bytes().startswith(before) and len(store.workers) == 2, "of both Rays"


def test_the_cases_of_a_node_that_is_killed_are_done_elsewhere(cluster, tmp_path, monkeypatch, capfd):
    """The last with the cluster: for ten seconds Ray goes on to offer the places of a node that is gone."""
    try:
        second = cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=100_000_000)
    except Exception as error:
        pytest.skip(f"a second node did not start: {_ray_cluster.first_line(error)}")
    case = Comparison((trial("naive", WORKLOAD, device="cuda"),))           # that GPU is in Ray's books only
    (rows,) = ray_each(cluster.address, 300.0, lambda *of: None)(Job(probes=("kernel_error",)), [case])
    assert {row["worker"] for row in rows} == {f"{second.node_id[:6]}/gpu0"}
    assert {row["kind"] for row in rows} == {"missing"} and "torch sees no CUDA device" in rows[0]["note"]
    work(monkeypatch, 16, 0.3)
    after(monkeypatch, 6, lambda: cluster.remove_node(second, allow_graceful=False))
    store = go(cluster, tmp_path)
    each_once(store, 16)
    assert second.node_id[:6] in store.workers and len(store.workers) == 2
    assert f"its Ray worker on node {second.node_id[:6]} died" in capfd.readouterr().err


# How it is reached

def test_without_ray_one_sentence_and_no_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"--engine ray needs ray .*pip install 'kvlab\[ray\]'"):
        run("soak", size="smoke", engine="ray", out=tmp_path, progress=False)
    assert not list(tmp_path.iterdir())


def test_where_no_cluster_answers_one_sentence_and_no_run(tmp_path):
    pytest.importorskip("ray")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"there is no Ray cluster at {nobody} .*; start kvlab on a node"):
            run("soak", size="smoke", engine="ray", address=nobody, out=tmp_path, progress=False)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError) as refused:
        ray_each("me:secret@head:6379", 1.0, lambda *of: None)
    assert "secret" not in str(refused.value) and "there is no Ray cluster at head:6379" in str(refused.value)
    with pytest.raises(ValueError, match="Ray's client for other machines"):
        ray_each("ray://head:10001", 1.0, lambda *of: None)


def test_a_start_that_fails_is_tried_three_times(capsys):
    tries = []

    def init(**options):
        tries.append(options["address"])
        raise RuntimeError("The current node timed out during startup.\nmore")
    with pytest.raises(ValueError, match=r"did not start on this machine in 3 tries \(The current node timed out "
                                         r"during startup\).*#65983.*--engine local"):
        _ray_cluster._start(SimpleNamespace(init=init, shutdown=lambda: None))
    assert tries == ["local"] * 3 and "tried again, 3 of 3" in capsys.readouterr().err


def test_a_connection_of_the_callers_is_used_and_no_other(monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="10.0.0.1:6379"))
    assert _ray_cluster.connected("auto") == (ray, False)
    with pytest.raises(ValueError, match="at 10.0.0.1:6379, not head:1; call ray.shutdown"):
        _ray_cluster.connected("user:token@head:1")


@pytest.mark.parametrize("text, plain", [
    ("head:6379", "head:6379"), ("ray://me:pw@head:1", "ray://head:1"), ("http://head?token=x y", "http://head y")])
def test_addresses_are_shown_without_secrets(text, plain):
    assert shown(text) == plain


# The plain parts

def node(name, alive=True, **has):
    return dict(NodeID=name, Alive=alive, Resources=has)


def test_places_follow_what_the_nodes_have():
    nodes = [node("a", CPU=8.0, GPU=2.0, memory=3.5 * GiB), node("b", CPU=2.0, memory=64.0 * GiB), node("head"),
             node("dead", alive=False, CPU=64.0, GPU=8.0)]
    assert places(nodes, "cuda") == [Place(0, "a", 4, 1, 0), Place(1, "a", 4, 1, 0)]
    assert places(nodes, "timed") == [Place(0, "a", 8, 0, 0), Place(0, "b", 2, 0, 0)]
    assert [(p.node, p.cpus, p.memory) for p in places(nodes, "beside")] == [("a", 1, GiB)] * 3 + [("b", 1, GiB)] * 2
    assert places(nodes, "beside", threads=4) == [Place(0, "a", 4, 0, GiB), Place(1, "a", 4, 0, GiB),
                                                  Place(0, "b", 2, 0, GiB)]
    assert places([node("small", CPU=4.0, memory=MiB)], "beside") == [Place(0, "small", 1, 0, MiB)]
    assert places([node("few", CPU=2.0, GPU=4.0)], "cuda")[3] == Place(3, "few", 0, 1, 0)


def test_slow_is_longer_than_a_minute_and_five_medians():
    assert is_slow(61, [1, 1, 12]) and is_slow(101, [20, 20, 20])
    assert not is_slow(59, [1, 1, 1]) and not is_slow(99, [20, 20, 20]) and not is_slow(1000, [1, 1])


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../a", "samples/../../a", "a//b", "./a", "C:\\a", "\\\\host\\a",
                                  "samples\\..\\..\\a", "samples/\0", "manifest.json", "readings.jsonl"])
def test_a_file_goes_nowhere_but_into_a_folder_of_the_run(tmp_path, name):
    with pytest.raises(ValueError, match="cannot be trusted"):
        _ray_node.inside(tmp_path, name)
    assert _ray_node.inside(tmp_path, "samples/a b.parquet") == tmp_path / "samples" / "a b.parquet"


def test_files_come_small_ones_first_and_rows_say_what_stayed_behind(tmp_path):
    for name, size in (("samples/big", 900), ("samples/small", 10), ("traces/deep/other", 80), ("worker.log", 5)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    (tmp_path / "samples" / "link").symlink_to("/etc/hostname")
    files, left_out = _ray_node.gathered(tmp_path, 100)
    assert {name: len(content) for name, content in files.items()} == {"samples/small": 10, "traces/deep/other": 80}
    assert left_out == {"samples/big": 900}
    rows = [dict(artifact="samples/big", note="warm"), dict(artifact="samples/small", note=""), dict(artifact="")]
    big, *others = _ray_node.without(rows, left_out)
    assert big == dict(artifact="", note="warm; its file of 900 B stayed behind: a case may send 256 MiB")
    assert others == rows[1:]


def test_of_a_flood_of_printing_the_last_mebibyte_comes(tmp_path):
    assert _ray_node.printed(tmp_path / "none") == b""
    (tmp_path / "log").write_bytes(b"a" * MiB + b"end")
    assert len(_ray_node.printed(tmp_path / "log")) == MiB and _ray_node.printed(tmp_path / "log").endswith(b"aend")


def test_a_node_without_the_runners_folder_gets_the_variants_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)                                 # where it was is the current folder again afterwards
    here, own = tmp_path / "here", tmp_path / "own"
    here.mkdir()
    (here / "my.py").write_text("one")
    (tmp_path / "outside.py").write_text("two")
    assert not _ray_node.settled(here, {"my.py": "one", "../outside.py": "two"}, own) and Path.cwd() == here
    assert not _ray_node.settled(here, {"my.py": "another"}, own) and Path.cwd() == own
    assert Path("my.py").read_text() == "another" and (here / "my.py").read_text() == "one"
    assert not _ray_node.settled(tmp_path / "none", {"sub/my.py": "one", str(here / "my.py"): "one"}, own)
    assert Path("sub/my.py").read_text() == "one"
    for name, text in ((str(here / "my.py"), "other"), ("../none.py", "")):
        why = _ray_node.settled(tmp_path / "none", {name: text}, own)
        assert why.startswith("it has not the same ") and why.endswith("at the same place on every node")


def test_the_files_of_variants_are_found_in_whatever_holds_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(MINE)
    case = Comparison((trial("my.py:Mine", WORKLOAD), trial("naive", WORKLOAD)))
    assert _ray._texts([soak.Tiny(0), case]) == {"my.py": MINE}


def test_only_machines_that_differ_are_spoken_of():
    one = dict(cpu="A", gpus=[], torch="2")
    assert machines({"a": one, "b": one}) == ""
    assert machines({"a": one, "c": one | {"gpus": [{"name": "H200"}]}, "b": one}) == (
        "the cases are of several machines, so compare times of one worker only: a, b (A, torch 2); "
        "c (A, H200, torch 2)")


def ray_error(name, text):
    return type(name, (Exception,), {})(text)


@pytest.mark.parametrize("error, why, status, cannot", [
    (ray_error("OutOfMemoryError", "low"), "its node ran out of memory, and Ray ended it", "oom", False),
    (ray_error("NodeDiedError", ""), "the node died or was lost", "failed", False),
    (ray_error("ActorDiedError", "it died because its node has died."), "the node died or was lost", "failed", False),
    (ray_error("ActorDiedError", "an error raised in its creation task"), "it does not start", "failed", True),
    (ray_error("ActorDiedError", "unexpectedly"), "its process was killed or crashed", "failed", False),
    (ray_error("ActorUnavailableError", ""), "it can no longer be reached", "failed", False),
    (ray_error("ObjectLostError", "\x1b[36mgone\x1b[39m.\nmore"), "ObjectLostError: gone", "failed", False)])
def test_what_died_in_words(error, why, status, cannot):
    assert loss(error) == (why, status, cannot)


class TaskError(Exception):
    """Stands in for Ray's error of kvlab's own code."""


def crew(answers=()):
    """A crew over a Ray that is not there: what `get` gives or raises, one after another."""
    answers = iter(answers)

    def get(reference):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer
    return _Crew(SimpleNamespace(get=get, kill=lambda actor: None, exceptions=SimpleNamespace(
        RayTaskError=TaskError, RayError=Exception)), Job("soak"), 300.0, lambda *of: None, local=True)


def member(where, task=None, **more):
    return _Member(Place(0, where, 1, 0, 0), SimpleNamespace(rows=SimpleNamespace(remote=lambda *what: what)), None,
                   name=where, task=task, **more)


def test_a_case_that_lost_three_processes_is_a_failed_row():
    out_of_memory = ray_error("OutOfMemoryError", "")
    found, task, waiting = crew([out_of_memory] * 3), _Task(soak.Tiny(4)), deque()
    for _ in range(3):
        found.members = [member("abcdef", task)]
        waiting.clear()
        rows = found._answer(found.members[0], waiting)
        assert not found.members and list(waiting) == ([] if rows else [task])
    assert rows[0]["status"] == "oom" and rows[0]["comparison_id"] == "tiny-0000004" and rows[0]["worker"] == "abcdef"
    assert rows[0]["error"] == ("its Ray worker on node abcdef died (its node ran out of memory, and Ray ended it), "
                                "the last of 3 tries")


def test_what_kvlab_itself_does_wrong_ends_the_run_in_one_sentence():
    found = crew([TaskError("Traceback\n  File\n\x1b[31mOSError: no space\x1b[0m"),
                  ray_error("ActorDiedError", "in its creation task\nModuleNotFoundError: No module named 'kvlab'")])
    with pytest.raises(ValueError, match="kvlab itself failed on node abcdef: OSError: no space; mend that node"):
        found._answer(member("abcdef", _Task(soak.Tiny(0))), deque())
    found.members = [_Member(Place(0, "abcdef99", 1, 0, 0), None, None)]
    with pytest.raises(ValueError, match="does not start on node abcdef: ModuleNotFoundError: No module named 'kvlab'; "
                                         "install kvlab"):
        found._answer(found.members[0], deque())


def test_a_case_goes_where_it_did_not_die_if_there_is_such_a_place():
    found, waiting = crew(), deque([_Task(soak.Tiny(0), 1, {"a"}), _Task(soak.Tiny(1))])
    first, second = waiting
    found.members = [member("a"), member("b")]
    found._hand_out(waiting)
    assert [one.task for one in found.members] == [second, first] and not waiting
    waiting.append(_Task(soak.Tiny(2), 2, {"a", "b"}))
    found.members = [member("a")]
    found._hand_out(waiting)
    assert found.members[0].task.tries == 2, "there is no other node"


def test_a_place_that_is_never_free_keeps_no_case_waiting():
    found, waiting = crew(), deque([_Task(soak.Tiny(0), 1, {"a"})])
    there = [node("a", CPU=1.0, memory=GiB), node("b", CPU=1.0, memory=GiB)]
    started = SimpleNamespace(hello=SimpleNamespace(remote=lambda *what: "hello"))
    options = SimpleNamespace(options=lambda **how: SimpleNamespace(remote=lambda *what: started))
    found.ray.nodes, found.ray.remote = lambda: there, lambda kind: options
    found.ray.util = SimpleNamespace(scheduling_strategies=SimpleNamespace(
        NodeAffinitySchedulingStrategy=lambda node, soft: node))
    found.looked = time.monotonic()
    found._hire("beside", 1, waiting)
    assert [one.place.node for one in found.members] == ["b"], "it died on a"
    found._hire("beside", 1, waiting)
    assert len(found.members) == 1, "one is enough for a case"
    found.looked += 61
    found._hire("beside", 1, waiting)
    assert [one.place.node for one in found.members] == ["b", "a"], "b is taken by others"
    found.members[1].name, found.members[1].actor = "a", member("a").actor
    found._hand_out(waiting)
    assert found.members[1].task and not waiting


def test_a_case_that_takes_long_is_said_once_and_listed_at_the_end(capsys):
    found = crew()
    found.took, found.slowest = [2.0, 2.0, 3.0], [(70.0, "tiny-0000009", "b")]
    found.members = [member("a", _Task(soak.Tiny(3)), since=time.monotonic() - 75)]
    for _ in range(2):
        found._say_slow()
    found.sum_up()
    assert capsys.readouterr().err.splitlines() == [
        "kvlab: case tiny-0000003 has been with a for 75 s; half of those finished took less than 2.0 s",
        "kvlab: the slowest cases: tiny-0000009 70 s on b"]
