"""What holds for all probes, and for `measure`: correctness first, and a row for every metric whatever happens."""
from itertools import chain
from types import SimpleNamespace

import pytest
from made_variants import SMALL, compare, honest, made, of

from kvlab.attention import Comparison, Inputs, trial
from kvlab.kv.cache import Layout
from kvlab.probes import _base, measure, probes
from kvlab.probes._base import Watch, in_order
from kvlab.probes.kernel_error import KernelError
from kvlab.probes.roofline import Roofline
from kvlab.probes.timer import Timer
from kvlab.record.reading import Reading, table
from kvlab.studies._run import studies


def probe(name, needs=(), metrics=None, measure=lambda self, bench: (), why_not=lambda self, trial: None):
    return type(name, (), dict(name=name, needs=needs, metrics=metrics or {}, rotates=False, measure=measure,
                               why_not=why_not))()


def usual():
    """What runs where nothing is asked for."""
    return [probes[n] for n in probes if not getattr(probes[n], "on_request", False)]


def fast():
    from kvlab.probes.ceilings import Ceilings
    from kvlab.probes.nvml import Nvml
    return [probes[n]() for n in probes if n not in ("timer", "ceilings", "nvml")] + [
        Timer(cap_s=0.02), Ceilings(samples=2), Nvml(window_s=0.05)]


def test_a_metric_has_one_unit_in_the_whole_project():
    units = {}
    declared = chain(*(probes[n].metrics.items() for n in probes),
                     *(getattr(studies[n], "METRICS", {}).items() for n in studies))
    for metric, unit in declared:
        assert units.setdefault(metric, unit) == unit, metric
    assert len(units) > 20


@pytest.mark.parametrize("name", list(probes))
def test_a_probe_is_named_by_its_file_and_made_without_arguments(name):
    kind = probes[name]
    assert kind.name == name and kind.__doc__ and isinstance(kind.rotates, bool)
    assert all(n in list(probes) for n in kind.needs) and kind.metrics
    assert kind() == kind()                                          # a frozen dataclass of knobs
    assert kind().why_not(trial("naive", SMALL)) is None or len(kind().why_not(trial("naive", SMALL))) > 20


def test_needs_form_no_circle_and_kernel_error_comes_first():
    ordered = [p.name for p in in_order([probes[n]() for n in reversed(list(probes))])]
    assert ordered[0] == "kernel_error" and sorted(ordered) == sorted(probes)
    for name in ordered:
        assert all(ordered.index(need) < ordered.index(name) for need in probes[name].needs)


def test_a_need_that_is_not_among_the_chosen_is_no_obstacle():
    assert [p.name for p in in_order([Roofline(), Timer()])] == ["timer", "roofline"]


def test_a_circle_is_said():
    with pytest.raises(ValueError, match="circle: a, b"):
        in_order([probe("a", needs=("b",)), probe("b", needs=("a",))])


def test_every_metric_of_every_probe_is_there_for_every_trial_whatever_happens():
    def broken(trial, inputs):
        raise RuntimeError("x")
    paged = Layout(block_size=16)
    comparison = Comparison((
        trial(honest(), SMALL), trial(made("wrong", lambda call, inputs: call() * 2), SMALL),
        trial(made("broken", prepare=broken), SMALL), trial("sdpa", SMALL, layout=paged)))
    rows = measure(comparison, fast())
    table(rows)                                                      # every row is one of the result table's
    whole = {r["metric"] for r in rows if r["scope"] == "comparison"}
    assert whole == {"read_ceiling", "copy_ceiling", "matmul_ceiling"}
    for one in comparison.trials:
        own = [r["metric"] for r in rows if r["case_id"] == one.case_id]
        assert sorted(own) == sorted(m for p in fast() for m in p.metrics if m not in whole)
    names = ("honest", "wrong", "broken", "sdpa")
    status = {name: {r["status"] for r in rows if r["variant"] == name} for name in names}
    assert status == {"honest": {"ok"}, "wrong": {"failed"}, "broken": {"failed"}, "sdpa": {"skipped"}}
    assert {r["comparison_id"] for r in rows} == {comparison.comparison_id}


