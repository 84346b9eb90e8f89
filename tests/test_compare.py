"""kvlab compare: the interval of a ratio, what it allows to say, and which rows stand against each other."""
import json
import math
import sys
from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvlab
import kvlab.comparing
from kvlab.attention import Comparison, trial
from kvlab.cli import main
from kvlab.comparing import as_json, compare, print_comparison, summary
from kvlab.comparing._ratio import Limits, in_cycles, interval, ratio_interval, verdict
from kvlab.kv.cache import Layout
from kvlab.record.environment import Manifest
from kvlab.record.export import write_frame
from kvlab.record.reading import Reading, failed, missing
from kvlab.record.store import RunStore, find_run
from kvlab.shapes import AttentionShape, Workload


def called(monkeypatch, capsys, *arguments):
    """(exit code, stdout, stderr) of the command in this process."""
    monkeypatch.setattr(sys, "argv", ["kvlab", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, *capsys.readouterr()


ENVIRONMENT = {"cpu": "a CPU", "logical_cores": 8, "load_average": 0.1, "torch": "2.13.0", "kvlab": "0.1.0",
               "git_commit": "a" * 40, "gpus": []}
SHAPE = AttentionShape(8, 2, 64)


def reading(seconds, **more):
    """A measured time whose interval is 1 % wide on both sides."""
    return Reading("latency_s", seconds, "s", "measured", source="timer",
                   **{**dict(method="timer:thread_cpu", hardware="a CPU", low=seconds * 0.99, high=seconds * 1.01,
                             n=60), **more})


def samples(seconds, rng, rounds=4, per_round=15):
    """Times of rounds that drift by 1 %, with 2 % scatter inside a round."""
    return [seconds * (1 + rng.normal(0, 0.01)) * (1 + rng.normal(0, 0.02, per_round)) for _ in range(rounds)]


def trials(names, kv_len=64, replicas=(0,), layout=None, **more):
    workload = Workload.decode(SHAPE, kv_len=kv_len)
    return [trial(name, workload, replica=r, **({"layout": layout} if layout else {}), **more)
            for name in names for r in replicas]


@pytest.fixture
def make(tmp_path):
    """A run of comparisons: {trial: readings or (reading, rounds of samples)}; returns its directory."""
    def run(*comparisons, environment=ENVIRONMENT, study="memory_wall", run_id=None, variants=()):
        manifest = Manifest(study=study, environment=environment, variants=list(variants),
                            **({"run_id": run_id} if run_id else {}))
        store = RunStore.create(tmp_path / "profiles", study, manifest)
        for found in comparisons:
            comparison, rows, kept = Comparison(tuple(found)), [], []
            for one, given_ in found.items():
                given_ = given_ if isinstance(given_, list) else [given_]
                for item in given_:
                    artifact = ""
                    if isinstance(item, tuple):
                        item, rounds = item
                        artifact = f"samples/{comparison.comparison_id}.parquet"
                        kept += [pd.DataFrame(dict(case_id=one.case_id, round=i, calls=1, seconds=r))
                                 for i, r in enumerate(rounds)]
                    rows.append({"case_id": one.case_id, **one.columns(), **asdict(item),
                                 "artifact": item.artifact or artifact})
            if kept:
                (store.path / "samples").mkdir(exist_ok=True)
                pd.concat(kept).to_parquet(store.path / "samples" / f"{comparison.comparison_id}.parquet")
            store.append(comparison.comparison_id, rows)
        store.close()
        return store.path
    return run


def times(factor=1.0, names=("naive", "sdpa"), kv_len=64, seed=0, replicas=(0,), base=1e-3):
    """One comparison whose sdpa is `factor` times as slow as usual."""
    rng, found = np.random.default_rng(seed), {}
    for one in trials(names, kv_len) + (trials(["sdpa"], kv_len, replicas[1:]) if replicas[1:] else []):
        seconds = base * (factor if one.variant.ref == "sdpa" else 1)
        found[one] = (reading(seconds), samples(seconds, rng))
    return found


# ------------------------------------------------------------------------------------------------ what may be said

@given(st.floats(0.2, 5), st.floats(1, 1.5), st.floats(0, 0.5), st.none() | st.floats(0, 0.5), st.booleans(),
       st.booleans())
def test_swapping_a_and_b_swaps_the_verdict_and_noise_never_makes_the_same(low, width, margin, noise, runs, time):
    mirrored = {"SLOWER": "FASTER", "FASTER": "SLOWER", "MORE": "LESS", "LESS": "MORE"}
    high, limits = low * width, Limits(margin, noise, runs)
    if any(math.isclose(end, edge, rel_tol=1e-9) for end in (low, high, 1 / low, 1 / high)
           for edge in (1 + margin, 1 + limits.beyond)):
        return                                           # on an edge, rounding decides
    said = verdict(low, high, limits, time)
    assert verdict(1 / high, 1 / low, limits, time) == mirrored.get(said, said)
    assert said in (("FASTER", "SLOWER") if time else ("LESS", "MORE")) + ("SAME", "AMBIGUOUS")
    if said == "SAME":
        assert 1 / (1 + margin) <= low and high <= 1 + margin and (noise is None or noise <= margin)
    elif said != "AMBIGUOUS":
        assert max(low, 1 / high) > 1 + (noise or 0)


@pytest.mark.parametrize("low, high, noise, said", [
    (0.97, 1.03, 0.01, "SAME"), (0.97, 1.06, 0.01, "AMBIGUOUS"), (1.02, 1.08, 0.01, "SLOWER"),
    (1.02, 1.08, 0.03, "AMBIGUOUS"), (1.06, 1.08, 0.05, "SLOWER"), (0.80, 0.94, 0.05, "FASTER"),
    (0.2, 5.0, 0.01, "AMBIGUOUS"), (None, None, 0.01, "AMBIGUOUS"), (39.0, math.inf, None, "SLOWER"),
    (1.02, 1.04, 0.01, "SAME"), (1.25, 1.35, 0.4, "AMBIGUOUS"), (0.99, 1.01, 0.06, "AMBIGUOUS"),
    (1.45, 1.5, 0.4, "SLOWER"), (1.02, 1.08, None, "AMBIGUOUS"), (0.99, 1.01, None, "SAME")])
def test_same_is_a_statement_about_the_whole_interval_not_a_lack_of_evidence(low, high, noise, said):
    assert verdict(low, high, Limits(0.05, noise, between_runs=False), True) == said


@pytest.mark.parametrize("low, noise, said", [(1.04, 0.01, "AMBIGUOUS"), (1.06, 0.01, "SLOWER"),
                                              (1.06, 0.1, "AMBIGUOUS"), (1.11, 0.1, "SLOWER")])
def test_two_runs_differ_beyond_the_margin_and_beyond_the_resolution(low, noise, said):
    assert verdict(low, low + 0.1, Limits(0.05, noise, between_runs=True), True) == said


def test_the_interval_of_equal_trials_holds_one_although_rounds_differ():
    """Rounds that each have their own level: an interval from pooled samples is too narrow, this one is not."""
    rng, held, pooled = np.random.default_rng(1), 0, 0
    for _ in range(100):
        a, b = (samples(1.0, rng, rounds=5, per_round=20) for _ in range(2))
        low, high = ratio_interval(a, b, together=False, draws=300)
        held += low <= 1 <= high
        low, high = ratio_interval([np.concatenate(a)], [np.concatenate(b)], together=False, draws=300)
        pooled += low <= 1 <= high
    assert held >= 88 and pooled < 75


def test_what_a_round_brings_to_both_sides_cancels_only_where_they_were_interleaved():
    rng = np.random.default_rng(2)
    levels = [1, 1.3, 0.8, 1.1]
    a, b = ([level * (1 + rng.normal(0, 0.005, 20)) for level in levels] for _ in range(2))
    (low, high), (wide_low, wide_high) = (ratio_interval(a, b, together) for together in (True, False))
    assert 0.99 < low < 1.01 and 0.99 < high < 1.01 and wide_high / wide_low > 1.5


# ------------------------------------------------------------------------------------------------ two runs

def test_two_runs_case_by_case(make):
    a = make(times(replicas=(0, 1)), times(kv_len=128), run_id="20260101T000000Z-aaaaaa")
    b = make(times(1.5, seed=7, replicas=(0, 1)), times(1.0, seed=8, kv_len=128), run_id="20260102T000000Z-bbbbbb")
    found = compare(a, b).set_index(["variant", "kv_len"])
    assert found["verdict"].to_dict() == {("naive", 64): "SAME", ("sdpa", 64): "SLOWER", ("naive", 128): "SAME",
                                          ("sdpa", 128): "SAME"}
    row = found.loc[("sdpa", 64)]
    assert row["a"] == 1e-3 and row["ratio"] == pytest.approx(1.5) and 1.4 < row["low"] < 1.5 < row["high"] < 1.6
    assert row["note"] == "" and found.attrs["warnings"] == [] and found.attrs["resolution"] < 0.05
    back = compare(b, a).set_index(["variant", "kv_len"])
    assert back.loc[("sdpa", 64), "verdict"] == "FASTER"
    assert summary(compare(a, b)) == ("latency_s of B (20260102T000000Z-bbbbbb) against A (20260101T000000Z-aaaaaa): "
                                      "1 SLOWER, 3 SAME")


def test_where_an_aa_pair_differs_by_more_than_the_margin_nothing_is_the_same(make, capsys):
    one = trials(["sdpa"], replicas=(0, 1))
    a = make({one[0]: reading(1.0), one[1]: reading(1.2)}, run_id="20260101T000000Z-aaaaaa")
    b, c = (make({one[0]: reading(s)}, run_id=f"2026020{s:.0f}T000000Z-aaaaaa") for s in (1.0, 2.0))
    found = compare(a, b)
    assert found.attrs["resolution"] == found.attrs["beyond"] == pytest.approx(1.2 * 1.01 / 0.99 - 1)
    assert found["verdict"].tolist() == ["AMBIGUOUS"] and found.attrs["resolves_margin"] is False
    assert found["note"][0] == "the run cannot resolve the margin: A/A 22.4 %, margin 5.0 %; from the stored intervals"
    print_comparison(found)
    assert "SAME: never here, an A/A pair differs by more than the margin of 5.0 %; FASTER, SLOWER: it is beyond " \
           "22.4 %; AMBIGUOUS: neither; A/A resolution 22.4 %" in capsys.readouterr().out
    assert compare(a, b, margin=0.3)["verdict"].tolist() == ["SAME"]
    slower = compare(a, c)
    assert slower["verdict"].tolist() == ["SLOWER"] and "margin" not in slower["note"][0]


def test_the_interval_is_called_what_it_is(make, capsys):
    where = make(times(1.5, replicas=(0, 1)), run_id="20260101T000000Z-aaaaaa")
    for arguments, name in (((where, where), "within-run interval"), (("naive", "sdpa"), "95 % interval")):
        found = compare(*arguments, run=where if name.startswith("95") else None)
        print_comparison(found)
        assert as_json(found)["interval"] == name and name in capsys.readouterr().out


def test_two_runs_must_differ_by_more_than_the_margin_two_variants_by_more_than_the_resolution(make):
    plain, naive = trials(["sdpa"], replicas=(0, 1)), trials(["naive"])[0]

    def run(seconds, day):
        return make({plain[0]: reading(1.0), plain[1]: reading(1.0), naive: reading(seconds)},
                    run_id=f"2026010{day}T000000Z-aaaaaa")
    a, b = run(1.0, 1), run(1.065, 2)
    assert compare("sdpa", "naive", run=b)["verdict"].tolist() == ["SLOWER"]
    found = compare(a, b)
    assert found.set_index("variant")["verdict"].to_dict() == {"sdpa": "SAME", "naive": "AMBIGUOUS"}
    assert (round(found.attrs["resolution"], 3), found.attrs["beyond"]) == (0.02, 0.05)


def test_without_an_aa_pair_the_margin_stands_for_the_resolution(make):
    one = trials(["sdpa"])[0]
    a, b = (make({one: reading(s)}, run_id=f"2026010{i}T000000Z-aaaaaa") for i, s in enumerate((1.0, 1.06)))
    assert compare(a, b)["verdict"].tolist() == ["AMBIGUOUS"]
    assert compare(a, b, margin=0.01)["verdict"].tolist() == ["SLOWER"]
    assert "no A/A pair" in " ".join(compare(a, b).attrs["warnings"])


def test_a_single_sample_decides_nothing(make):
    one = trials(["sdpa"])[0]
    a = make({one: reading(1.0, low=None, high=None, n=1)}, run_id="20260101T000000Z-aaaaaa")
    b = make({one: (reading(9.0), samples(9.0, np.random.default_rng(0)))}, run_id="20260102T000000Z-aaaaaa")
    found = compare(a, b).iloc[0]
    assert (found["verdict"], found["note"]) == ("AMBIGUOUS", "A without an interval")


def test_cases_of_one_run_only_are_listed_with_what_became_of_them(make):
    usual, other = times(), times(kv_len=256)
    a = make(usual, other, run_id="20260101T000000Z-aaaaaa")
    sdpa = next(t for t in usual if t.variant.ref == "sdpa")
    b = make({**usual, sdpa: failed("latency_s", "s", "it fell over")}, times(kv_len=512),
             run_id="20260102T000000Z-aaaaaa")
    found = compare(a, b)
    assert len(found) == 1 and found.attrs["only_in_b"] == ["variant naive, kv_len 512", "variant sdpa, kv_len 512"]
    assert found.attrs["only_in_a"] == ["variant sdpa, kv_len 64 (there: it fell over)", "variant naive, kv_len 256",
                                        "variant sdpa, kv_len 256"]
    assert "1 SAME; 3 only in A; 2 only in B" in summary(found)


def test_measured_is_not_compared_with_modelled(make):
    one = trials(["sdpa"])[0]
    a = make({one: reading(1.0)}, run_id="20260101T000000Z-aaaaaa")
    b = make({one: Reading("latency_s", 1.0, "s", "modelled")}, run_id="20260102T000000Z-aaaaaa")
    found = compare(a, b)
    assert found.empty and found.attrs["kinds_differ"] == ["the only case: measured in A, modelled in B"]
    assert "no case in common; 1 of two kinds, not compared" in summary(found)


def test_the_strongest_kind_is_taken_and_a_second_replica_is_not_a_case(make):
    one = trials(["sdpa"], replicas=(0, 1))
    rows = {one[0]: [Reading("latency_s", 9.0, "s", "modelled"), reading(1.0)], one[1]: reading(1.0)}
    a = make(rows, run_id="20260101T000000Z-aaaaaa")
    found = compare(a, a)
    assert found["kind"].tolist() == ["measured"] and found["a"].tolist() == [1.0]
    assert "A and B are the same run" in found.attrs["warnings"]


def test_every_difference_of_the_environments_is_named(make):
    a = make(times(), run_id="20260101T000000Z-aaaaaa", variants=[dict(ref="my.py:Mine", sha256="1")])
    b = make(times(), run_id="20260102T000000Z-aaaaaa", variants=[dict(ref="my.py:Mine", sha256="2")],
             environment={**ENVIRONMENT, "cpu": "another", "torch": "2.14.0", "load_average": 20.0,
                          "gpus": [{"name": "H200"}], "extra": None})
    said = compare(a, b).attrs["warnings"]
    assert said == ["cpu differs: a CPU / another", 'gpus differs: [] / [{"name": "H200"}]',
                    "torch differs: 2.13.0 / 2.14.0", "the source of my.py:Mine differs",
                    "the machine was busy when 20260102T000000Z-aaaaaa began: load 20.0 on 8 cores",
                    "no A/A pair was measured, so the resolution is unknown; the margin stands for it"]


def test_a_file_of_results_has_no_environment_and_differing_clocks_are_said(make):
    one = trials(["sdpa"])[0]
    a = make({one: reading(1.0)}, run_id="20260101T000000Z-aaaaaa")
    other = Reading("latency_s", 1.0, "s", "measured", method="timer:wall", hardware="else", low=0.99, high=1.01)
    b = make({one: other}, run_id="20260102T000000Z-aaaaaa") / "readings.parquet"
    found = compare(a, b)
    assert found.attrs["warnings"][:2] == ["hardware differs: a CPU / else; the ratio is between the two machines",
                                           "the environment of readings.parquet is unknown: it is no run directory"]
    assert "method: timer:thread_cpu / timer:wall" in found["note"][0]


def test_runs_of_two_machines_are_headed_by_both(make, capsys):
    one = trials(["sdpa"])[0]
    a = make({one: reading(1.0)}, run_id="20260101T000000Z-aaaaaa")
    b = make({one: reading(1.5, hardware="NVIDIA H200")}, run_id="20260102T000000Z-bbbbbb")
    print_comparison(compare(a, b))
    out = capsys.readouterr().out
    assert out.startswith("A = 20260101T000000Z-aaaaaa (a CPU), B = 20260102T000000Z-bbbbbb (NVIDIA H200); all: ")
    assert "hardware differs: a CPU / NVIDIA H200; the ratio is between the two machines" in out


# ------------------------------------------------------------------------------------------------ cycles and sources

def on_gpu(seconds, hz, spread=0.01, **more):
    """A time and its cycles on a GPU whose clock stood within the spread."""
    time = reading(seconds, method="timer:cuda_events", **more)
    cycles = Reading("cycles", seconds * hz, "count", "measured", method="derived", source="timer",
                     low=time.low * hz * (1 - spread), high=time.high * hz * (1 + spread))
    return [time, cycles]


@pytest.mark.parametrize("hz, said, note", [
    (1.5e9, "SLOWER", ""),                                           # the same clock
    (1.25e9, "AMBIGUOUS", "time separates, cycles do not: the clocks differed; "),      # the same number of cycles
    (1.0e9, "AMBIGUOUS", "time separates, cycles do not: the clocks differed; "),       # fewer cycles
    (1.9e9, "SLOWER", "")])
def test_slower_needs_time_and_cycles(make, hz, said, note):
    one = trials(["sdpa"])[0]
    a = make({one: on_gpu(1.0, 1.5e9)}, run_id="20260101T000000Z-aaaaaa")
    b = make({one: on_gpu(1.2, hz)}, run_id="20260102T000000Z-aaaaaa")
    found, back = compare(a, b).iloc[0], compare(b, a).iloc[0]
    assert found["verdict"] == said and found["note"] == note + "from the stored intervals"
    assert back["verdict"] == {"SLOWER": "FASTER"}.get(said, said)
    assert compare(a, b, metric="cycles")["kind"].tolist() == ["measured"]


def test_time_alone_decides_where_a_side_has_no_cycles_and_the_clocks_scatter_widens_the_interval(make):
    one = trials(["sdpa"])[0]
    a = make({one: on_gpu(1.0, 1.5e9)}, run_id="20260101T000000Z-aaaaaa")
    b = make({one: [on_gpu(1.2, 1.0e9)[0], missing("cycles", "count", "no NVML")]}, run_id="20260102T000000Z-aaaaaa")
    c = make({one: on_gpu(1.2, 1.5e9, spread=0.1)}, run_id="20260103T000000Z-aaaaaa")
    assert compare(a, b)["verdict"].tolist() == ["SLOWER"]
    assert compare(a, c)["verdict"].tolist() == ["AMBIGUOUS"]        # 1.2 / 1.1 is no clear distance from 1


def test_the_interval_in_cycles_is_that_in_time_times_that_of_the_clocks():
    time, cycles = dict(value=2.0, low=1.0, high=4.0), dict(value=20.0, low=8.0, high=48.0)       # clock 8 to 12
    bare = dict(value=2.0, low=None, high=None)
    assert in_cycles(1.5, 2.0, time, time, cycles, cycles) == (pytest.approx(1.5 * 8 / 12), pytest.approx(2.0 * 12 / 8))
    assert in_cycles(1.5, 2.0, bare, bare, {**bare, "value": 4.0}, {**bare, "value": 6.0}) == (2.25, 3.0)


def test_throttled_samples_count_in_the_ratio_only_if_they_count_in_the_reading(make):
    one = trials(["sdpa"])[0]
    rng = np.random.default_rng(0)
    kept = [rng.normal(1.0, 0.01, 15) for _ in range(4)]
    slow = [rng.normal(3.0, 0.01, 100)]
    for n, ratio in ((60, 1.0), (160, 3.0)):
        a = make({one: (reading(1.0), kept)}, run_id=f"20260101T000000Z-aaaa{n:02x}")
        b = make({one: (reading(ratio, n=n), kept + slow)}, run_id=f"20260102T000000Z-bbbb{n:02x}")
        path = next((b / "samples").iterdir())
        frame = pd.read_parquet(path)
        flags = pd.array([None if r == 0 else r == 4 for r in frame["round"]], "boolean")        # None: nobody looked
        frame.assign(throttled=flags).to_parquet(path)
        found = compare(a, b).iloc[0]
        assert ratio * 0.98 < found["low"] < found["high"] < ratio * 1.02 or n == 160 and found["high"] > 2.5
        assert found["note"] == ""                                   # from the samples


def traffic(value, source, method, kind="measured"):
    return Reading("hbm_bytes", value, "B", kind, method=method, source=source, low=value * 0.99, high=value * 1.01)


def test_of_several_sources_those_that_both_sides_have_are_compared_and_the_strongest_of_them(make):
    one = trials(["sdpa"])[0]
    ncu, gpm, model = ((1.0, "ncu", "counter"), (1.1, "gpm", "derived"), (0.9, "roofline", "formula", "modelled"))
    a = make({one: [traffic(*model), traffic(*gpm), traffic(*ncu)]}, run_id="20260101T000000Z-aaaaaa")
    b = make({one: [traffic(2.2, *gpm[1:])]}, run_id="20260102T000000Z-aaaaaa")
    c = make({one: [traffic(3.0, "perf", "counter")]}, run_id="20260103T000000Z-aaaaaa")
    d = make({one: [traffic(*model)]}, run_id="20260104T000000Z-aaaaaa")
    same = compare(a, a, metric="hbm_bytes")
    assert same["a"].tolist() == [1.0] and same["verdict"].tolist() == ["SAME"]
    apart = compare(a, b, metric="hbm_bytes").iloc[0]
    assert (apart["a"], apart["b"], apart["verdict"]) == (1.1, 2.2, "MORE") and "source" not in apart["note"]
    other = compare(a, c, metric="hbm_bytes").iloc[0]
    assert (other["a"], other["b"]) == (1.0, 3.0) and "source: ncu / perf" in other["note"]
    assert compare(a, d, metric="hbm_bytes").attrs["kinds_differ"] == ["the only case: measured in A, modelled in B"]


def test_of_ratios_derived_from_several_counters_the_better_counter_is_compared_whichever_was_written_first(make):
    one = trials(["sdpa"])[0]

    def ratio(value, source):
        return Reading("traffic_to_model", value, "ratio", "measured", method="derived", source=source)
    a = make({one: [ratio(1.1, "gpm"), ratio(1.0, "ncu")]}, run_id="20260101T000000Z-aaaaaa")
    b = make({one: [ratio(2.2, "gpm"), ratio(3.0, "ncu")]}, run_id="20260102T000000Z-aaaaaa")
    found = compare(a, b, metric="traffic_to_model").iloc[0]
    assert (found["a"], found["b"]) == (1.0, 3.0)


def test_several_sources_do_not_make_a_variants_own_layout_several(make):
    plain, paged = trials(["sdpa"])[0], trials(["paged"])[0]
    rows = [traffic(1.0, "ncu", "counter"), traffic(1.1, "gpm", "derived")]
    found = compare("sdpa", "paged", metric="hbm_bytes", run=make({plain: rows, paged: rows}))
    assert "block_size" not in found and found["verdict"].tolist() == ["SAME"]


# ------------------------------------------------------------------------------------------------ two variants

def test_two_variants_of_the_newest_run_that_holds_both(make, tmp_path):
    make(times(9.0), run_id="20260101T000000Z-aaaaaa")
    make(times(1.5, replicas=(0, 1)), run_id="20260102T000000Z-bbbbbb")
    make(times(names=["sdpa"]), run_id="20260103T000000Z-cccccc")
    found = compare("naive", "sdpa", profiles=tmp_path / "profiles")
    assert found.attrs["run"] == "20260102T000000Z-bbbbbb" and found["verdict"].tolist() == ["SLOWER"]
    assert "variant" not in found
    older = compare("naive", "sdpa", run="aaaaaa", profiles=tmp_path / "profiles")
    assert older["ratio"].tolist() == [pytest.approx(9.0)]
    tables = compare("naive", "sdpa", run=kvlab.read_table(find_run("aaaaaa", tmp_path / "profiles")))
    assert tables["ratio"].tolist() == [pytest.approx(9.0)] and "from the stored intervals" in tables["note"][0]


def test_a_variants_own_layout_is_part_of_it_and_several_layouts_are_matched(make):
    plain, paged = trials(["sdpa"])[0], trials(["paged"])[0]
    own = compare("sdpa", "paged", run=make({plain: reading(1.0), paged: reading(2.0)},
                                            run_id="20260101T000000Z-aaaaaa"))
    assert own["verdict"].tolist() == ["SLOWER"] and "block_size" not in own
    assert "layouts differ, each variant's own: contiguous / blocks of 16, random" in own.attrs["warnings"]
    rows = {one: reading(1.0 + size / 100) for name in ("paged", "naive") for size in (8, 16)
            for one in trials([name], layout=Layout(size, "random"))}
    both = compare("paged", "naive", run=make(rows, run_id="20260102T000000Z-aaaaaa"))
    assert both["block_size"].tolist() == [8, 16] and both["verdict"].tolist() == ["SAME", "SAME"]


def test_windows_that_no_column_tells_apart_are_not_mixed_up(make):
    workloads = [Workload.decode(AttentionShape(8, 2, 64, window=w), kv_len=64) for w in (8, 16)]
    comparisons = [{trial(name, w): reading(s) for name in ("naive", "sdpa")} for w, s in zip(workloads, (1.0, 2.0))]
    found = compare("naive", "sdpa", run=make(*comparisons))
    assert found["a"].tolist() == found["b"].tolist() == [1.0, 2.0]


def test_by_columns_makes_other_cases_and_refuses_what_is_not_one(make):
    where = make(times(), times(kv_len=128), run_id="20260101T000000Z-aaaaaa")
    found = compare("naive", "sdpa", run=where, by=["kv_len"])
    assert list(found.columns[:2]) == ["kv_len", "kind"] and found["kv_len"].tolist() == [64, 128]
    with pytest.raises(ValueError, match="several readings of latency_s .*differ in .*kv_len"):
        compare("naive", "sdpa", run=where, by=["batch_size"])
    with pytest.raises(KeyError, match="Did you mean 'kv_len'"):
        compare("naive", "sdpa", run=where, by=["kv_lens"])


# ------------------------------------------------------------------------------------------------ other metrics

@pytest.mark.parametrize("a, b, low, high", [
    (dict(value=0, low=0, high=1), dict(value=40, low=39, high=41), 39, math.inf),
    (dict(value=10, kind="modelled"), dict(value=20, kind="modelled"), 2, 2),
    (dict(value=0, kind="modelled"), dict(value=0, kind="modelled"), 1, 1),
    (dict(value=0, kind="modelled"), dict(value=5, kind="modelled"), None, None),
    (dict(value=-1, low=-2, high=0), dict(value=1, low=1, high=1), None, None),
    (dict(value=5), dict(value=5), None, None)])
def test_the_interval_of_a_ratio_at_zero_exact_and_unknown(a, b, low, high):
    rows = [{"metric": "peak_extra_bytes", "low": None, "high": None, "kind": "measured", **row} for row in (a, b)]
    assert interval(None, rows[0], None, rows[1])[:2] == (low, high)


def test_bytes_are_less_or_more_and_a_bound_without_end_is_null_in_json(make):
    one = trials(["sdpa"])[0]
    a, b = (make({one: Reading("peak_extra_bytes", v, "B", "measured", low=low, high=high)},
                 run_id=f"2026010{v}T000000Z-aaaaaa") for v, low, high in ((0, 0, 1), (8, 7, 9)))
    found = compare(a, b, metric="peak_extra_bytes")
    assert found["verdict"].tolist() == ["MORE"] and found.attrs["unit"] == "B"
    case = json.loads(json.dumps(as_json(found), allow_nan=False))["cases"][0]
    assert (case["low"], case["high"], case["ratio"]) == (7, None, None)


# ------------------------------------------------------------------------------------------------ bad input

def test_samples_elsewhere_or_broken_are_left_alone(make, tmp_path):
    one = trials(["sdpa"])[0]
    outside = tmp_path / "outside.parquet"
    rng = np.random.default_rng(0)
    pd.DataFrame(dict(case_id=one.case_id, round=[0, 1] * 10, seconds=rng.random(20) + 1)).to_parquet(outside)
    a = make({one: reading(1.0, artifact="../../../outside.parquet")}, run_id="20260101T000000Z-aaaaaa")
    b = make({one: (reading(1.0), samples(1.0, rng))}, run_id="20260102T000000Z-aaaaaa")
    assert compare(a, b)["note"].tolist() == ["from the stored intervals"]
    path = next((b / "samples").iterdir())
    write_frame(pd.read_parquet(path), path)
    assert compare(b, b)["note"].tolist() == [""]
    flipped = bytearray(path.read_bytes())
    flipped[100] ^= 1
    for garbage in (flipped, b"PAR1 this is no parquet", b""):
        path.write_bytes(garbage)
        assert compare(b, b)["note"].tolist() == ["from the stored intervals"]


def test_rows_whose_case_is_no_json_are_still_matched(make):
    where = make(times(), run_id="20260101T000000Z-aaaaaa")
    table = kvlab.read_table(where)
    table["case"] = "[" * 100_000
    assert compare(table, table)["verdict"].tolist() == ["SAME", "SAME"]


def test_text_of_a_file_cannot_command_the_terminal(make, capsys):
    where = make(times(), times(kv_len=128), run_id="20260101T000000Z-aaaaaa")
    table = kvlab.read_table(where)
    evil = "sd\x1b[2Jpa\x9b31m\x07"
    table["variant"] = table["variant"].replace("sdpa", evil)
    table["method"] = "timer\x1b]0;title"
    print_comparison(compare(table, table))
    print_comparison(compare("naive", evil, run=table))
    print_comparison(compare(table, table[table["variant"] != evil]))
    out = capsys.readouterr().out
    assert "\\x1b[2J" in out and not {"\x1b", "\x9b", "\x07"} & set(out)


def test_names_that_mean_nothing_are_refused_with_what_there_is(make, tmp_path):
    profiles = tmp_path / "profiles"
    with pytest.raises(KeyError, match="has no run that could hold"):
        compare("naive", "sdpa", profiles=profiles)
    where = make(times(), run_id="20260101T000000Z-aaaaaa")
    make(times(names=["flash"]), run_id="20260101T000001Z-aaaaab")
    for arguments, sentence in (
            (("naive", "sdp"), "Did you mean 'sdpa'"), ((where, "sdpa"), "no run or file of results named 'sdpa'"),
            (("naive", "flash"), "holds both 'naive' and 'flash'"), (("2026", "naive"), "could be any of")):
        with pytest.raises(KeyError, match=sentence):
            compare(*arguments, profiles=profiles)
    with pytest.raises(KeyError, match="Did you mean 'latency_s'"):
        compare(where, where, metric="latency")
    with pytest.raises(KeyError, match="no variant in .* named 'flash'"):
        compare("naive", "flash", run=where)
    for margin in (-0.1, 1, math.nan):
        with pytest.raises(ValueError, match="margin"):
            compare(where, where, margin=margin)


# ------------------------------------------------------------------------------------------------ the doors

def test_the_function_is_reachable_beside_its_module():
    assert kvlab.compare is kvlab.comparing.compare


def test_the_command_prints_a_table_and_a_line_and_a_regression_is_no_error(make, tmp_path, monkeypatch, capsys):
    make(times(1.5, replicas=(0, 1)), {**times(kv_len=128), **{trials(["flash"], 128)[0]: reading(1.0)}})
    monkeypatch.chdir(tmp_path)
    code, out, _ = called(monkeypatch, capsys, "compare", "naive", "sdpa")
    assert code == 0 and out.splitlines()[-1].endswith("1 SLOWER, 1 SAME") and "1.500" in out and "kv_len" in out
    code, out, _ = called(monkeypatch, capsys, "compare", "memory_wall", "memory_wall", "--json")
    found = json.loads(out)
    assert code == 0 and len(found["cases"]) == 5 and found["warnings"][0] == "A and B are the same run"
    code, out, err = called(monkeypatch, capsys, "compare", "naive", "nothing")
    assert code == 2 and out == "" and err.startswith("kvlab: no run, file of results or variant")


def test_long_lists_of_lone_cases_are_cut_in_print_only(make, capsys):
    a = make(*(times(kv_len=16 * n, names=["sdpa"]) for n in range(1, 10)), run_id="20260101T000000Z-aaaaaa")
    b = make(times(kv_len=16, names=["sdpa"]), run_id="20260102T000000Z-aaaaaa")
    found = compare(a, b)
    print_comparison(found)
    assert len(found.attrs["only_in_a"]) == 8 and "only in A: 3 more" in capsys.readouterr().out
    print_comparison(compare(a, make({trials(["sdpa"])[0]: missing("latency_s", "s", "no clock")},
                                     run_id="20260103T000000Z-aaaaaa")))
    assert "no case in common; 9 only in A" in capsys.readouterr().out
