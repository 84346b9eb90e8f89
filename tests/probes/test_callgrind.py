"""The cache simulator: known traffic comes out, formulas of the C kernels hold, and whatever breaks is a sentence."""
import os
import stat
from dataclasses import replace

import pytest
from made_variants import SMALL, honest, of

from kvlab.attention import Comparison, trial
from kvlab.attention.c_flash import CFlash
from kvlab.kernels import compiled
from kvlab.probes import _callgrind_child, _target, callgrind, measure
from kvlab.probes._known import Operation
from kvlab.probes.callgrind import Callgrind, NoSimulation, dump, region, simulate
from kvlab.shapes import AttentionShape, Workload
from kvlab.studies._counters_findings import EDGE
from kvlab.studies.counters import NEAR, Behind, cases

KIB = 2**10
LL = 64 * KIB
SIZES = (64, 128, 256, 512, 1024, 2048, 4096)          # KiB
LONG = pytest.mark.skipif(os.environ.get("KVLAB_CHECK_ALL") != "1", reason="takes a minute; KVLAB_CHECK_ALL=1 runs it")


@pytest.fixture
def valgrind():
    if why := Callgrind().why_not(trial("c_decode", SMALL)):
        pytest.skip(why)


def values(readings):
    return {r.metric: r.value for r in readings}


def bytes_of(readings):
    found = values(readings)
    return [found[m] for m in ("hbm_read_bytes", "hbm_write_bytes", "hbm_bytes", "write_allocate_bytes")]