def test_a_comparison_of_skipped_trials_alone_has_all_its_rows():
    comparison = Comparison((trial("sdpa", SMALL, layout=Layout(block_size=16)), trial("naive", SMALL,
                                                                                            layout=Layout(block_size=16))))
    rows = measure(comparison)
    assert {r["status"] for r in rows} == {"skipped"} and len(rows) == 2 * sum(len(p.metrics) for p in usual())
    assert all("contiguous caches only" in r["error"] for r in rows)


def test_a_workload_larger_than_memory_is_refused_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr(_base, "free_memory", lambda: 12_345)
    monkeypatch.setattr(Comparison, "inputs", lambda self, copies: pytest.fail("allocated"))
    comparison = compare(honest(), "naive")
    rows = measure(comparison)
    assert {r["status"] for r in rows} == {"oom"} and len(rows) == 2 * sum(len(p.metrics) for p in usual())
    assert f"needs {comparison.nbytes(1):,} bytes, 12,345 are free" in rows[0]["error"]


def test_what_fits_once_is_measured_warm_rather_than_refused(monkeypatch):
    comparison = compare(honest(), workload=SMALL)
    needed = comparison.nbytes(1)
    taken = []
    inputs = Comparison.inputs
    monkeypatch.setattr(Comparison, "inputs", lambda self, copies: taken.append(copies) or inputs(self, copies))
    monkeypatch.setattr(_base, "rotation", lambda *_: 50)
    monkeypatch.setattr(_base, "free_memory", lambda: needed + 1)
    rows = measure(comparison, [KernelError(), Timer(cap_s=0.02)])
    assert taken == [1] and {r["status"] for r in rows} == {"ok"}


def test_inputs_that_cannot_be_made_are_rows_and_not_an_exception(monkeypatch):
    def refused(self, copies):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
    monkeypatch.setattr(Comparison, "inputs", refused)
    rows = measure(compare(honest()), [KernelError(), Roofline()])
    assert {r["status"] for r in rows} == {"oom"} and len(rows) == 1 + len(Roofline.metrics)


def test_only_a_rotating_probe_gets_more_than_one_copy(monkeypatch):
    taken = []
    inputs = Comparison.inputs
    monkeypatch.setattr(Comparison, "inputs", lambda self, copies: taken.append(copies) or inputs(self, copies))
    monkeypatch.setattr(_base, "last_level_cache", lambda: (2**14, "test"))
    measure(compare(honest()), [KernelError()])
    measure(compare(honest()), [KernelError(), Timer(cap_s=0.02)])
    assert taken == [1, 6]                                           # K/V of 16 KiB: five caches and one


def test_a_probe_that_breaks_costs_its_own_metrics_only():
    def half(self, bench):
        yield bench.trials[0], Reading("half", 1, "count", "measured")
        raise RuntimeError("the sensor fell off")
    rows = measure(compare(honest(), "naive"), [KernelError(), Roofline(), probe("half", metrics={"half": "count"},
                                                                               measure=half)])
    ok, broke = of(rows, "half")
    assert ok["value"] == 1 and broke["status"] == "failed"
    assert "probe half broke: RuntimeError: the sensor" in broke["error"]
    assert {r["status"] for r in rows if r["metric"] != "half"} == {"ok"}


def test_a_probe_that_says_nothing_leaves_a_row_that_says_so():
    (row,) = of(measure(compare(honest()), [probe("mute", metrics={"mute": "count"})]), "mute")
    assert row["kind"] == "missing" and row["note"] == "the probe mute gave no reading of it"


def test_a_probe_that_cannot_run_is_missing_for_the_trials_concerned(monkeypatch):
    def count(self, bench):
        for one in bench.trials:
            yield one, Reading("count", 1, "count", "measured")
    picky = probe("picky", metrics={"count": "count"}, measure=count,
                  why_not=lambda self, trial: "not for naive" if trial.variant.ref == "naive" else None)
    rows = of(measure(compare(honest(), "naive"), [KernelError(), picky, Roofline()]), "count")
    assert [(r["variant"], r["kind"]) for r in rows] == [("honest", "measured"), ("naive", "missing")]
    assert rows[1]["note"] == "not for naive" and rows[1]["status"] == "ok"


def test_a_trial_that_brought_a_process_down_is_not_run_again_and_all_is_watched():
    def never(trial, inputs):
        pytest.fail("run again")
    seen, comparison = [], compare(made("culprit", prepare=never), honest())
    culprit, other = comparison.trials
    watch = Watch(lambda case_id, stage: seen.append((case_id, stage)), lambda: pytest.fail("nothing is fatal"),
                  {culprit.case_id: ("oom", "it was killed")})
    rows = measure(comparison, [KernelError(), Roofline()], watch=watch)
    assert {(r["status"], r["error"]) for r in rows if r["case_id"] == culprit.case_id} == {("oom", "it was killed")}
    assert {r["status"] for r in rows if r["case_id"] == other.case_id} == {"ok"}
    assert seen == [(other.case_id, "loading"), ("", "inputs"), ("", "kernel_error"), (other.case_id, "kernel_error"),
                    (other.case_id, "kernel_error"), ("", "roofline"), (other.case_id, "roofline")]


def test_a_class_that_does_not_load_is_a_failed_trial(tmp_path):
    file = tmp_path / "bad_import.py"
    file.write_text("raise SystemExit('not\\ntoday')\nclass Mine: pass\n")
    rows = measure(compare(f"{file}:Mine", honest(), kv_format="bf16"), [KernelError()])
    by = {r["variant"]: r for r in rows}
    assert by["honest"]["status"] == "ok" and by["honest"]["format_path"] == "decoded"
    assert by["Mine"]["error"] == "SystemExit: not today" and by["Mine"]["format_path"] is None


def test_memory_and_cache_are_those_of_the_device(monkeypatch):
    import torch
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (77, 100))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=5))
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    monkeypatch.setattr(_base, "free_memory", lambda: 1000)
    monkeypatch.setattr(_base, "last_level_cache", lambda: (50, "test"))
    assert _base.room_on("cpu") == (1000, 50) and not emptied
    assert _base.room_on("cuda:1") == (77, 5) and emptied            # what torch only keeps is free


def test_numbers_of_a_gpu_are_about_that_gpu(monkeypatch):
    import torch
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows = measure(Comparison((trial("naive", SMALL, device="cuda"),)), [KernelError()])
    assert rows[0]["status"] == "skipped" and "torch sees no CUDA device" in rows[0]["error"]
    two_gpus(monkeypatch)

    def hardware(device):
        bench = _base.Bench(Comparison((trial("naive", SMALL, device=device),)), [], {})
        bench.readings.append((None, Reading("read_ceiling", 1, "B/s", "measured")))
        return _base._rows(bench)[0]["hardware"]
    assert hardware("cuda") == "Fake cuda" and hardware("cuda:1") == "Fake cuda:1"
    assert not hardware("cpu").startswith("Fake") and not hardware("cuda:2").startswith("Fake")


def two_gpus(monkeypatch):
    import torch
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"Fake {device}")


@pytest.mark.parametrize("device, entered", [("cuda:1", ["cuda:1"]), ("cuda", ["cuda"]), ("cpu", []), ("cuda:2", [])])
def test_the_device_of_a_comparison_is_the_current_one_while_it_is_measured(monkeypatch, device, entered):
    import torch
    two_gpus(monkeypatch)
    current, during = [], []

    class Current:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            current.append(self.name)

        def __exit__(self, *_):
            current.remove(self.name)

    def opened(comparison, chosen, artifacts, watch):
        during.extend(current)
        return _base.Bench(comparison, [], {})
    monkeypatch.setattr(torch.cuda, "device", Current)
    monkeypatch.setattr(_base, "_open", opened)
    measure(Comparison((trial("naive", SMALL, device=device),)), [])
    assert during == entered and current == []