@pytest.mark.parametrize("name, nbytes, times", [("copy", 1024 * KIB, 1), ("read", 1024 * KIB, 1),
                                                 ("matmul", 256 * KIB, 256 // 16)])
def test_operations_move_what_everyone_knows_they_move(valgrind, name, nbytes, times):
    op = Operation(name, nbytes)
    read, write, both, allocated = bytes_of(Callgrind(LL).operation(op))
    assert read == pytest.approx(nbytes * (1 + times if name == "matmul" else 1), rel=0.01)
    assert write == pytest.approx(0 if name == "read" else nbytes, rel=0.02, abs=4 * KIB)
    assert allocated == pytest.approx(write, rel=0.02, abs=4 * KIB), "each stored line is read first, and counted apart"
    assert both == read + write
    if name == "copy":
        found = values(Callgrind(LL).operation(op))
        assert found["traffic_to_model"] == pytest.approx(1, abs=0.01)
        assert found["read_amplification"] == pytest.approx(1, abs=0.01)


def test_the_second_matrix_is_read_as_often_as_the_note_says(valgrind):
    for reading in Callgrind(LL).operation(Operation("matmul", 256 * KIB)):
        if reading.kind != "missing":
            assert reading.kind == "simulated" and "16 rows of the result at a time" in reading.note
            assert "second matrix is read 16 times" in reading.note


CASES = {"c_naive": lambda ratio: trial("c_naive", Workload.prefill(AttentionShape(ratio, 1, 16), q_len=104,
                                                                    kv_len=1408)),
         "c_flash": lambda ratio: trial(CFlash(q_tile=16), CASES["c_naive"](ratio).workload),
         "c_decode": lambda ratio: trial("c_decode", Workload.decode(AttentionShape(8, 8 // ratio, 64), kv_len=4096))}


def test_these_are_the_shapes_and_sizes_that_the_study_sweeps():
    """Beside them it sweeps torch's variants, and a C kernel on purpose near a step of its formula."""
    swept = [case for case in cases("small") if isinstance(case, Behind)
             and case.comparison.trials[0].variant.label.startswith("c_") and case.comparison.workload.q_lens[0] not in
             NEAR]
    assert {case.cache_bytes for case in swept} == {n * KIB for n in SIZES}
    assert {t for case in swept for t in case.comparison.trials} == {
        make(ratio) for make in CASES.values() for ratio in (1, 4, 8)}
    assert len(swept) == 7 * 2 * 3 == len({case.comparison_id for case in swept})


@pytest.mark.parametrize("name, ratio", [
    *((name, ratio) for name in CASES for ratio in (1, 4)), ("c_decode", 8),
    *(pytest.param(name, 8, marks=LONG) for name in ("c_naive", "c_flash"))])
def test_the_formula_of_a_c_kernel_holds_within_5_percent_behind_every_cache(valgrind, name, ratio):
    """The independent check: the simulator knows nothing of the formula, the formula nothing of the program."""
    one, reads = CASES[name](ratio), []
    for size in SIZES:
        found, cost = values(r for _, r in Callgrind(size * KIB).measure(bench(one))), one.variant.load().cost(
            one, size * KIB)
        assert found["traffic_to_model"] == pytest.approx(1, abs=0.05), size
        assert found["hbm_read_bytes"] == pytest.approx(cost.read_bytes, rel=0.05), size
        assert found["hbm_write_bytes"] == pytest.approx(cost.write_bytes, rel=0.05, abs=6 * KIB), size
        assert found["last_level_bytes"] == size * KIB
        reads.append(found["hbm_read_bytes"])
    if name == "c_decode":
        assert max(reads) < 1.05 * min(reads), "K and V once per group, at every ratio, behind every cache"
    else:
        assert reads[0] > 5 * reads[-1], "and what is reused depends on what stays"


@pytest.mark.parametrize("variant, q_len, kv_len", [
    ("c_naive", 64, 1024),                                           # matrix and K 1.27 ×, and V 1.52 × the cache
    ("c_naive", 16, 4820),                                           # K and a row of scores 1.25 ×
    ("c_naive", 16, 1048),                                           # all of it 0.77 ×
    (CFlash(q_tile=16), 64, 2560),                                   # K and V and two tiles of queries 1.28 ×
    (CFlash(q_tile=16), 64, 1570)])                                  # 0.8 ×
def test_a_working_set_may_come_as_near_to_the_cache_as_the_study_says(valgrind, variant, q_len, kv_len):
    """EDGE of the findings: a step of the formula that far from the cache's size does no harm."""
    assert EDGE == 1.25
    one = trial(variant, Workload.prefill(AttentionShape(2, 1, 16), q_len=q_len, kv_len=kv_len))
    found = values(r for _, r in Callgrind(256 * KIB).measure(bench(one)))
    assert found["traffic_to_model"] == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("workload", [
    Workload(AttentionShape(4, 2, 32, window=700), (1, 1), (2000, 900)),
    Workload.decode(AttentionShape(16, 1, 80, v_head_dim=64, v_in_k=True), kv_len=2000),
    Workload.decode(AttentionShape(4, 2, 48, v_head_dim=32), batch_size=3, kv_len=800)],
    ids=["window", "latent", "wide"])
@pytest.mark.parametrize("name", list(CASES))
def test_windows_latents_and_batches_are_told_to_the_program(valgrind, name, workload):
    one = trial(name, workload)
    found = values(r for _, r in Callgrind(LL).measure(bench(one)))
    assert found["hbm_read_bytes"] == pytest.approx(one.variant.load().cost(one, LL).read_bytes, rel=0.05)


@pytest.mark.parametrize("workload", [
    Workload.decode(AttentionShape(8, 1, 96, v_head_dim=64, v_in_k=True), kv_len=2048),
    Workload.prefill(AttentionShape(8, 1, 96, v_head_dim=64, v_in_k=True), q_len=32, kv_len=1024)])
def test_a_latent_that_is_found_again_is_read_once(valgrind, workload):
    for size in (256, 1024):
        one = trial("c_naive" if size == 1024 else "c_flash", workload)
        found = values(r for _, r in Callgrind(size * KIB).measure(bench(one)))
        assert found["traffic_to_model"] == pytest.approx(1, abs=0.05), size


def test_latents_and_quantised_caches_in_torch_move_what_its_operators_write(valgrind):
    """K and V of two widths are torch's math on a CPU; codes of 8 bits are floats twice."""
    latent = Workload.decode(AttentionShape(8, 1, 96, v_head_dim=64, v_in_k=True), kv_len=8192)
    plain = Workload.decode(AttentionShape(8, 2, 64), kv_len=2048)
    for trials in ([trial(name, latent) for name in ("naive", "sdpa")],
                   [trial("sdpa", plain, kv_format="int8/token"), trial("sdpa_math", plain)]):
        readings = Callgrind(256 * KIB).measure(bench(*trials))
        found = [(one, r.value) for one, r in readings if r.metric == "traffic_to_model"]
        assert len(found) == 2
        for one, ratio in found:
            assert ratio == pytest.approx(1, abs=0.1), one.variant.label


class bench:
    """What the probe uses of a Bench."""

    def __init__(self, *trials):
        self.trials, self.watch, self.told = list(trials), self, []

    def at(self, case_id, stage):
        self.told.append((case_id, stage))


BROKEN = """class Broken:
    name = 'broken'
    def why_not(self, trial): return None
    def prepare(self, trial, inputs):
        def call(): raise RuntimeError('it is broken')
        return call
    def cost(self, trial, cache_bytes=0): return None
"""


def test_torch_and_c_in_one_comparison_and_one_that_breaks(valgrind, tmp_path):
    """A trial of torch runs in a Python under valgrind; K and V of 2 MiB are what it must read."""
    workload = Workload.decode(AttentionShape(8, 2, 64), kv_len=2048)
    broken = tmp_path / "broken.py"
    broken.write_text(BROKEN)
    trials = trial("c_decode", workload), trial("sdpa", workload), trial(f"{broken}:Broken", workload)
    rows = measure(Comparison(trials), [Callgrind(LL)])
    assert {r["note"] for r in rows if r["kind"] == "missing"} == {
        "under valgrind the call ended with exit code 1: RuntimeError: it is broken"}
    assert {r["kind"] for r in rows if r["variant"] != "broken"} == {"simulated"}
    in_c, in_torch = (of(rows, "hbm_read_bytes", name)[0] for name in ("c_decode", "sdpa"))
    assert in_c["value"] == pytest.approx(2 * 2**20, rel=0.05)
    assert 1 < in_torch["value"] / in_c["value"] < 1.3
    assert in_torch["cache_state"] == "cold" and "last level 64 KiB 16-way, 64-byte lines, LRU" in in_torch["note"]
    assert in_torch["method"] == "cache simulator" and in_torch["source"] == "callgrind"


def test_the_child_runs_every_trial_and_one_that_breaks_costs_itself_alone(valgrind, tmp_path, capfd):
    """Here without valgrind, where client requests do nothing."""
    broken = tmp_path / "broken.py"
    broken.write_text(BROKEN)
    settings = dict(cache_bytes=LL, library=str(compiled.compiled(**callgrind.LIBRARY)))
    well = _target.write(Comparison((trial("sdpa", SMALL),)), tmp_path / "well.json", **settings)
    assert _callgrind_child.main(str(well)) == 0
    ill = _target.write(Comparison((trial(f"{broken}:Broken", SMALL), trial("naive", SMALL))), tmp_path / "ill.json",
                        **settings)
    assert _callgrind_child.main(str(ill)) == 1
    assert "RuntimeError: it is broken" in capfd.readouterr().err


FILE = """version: 1
desc: Trigger: Client Request: x call
events: Ir Dr Dw I1mr D1mr D1mw ILmr DLmr DLmw ILdmr DLdmr DLdmw
summary: 0 0 0 0 0 0 0 0 0 0 0 18446744073709551615
fn=(1) main
12 5
totals: 1000 300 100 9 8 7 3 50 20 0 4
"""


def test_a_dump_is_read_by_its_totals_and_its_name(tmp_path):
    file = tmp_path / "out.1"
    file.write_text(FILE)
    name, counts = dump(file)
    assert name == "x call" and counts["DLmr"] == 50 and counts["DLdmw"] == 0, "zeros at the end are left out"
    left = {**counts, "ILmr": 1000, "DLmr": 1000, "DLmw": 1000, "DLdmr": 30, "DLdmw": 0, "ILdmr": 6}
    found = region({"x call": counts, "x left": left}, "x ")
    assert found == callgrind.Simulated(read=64 * 50, allocate=64 * 20, write=64 * (4 + 30 + 6), code=64 * 3)


@pytest.mark.parametrize("text", ["", FILE.replace("Client Request: x call", "Program termination"),
                                  FILE.replace("DLmw", "Else"), FILE.replace("1000 300", "1000 3x0"),
                                  FILE.partition("events")[0]], ids=["empty", "not asked", "event", "number", "cut"])
def test_a_dump_that_is_broken_or_was_not_asked_for_counts_as_none(tmp_path, text):
    file = tmp_path / "out.1"
    file.write_text(text)
    assert dump(file) is None
    assert dump(tmp_path / "none") is None
    with pytest.raises(NoSimulation, match="missing or cut off"):
        region({"x call": {}}, "x ")


def fake(tmp_path, monkeypatch, text):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "valgrind").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "valgrind").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize("text, timeout_s, why", [
    ("sleep 60", 0.3, "did not answer within 0.3 s; take a smaller workload, or Callgrind(timeout_s=…) above 0.3"),
    ("echo 'valgrind: out of memory' >&2; exit 9", 20, "ended with exit code 9: valgrind: out of memory"),
    ("kill -SEGV $$", 20, "crashed (SIGSEGV)"),
    ("exit 0", 20, "wrote no dump"),
])
def test_a_valgrind_that_hangs_fails_or_says_nothing_is_the_reason(valgrind, tmp_path, monkeypatch, text, timeout_s,
                                                                   why):
    fake(tmp_path, monkeypatch, text)
    with pytest.raises(NoSimulation) as told:
        simulate(["program"], LL, timeout_s)
    assert why in str(told.value)
    probe = Callgrind(LL, timeout_s)
    for one in (trial("c_decode", SMALL), trial("sdpa", SMALL)):
        rows = measure(Comparison((one,)), [probe])
        assert {r["kind"] for r in rows} == {"missing"} and len(rows) == len(probe.metrics)
        assert all(why in r["note"] for r in rows)


def test_dumps_before_the_end_of_patience_count(valgrind, tmp_path, monkeypatch):
    """The program is ended after its first trial: that one has numbers, the second the reason."""
    first, second = trial("sdpa", SMALL), trial("naive", SMALL)
    texts = [FILE.replace("x call", f"{first.case_id} {name}") for name in ("call", "left")]
    for i, text in enumerate(texts):
        (tmp_path / f"dump{i}").write_text(text)
    fake(tmp_path, monkeypatch, 'for a in "$@"; do case $a in --callgrind-out-file=*) out=${a#*=};; esac; done\n'
                                f'cp {tmp_path}/dump0 $out.1; cp {tmp_path}/dump1 $out.2; sleep 60')
    rows = measure(Comparison((first, second)), [Callgrind(LL, timeout_s=6)])
    assert of(rows, "hbm_read_bytes", "sdpa")[0]["value"] == 64 * 50
    assert "did not answer within 6 s" in of(rows, "hbm_read_bytes", "naive")[0]["note"]


def test_what_it_cannot_simulate_is_said(valgrind):
    def note(one):
        (row, *_) = measure(Comparison((one,)), [Callgrind(LL)])
        assert row["kind"] == "missing"
        return row["note"]
    if (os.cpu_count() or 1) > 1:
        assert "take threads=1" in note(trial("sdpa", SMALL, threads=2))
    assert "exists in this process only" in note(trial(honest(), SMALL))
    assert "simulates a CPU's caches" in Callgrind().why_not(replace(trial("sdpa", SMALL), device="cuda"))
    for op in (Operation("copy", 2**20, dtype="bf16"), Operation("copy", 2**20, device="cuda")):
        assert {r.kind for r in Callgrind().operation(op)} == {"missing"}
    assert "bf16" in Callgrind().operation(Operation("copy", 2**20, dtype="bf16"))[0].note


@pytest.mark.parametrize("size", [0, 1000, 3 * 2**20])
def test_a_cache_that_callgrind_cannot_simulate_is_refused(size):
    with pytest.raises(ValueError, match="power of two of at least 32,768"):
        Callgrind(size)


def test_without_valgrind_or_its_headers_it_says_what_to_install(tmp_path, monkeypatch):
    one = trial("sdpa", SMALL)
    monkeypatch.setattr(compiled, "why_not", lambda *_, **__: "gcc ended with exit code 1: no valgrind/callgrind.h")
    fake(tmp_path, monkeypatch, "exit 0")
    assert "no valgrind/callgrind.h; valgrind's headers and a C compiler are needed" in Callgrind().why_not(one)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "apt-get install valgrind gcc libc6-dev" in Callgrind().why_not(one)