def test_a_gpu_that_is_not_there_is_said_and_not_raised(monkeypatch):
    two_gpus(monkeypatch)
    (row,) = measure(Comparison((trial("naive", SMALL, device="cuda:2"),)), [KernelError()])
    assert row["status"] == "skipped" and "there is no cuda:2; torch sees 2" in row["error"]


STICKY = "CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize("device, text, fatal, status", [
    ("cuda", STICKY, 1, "failed"), ("cuda", "CUDA error: out of memory", 0, "oom"),
    ("cuda", "CUDA out of memory. Tried to allocate 2 GiB", 0, "oom"), ("cuda", "mask of another shape", 0, "failed"),
    ("cpu", STICKY, 0, "ok")])
def test_an_error_of_a_gpu_is_its_trials_and_ends_the_process_where_it_sticks(monkeypatch, device, text, fatal, status):
    import torch

    def synchronize():
        raise RuntimeError(text)                                    # a kernel that was launched errs here at the latest
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    said, ended = [], []
    one = trial("naive", SMALL, device=device)
    watch = Watch(lambda case_id, stage: said.append((case_id, stage)), lambda: ended.append(list(said)))
    bench = _base.Bench(Comparison((one,)), [one], {}, watch=watch, stage="timer")
    with bench.on(one):
        pass
    assert len(ended) == fatal and bench.failures.get(one, ("ok",))[0] == status
    told = [(one.case_id, "timer"), *[(one.case_id, f"timer: RuntimeError: {STICKY}")] * fatal]
    assert said == told and all(before == told for before in ended)  # it is said before the process ends


def test_what_a_sentence_of_ours_says_is_not_named_as_an_exception():
    comparison = compare(honest(), honest("other"))
    bench = _base.Bench(comparison, list(comparison.trials), {})
    for one, error in zip(comparison.trials, (_base.Broken("the output is wrong"), ValueError("of theirs"))):
        with bench.on(one):
            raise error
    assert list(bench.failures.values()) == [("failed", "the output is wrong"), ("failed", "ValueError: of theirs")]


def test_the_calls_of_a_trial_share_one_workspace_and_trials_share_none(monkeypatch):
    given = []
    workspace = Inputs.workspace

    def noted(self, name, *size, dtype):
        given.append((name, workspace(self, name, *size, dtype=dtype)))
        return given[-1][1]
    monkeypatch.setattr(Inputs, "workspace", noted)
    one, again = (trial("paged_gather", SMALL, layout=Layout(block_size=16), replica=i) for i in range(2))
    comparison = Comparison((one, again))
    copies = comparison.inputs(3)[one.kv_format, one.layout]
    spaces, kept = {}, []                                            # kept: or a freed one's id may come again
    for of_trial in (one, again):
        calls = of_trial.prepare(copies)
        spaces[of_trial] = {name: {id(space) for n, space in given if n == name} for name, _ in given}
        assert len(given) == 3 * len(spaces[of_trial]) >= 6
        kept.append(list(given))
        given.clear()
        alone = [of_trial.prepare([copy])[0]() for copy in copies]
        for call, expected in zip(calls, alone):                     # and each call still reads its own copy
            assert call().equal(expected)
        given.clear()
    assert all(len(space) == 1 for of_trial in spaces.values() for space in of_trial.values())
    assert all(not spaces[one][name] & spaces[again][name] for name in spaces[one])
    assert all(copy.scratch == {} for copy in copies)


def test_hardware_is_the_name_of_the_processor_or_of_the_gpu_behind_a_device(monkeypatch):
    import torch

    from kvlab.record.environment import cpu_name
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU of {device}")
    assert _base.hardware("cpu") == cpu_name() and _base.hardware("cuda:1") == "GPU of cuda:1"
    assert _base.hardware("cuda:2") == cpu_name()                       # no such GPU: nothing can have run there
