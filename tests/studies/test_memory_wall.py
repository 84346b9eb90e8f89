"""The study's cases are those of its question, and its findings are true of tables whose truth is known."""
import math
from collections import Counter
from dataclasses import asdict, replace

import numpy as np
import pytest

from kvlab.attention import Comparison, VariantRef, trial
from kvlab.catalog.gpus import gpu
from kvlab.catalog.models import model, models
from kvlab.record.reading import Reading, failed, table
from kvlab.record.statistics import aa_resolution, fit
from kvlab.registry import case_from
from kvlab.shapes import AttentionShape, Workload
from kvlab.studies import memory_wall
from kvlab.studies.memory_wall import Decomposition, cases, findings, main_ratio

CACHE = 32 * 2**20


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr(memory_wall, "last_level_cache", lambda: (CACHE, "test"))
    monkeypatch.setattr(memory_wall, "free_memory", lambda: 2**36)


def comparisons(size, phase, **options):
    return [c for c in cases(size, **options) if isinstance(c, Comparison) and c.workload.phase == phase]


def ratio(case):
    return case.workload.shape.group_ratio


def length(case):
    return max(case.workload.kv_lens)


def names(case):
    return [t.variant.ref for t in case.trials]


def test_small_is_what_the_question_asks_and_not_crossed():
    decode, prefill = comparisons("small", "decode"), comparisons("small", "prefill")
    assert len(decode) + len(prefill) <= 16
    single = [c for c in decode if c.workload.batch_size == 1]
    assert len({length(c) for c in single if ratio(c) == 8}) >= 5
    per_length = {n: {ratio(c) for c in single if length(c) == n} for n in {length(c) for c in single}}
    assert {1, 4, 8, 32} in per_length.values() and sum(len(r) > 1 for r in per_length.values()) == 1
    assert len({length(c) for c in decode if c.workload.batch_size == 4}) == 2
    assert {n for c in decode for n in names(c)} == {"naive_repeat", "naive", "sdpa", "sdpa_enable_gqa", "paged"}
    assert all(set(names(c)) == {"naive", "flash", "sdpa"} for c in prefill) and len(prefill) >= 3
    lengths = sorted(map(length, prefill))
    assert lengths[-1] >= 8 * lengths[0]


def test_small_reaches_four_times_the_cache_and_repeats_heads_at_batch_1_only():
    decode = comparisons("small", "decode")
    largest = max(max(c.cache_bytes().values()) for c in decode)
    assert 4 * CACHE <= largest < 16 * CACHE
    assert all(c.workload.batch_size == 1 for c in decode if "naive_repeat" in names(c))
    assert sum("naive_repeat" in names(c) for c in decode) >= 4


@pytest.mark.parametrize("size", memory_wall.SIZES)
def test_every_size_has_one_a_a_pair_distinct_cases_and_one_model(size):
    every = list(cases(size))
    assert len({c.comparison_id for c in every}) == len(every)
    pairs = [t.variant.ref for c in every if isinstance(c, Comparison) for t in c.trials if t.replica == 1]
    assert pairs == ["sdpa"]
    assert [c for c in every if isinstance(c, Decomposition)] == [Decomposition(model("Qwen/Qwen2-72B").name, 2048)]
    assert len({length(c) for c in comparisons(size, "decode") if ratio(c) == 8 and c.workload.batch_size == 1}) >= 4
    prompts = sorted(length(c) for c in comparisons(size, "prefill"))
    assert len(set(prompts)) == 4 and prompts[-1] == 8 * prompts[0]


def test_smoke_is_short_and_large_is_longer_than_small():
    longest = {s: max(map(length, comparisons(s, "decode"))) for s in memory_wall.SIZES}
    assert longest["smoke"] <= 2048 < longest["small"] and longest["large"] == 4 * longest["small"]


def test_little_memory_shortens_the_contexts(monkeypatch):
    longest = max(map(length, comparisons("small", "decode")))
    monkeypatch.setattr(memory_wall, "free_memory", lambda: 2**30)
    short = max(map(length, comparisons("small", "decode")))
    assert 4096 <= short < longest
    monkeypatch.setattr(memory_wall, "free_memory", lambda: 1)
    assert max(map(length, comparisons("small", "decode"))) == 4096


def test_variants_are_what_is_compared_in_both_stories():
    mine = (VariantRef("naive"), VariantRef("flash"))
    for case in comparisons("small", "decode", variants=mine) + comparisons("small", "prefill", variants=mine):
        assert set(names(case)) == {"naive", "flash"}
    pairs = [t.variant.ref for c in comparisons("small", "decode", variants=mine) for t in c.trials if t.replica]
    assert pairs == ["naive"]
    assert all(names(c) for c in comparisons("small", "decode", variants=(VariantRef("naive_repeat"),)))


def test_a_model_gives_its_own_heads_and_its_own_decomposition():
    decode = comparisons("small", "decode", model="Qwen/Qwen2-72B")
    assert Counter(ratio(c) for c in decode).most_common(1)[0][0] == 8
    assert {c.workload.shape.num_q_heads for c in decode} == {64}
    *_, last = cases("small", model="Qwen/Qwen2-72B")
    assert last.model == model("Qwen/Qwen2-72B").name
    with pytest.raises(KeyError, match="Did you mean"):
        list(cases("small", model="Qwen/Qwen2-72"))


def test_an_mla_model_keeps_its_one_latent_head():
    name = next(n for n in models() if any(layer.kind == "mla" for layer in model(n).layers))
    decode = comparisons("small", "decode", model=name)
    assert all(c.workload.shape.v_in_k and c.workload.shape.num_kv_heads == 1 for c in decode) and len(decode) >= 6
    assert max(max(c.cache_bytes().values()) for c in decode) >= 4 * CACHE


def test_a_model_without_attention_is_refused_by_name(monkeypatch):
    from kvlab.shapes import LayerSpec, ModelSpec
    spec = ModelSpec("pure/ssm", (LayerSpec("linear", 4, state_bytes=1000),), 1, 1, 1)
    monkeypatch.setattr(memory_wall, "catalogued", lambda name: spec)
    with pytest.raises(ValueError, match="pure/ssm has no attention layer"):
        list(cases("small", model="pure/ssm"))


def test_a_gpu_gets_bf16_and_two_gibibytes():
    decode = comparisons("small", "decode", device="cuda")
    assert {t.dtype for c in decode for t in c.trials} == {"bf16"} and {c.device for c in decode} == {"cuda"}
    assert max(max(c.cache_bytes().values()) for c in decode) == pytest.approx(4 * 2**31, rel=1)


def test_run_gives_decode_and_prefill_their_own_probes():
    shape = AttentionShape(4, 2, 16)
    rows = memory_wall.run(Comparison((trial("naive", Workload.prefill(shape, q_len=32)),)))
    assert {r["metric"] for r in rows} == {"kernel_error", "peak_extra_bytes", "gradient_bytes"}
    rows = memory_wall.run(Comparison((trial("sdpa", Workload.decode(shape, kv_len=128)),)))
    by = {r["metric"]: r for r in rows}
    assert {"latency_s", "read_ceiling", "flops_share", "format_error", "power_average", "sm_utilization"} <= set(by)
    assert by["latency_s"]["status"] == "ok" and by["latency_s"]["value"] > 0


def test_a_gpus_telemetry_is_recorded_over_the_context_sweep_only(monkeypatch):
    chosen = {}
    monkeypatch.setattr(memory_wall, "measure", lambda case, probes, **_: chosen.setdefault(
        (case.comparison_id), {p.name for p in probes}) and [])
    for device in ("cpu", "cuda"):
        chosen.clear()
        decode = comparisons("small", "decode", device=device)
        for case in decode:
            memory_wall.run(case)
        watched = [c for c in decode if {"nvml", "gpm"} <= chosen[c.comparison_id]]
        if device == "cpu":
            assert watched == decode
        else:
            assert {length(c) for c in watched} == {length(c) for c in decode} and len(watched) == 5
            assert {ratio(c) for c in watched} == {8} and {c.workload.batch_size for c in watched} == {1}
            assert not any({"nvml", "gpm"} & chosen[c.comparison_id] for c in decode if c not in watched)


def test_a_case_of_the_context_sweep_is_found_again_from_its_fields():
    case = comparisons("smoke", "decode")[0]
    kind = type(case)
    again = case_from(f"{kind.__module__}:{kind.__qualname__}", asdict(case))
    assert again == case and type(again) is kind and again.comparison_id == case.comparison_id


def test_the_articles_model_in_numbers():
    by = {r["metric"]: r for r in memory_wall.run(Decomposition("Qwen/Qwen2-72B", 4096))}
    assert by["kv_bytes"]["value"] == 1_342_177_280 and by["weight_bytes"]["value"] == 2 * 72_706_203_648
    assert by["crossover_tokens"]["value"] == 443_763
    assert by["kv_to_weights"]["value"] == pytest.approx(1_342_177_280 / (2 * 72_706_203_648))
    assert {r["kind"] for r in by.values()} == {"modelled"}
    assert {m: r["unit"] for m, r in by.items()} == memory_wall.METRICS
    table(by.values())


def test_an_unknown_parameter_count_is_missing_with_the_reason():
    name = next(n for n in models() if model(n).params is None)
    by = {r["metric"]: r for r in memory_wall.run(Decomposition(name, 4096))}
    for metric in ("weight_bytes", "crossover_tokens", "kv_to_weights"):
        assert by[metric]["kind"] == "missing" and "not in the catalogue" in by[metric]["note"]
    assert by["kv_bytes"]["value"] > 0 and by["kv_bytes"]["status"] == "ok"


def test_an_approximate_model_says_so():
    name = next(n for n in models() if model(n).approximate)
    by = {r["metric"]: r for r in memory_wall.run(Decomposition(name, 4096))}
    assert by["kv_bytes"]["note"].startswith("approximate: ") and by["kv_bytes"]["kind"] == "modelled"


def row(case, one, metric, value, rel=0.02, kind="measured", **more):
    """A row about a trial of a comparison (None: about the whole), with an interval of ± rel."""
    context = case if one is None else one
    unit = more.pop("unit", "ratio")
    reading = Reading(metric, value, unit, kind, low=value * (1 - rel), high=value * (1 + rel), **more)
    return {"comparison_id": case.comparison_id, "case_id": case.comparison_id if one is None else one.case_id,
            **context.columns(), **asdict(reading)}


def synthetic(times, prefill=None, skip=()):
    """A run's table in which times(case, trial, ideal bytes) is the truth; shares and ceilings go with it."""
    rows = []
    for case in comparisons("small", "decode"):
        rows.append(row(case, None, "read_ceiling", 10e9, unit="B/s", scope="comparison"))
        ideal = sum(case.cache_bytes().values()) / len(case.cache_bytes())
        for one in case.trials:
            value = times(case, one, ideal)
            rows += [row(case, one, "latency_s", value, unit="s"),
                     row(case, one, "ideal_bytes", ideal, kind="modelled", unit="B"),
                     row(case, one, "flops_share", 0.02 * ratio(case), kind="modelled"),
                     row(case, one, "bandwidth_share", ideal / value / 10e9, kind="modelled"),
                     row(case, one, "system_time_share", 0.42 if one.variant.ref == "naive_repeat" else 0.03),
                     row(case, one, "attainable_flops_share", 0.05 * ratio(case), kind="modelled")]
    for case in comparisons("small", "prefill"):
        for one in case.trials:
            if (value := (prefill or (lambda c, t: 1e6 * length(c)))(case, one)) is not None:
                rows.append(row(case, one, "peak_extra_bytes", value, unit="B"))
    rows += memory_wall.run(Decomposition("Qwen/Qwen2-72B", 2048))
    frame = table(rows)
    return frame[~frame["metric"].isin(skip)]


def streaming(case, one, ideal):
    """4 GB/s and 50 µs; repeated heads cost fifteen times as much; the A/A pair differs by 1 %."""
    slower = 15 if one.variant.ref == "naive_repeat" else 1
    return slower * (50e-6 + ideal / 4e9) * (1.01 if one.replica else 1)


def named(frame):
    return {f.name: f for f in findings(frame)}


def test_the_slope_is_the_bandwidth_and_its_interval_holds_the_truth():
    found = named(synthetic(streaming))
    for variant in ("sdpa", "naive", "paged"):
        f = found[f"decode_bandwidth:{variant}"]
        assert f.low <= 4e9 <= f.high and f.value == pytest.approx(4e9, rel=0.01) and f.unit == "B/s"
    f = found["decode_bandwidth:sdpa"]
    share = [100 * f.low / 10.2e9, 100 * f.high / 9.8e9]              # the ceiling's own interval is ± 2 %
    assert (f"{100 * f.value / 10e9:.1f} % [{share[0]:.1f}, {share[1]:.1f}] of the read ceiling" in f.sentence
            and share[0] < 40 < share[1])


def test_the_findings_come_in_the_order_of_the_story():
    kinds = dict.fromkeys(n.partition(":")[0] for n in named(synthetic(streaming)))
    assert list(kinds) == ["crossover", "bottleneck", "decode_bandwidth", "flops_share", "memory_exponent",
                           "repeat_cost", "resolution"]


def test_a_decode_slope_needs_four_points():
    frame = synthetic(streaming)
    lengths = sorted(set(frame[frame["phase"] == "decode"]["kv_len"]))
    for points, told in ((4, True), (3, False)):
        kept = frame[(frame["phase"] != "decode") | frame["kv_len"].isin(lengths[:points])]
        assert ("decode_bandwidth:sdpa" in named(kept)) == told


@pytest.mark.parametrize("bandwidth, flops, words", [
    (0.9, 0.3, "memory limits it."), (0.6, 0.6, "memory limits it."), (0.3, 0.7, "arithmetic limits it."),
    (0.7, 0.8, "arithmetic limits it."), (0.59, 0.3, "neither limits it here: the kernel does")])
def test_the_bottleneck_is_the_ceiling_that_the_longest_call_comes_near(bandwidth, flops, words):
    frame = synthetic(streaming)
    longest = frame[frame["phase"] == "decode"]["kv_len"].max()
    for metric, value in (("bandwidth_share", bandwidth), ("flops_share", flops)):
        chosen = (frame["metric"] == metric) & (frame["kv_len"] == longest) & (frame["variant"] == "sdpa")
        assert chosen.sum() == 1
        frame.loc[chosen, ["value", "low", "high"]] = value, value - 0.01, value + 0.01
    f = named(frame)["bottleneck"]
    assert f.sentence.startswith(f"Why is decoding slow? At {longest} tokens and group ratio 8 sdpa reaches "
                                 f"{100 * bandwidth:.0f} % of the read ceiling and {100 * flops:.0f} % of the matmul ")
    assert words in f.sentence and (f.value, f.low, f.high) == (bandwidth, bandwidth - 0.01, bandwidth + 0.01)
    assert f"memory allows {100 * 8 / gpu('H200').ridge():.1f} % of the matrix peak" in f.sentence


def test_the_compute_share_stands_beside_what_the_roofline_allows():
    found = {n: f for n, f in named(synthetic(streaming)).items() if n.startswith("flops_share")}
    assert list(found) == [f"flops_share:sdpa:ratio{r}" for r in (1, 4, 8, 32)]
    f = found["flops_share:sdpa:ratio8"]
    assert f.value == pytest.approx(0.16) and f.low < 0.16 < f.high and "the roofline allows 40 %" in f.sentence


def test_exponents_of_extra_memory():
    def prefill(case, one):
        n = length(case)
        return {"naive": 16.0 * n**2, "flash": 2000.0 * n, "sdpa": 5e5 * n**0.5}[one.variant.ref]
    found = named(synthetic(streaming, prefill))
    for variant, truth in (("naive", 2), ("flash", 1), ("sdpa", 0.5)):
        f = found[f"memory_exponent:{variant}"]
        assert f.low <= truth <= f.high and f.value == pytest.approx(truth, abs=0.01) and f.high - f.low < 0.1


def test_memory_that_cannot_be_told_gives_no_exponent():
    found = named(synthetic(streaming, lambda case, one: 0 if one.variant.ref == "flash" else 1e6 * length(case)))
    assert "memory_exponent:flash" not in found and "memory_exponent:naive" in found


def test_two_points_give_no_exponent_and_nothing_grouped_gives_no_cost():
    frame = synthetic(streaming, lambda case, one: 1e6 * length(case) if length(case) < 2048 else None)
    found = named(frame[~((frame["variant"] == "naive") & (frame["phase"] == "decode"))])
    assert not [n for n in found if n.startswith(("memory_exponent", "repeat_cost"))] and "resolution" in found


def test_the_cost_of_repeated_heads_and_the_resolution():
    found = named(synthetic(streaming))
    costs = [f for n, f in found.items() if n.startswith("repeat_cost:")]
    assert len(costs) >= 4 and all(f.value == pytest.approx(15) and f.low < 15 < f.high for f in costs)
    lengths = [int(f.name.partition(":")[2]) for f in costs]
    assert lengths == sorted(lengths, reverse=True)
    assert all("42 % of it inside the operating system" in f.sentence for f in costs)
    f = found["resolution"]
    assert f.value == pytest.approx(1 / 1.01) and f.low < 1 < f.high


@pytest.mark.parametrize("share, said", [(0.09, False), (0.1, True), (None, False)])
def test_time_inside_the_operating_system_is_said_from_a_tenth_on(share, said):
    frame = synthetic(streaming)
    chosen = (frame["metric"] == "system_time_share") & (frame["variant"] == "naive_repeat")
    if share is None:
        frame = frame[~chosen]
    else:
        frame.loc[chosen, "value"] = share
    costs = [f for n, f in named(frame).items() if n.startswith("repeat_cost:")]
    assert len(costs) >= 4 and all(("operating system" in f.sentence) == said for f in costs)


def crossover(name):
    (f,) = findings(table(memory_wall.run(Decomposition(name, 2048))))
    assert f.name == "crossover" and f"{name}: KV of one sequence of 2048 tokens is " in f.sentence
    return f


def test_the_crossover_of_an_unknown_parameter_count_and_of_a_cache_that_stops_growing(monkeypatch):
    f = crossover(next(n for n in models() if model(n).params is None))
    assert f.value is None and f.kind == "missing" and "its weights" in f.sentence
    assert "the parameter count of" in f.sentence and "nothing can be said" in f.sentence
    spec = model("Qwen/Qwen2-72B")
    sliding = replace(spec, layers=tuple(replace(layer, kind="sliding", window=512) for layer in spec.layers))
    monkeypatch.setattr(memory_wall, "catalogued", lambda name: sliding)
    f = crossover("Qwen/Qwen2-72B")
    assert f.value is None and f.kind == "missing" and "stops growing before it reaches them" in f.sentence
    assert "its weights 135.4 GiB" in f.sentence or "its weights 135 GiB" in f.sentence


def test_the_crossover_is_the_models():
    f = named(synthetic(streaming))["crossover"]
    assert f.value == 443_763 and "443,763" in f.sentence and "Qwen/Qwen2-72B" in f.sentence
    assert "13.5 full contexts of 32,768" in f.sentence


def test_a_time_that_does_not_grow_has_no_bandwidth():
    found = named(synthetic(lambda case, one, ideal: 1e-3))
    f = found["decode_bandwidth:sdpa"]
    assert f.value is None and f.kind == "missing" and "No slope" in f.sentence


def test_without_sdpa_the_words_are_about_the_fastest_of_the_longest_context():
    frame = synthetic(lambda case, one, ideal: streaming(case, one, ideal) * (0.5 if one.variant.ref == "paged" else 1))
    frame = frame[frame["variant"] != "sdpa"]
    found = named(frame)
    assert [n for n in found if n.startswith("decode_bandwidth")][0] == "decode_bandwidth:paged"
    assert "flops_share:paged:ratio8" in found and "group ratio 8 paged reaches" in found["bottleneck"].sentence
    assert "resolution" not in found


@pytest.mark.parametrize("skip", ["ideal_bytes", "read_ceiling", "flops_share", "latency_s", "peak_extra_bytes",
                                  "kv_bytes", "weight_bytes", "bandwidth_share", "system_time_share",
                                  "crossover_tokens"])
def test_a_metric_that_is_absent_takes_its_own_findings_only(skip):
    whole, found = named(synthetic(streaming)), named(synthetic(streaming, skip=(skip,)))
    gone = {n.partition(":")[0] for n in set(whole) - set(found)}
    assert gone == {"ideal_bytes": {"decode_bandwidth"}, "read_ceiling": {"decode_bandwidth"},
                    "flops_share": {"flops_share", "bottleneck"}, "bandwidth_share": {"bottleneck"},
                    "system_time_share": set(), "peak_extra_bytes": {"memory_exponent"}, "kv_bytes": {"crossover"},
                    "weight_bytes": {"crossover"},
                    "latency_s": {"bottleneck", "decode_bandwidth", "flops_share", "repeat_cost", "resolution"},
                    "crossover_tokens": {"crossover"}}[skip]


def test_a_table_of_failures_alone_or_of_nothing_says_that_there_is_no_finding():
    case = comparisons("smoke", "decode")[0]
    rows = [{"comparison_id": case.comparison_id, "case_id": t.case_id, **t.columns(),
             **asdict(failed("latency_s", "s", "it rained"))} for t in case.trials]
    for frame in (table(rows), table([])):
        (f,) = findings(frame)
        assert f.name == "none" and f.value is None and f.kind == "missing"
    assert main_ratio(table([])) is None


def test_only_batched_decodes_say_nothing_about_the_sweep():
    frame = synthetic(streaming)
    assert main_ratio(frame) == 8
    batched = frame[(frame["batch_size"] == 4) | (frame["phase"] == "prefill")]
    assert main_ratio(batched) is None and {n.partition(":")[0] for n in named(batched)} == {"memory_exponent"}


@pytest.mark.parametrize("power, truth", [(False, 3.0), (True, 1.7)])
def test_the_interval_of_a_fitted_slope_covers_the_truth_about_as_often_as_it_says(power, truth):
    rng, x, covered = np.random.default_rng(5), np.array([1.0, 2, 4, 8, 16, 32]), 0
    exact = x**truth if power else 5 + truth * x
    for _ in range(150):
        y = exact * (1 + 0.02 * rng.normal(size=len(x)))
        value, low, high = fit(x, y, y * (1 - 1.96 * 0.02), y * (1 + 1.96 * 0.02), power=power, draws=300)
        assert low <= value <= high
        covered += low <= truth <= high
    assert covered >= 0.9 * 150


@pytest.mark.parametrize("points", [4, 5])
@pytest.mark.parametrize("power, truth", [(False, 3.0), (True, 1.7)])
def test_the_interval_of_few_points_whose_scatter_is_all_that_is_known_covers_the_truth(points, power, truth):
    rng, x, covered, simulated = np.random.default_rng(11), 2.0**np.arange(points), 0, 400
    exact = x**truth if power else truth * x
    for _ in range(simulated):
        y = exact * (1 + 0.1 * rng.normal(size=points))
        _, low, high = fit(x, y, y, y, power=power, draws=400)
        covered += low <= truth <= high
    assert covered >= 0.92 * simulated, covered / simulated


def test_scatter_beyond_the_points_own_intervals_widens_the_slopes():
    x = np.array([1.0, 2, 4, 8, 16])
    y = 3 * x * np.array([1.2, 0.8, 1.2, 0.8, 1.2])
    tight = fit(x, 3 * x, 3 * x, 3 * x)
    wide = fit(x, y, y, y)
    assert tight == pytest.approx((3, 3, 3)) and wide[2] - wide[1] > 0.3


def test_two_points_have_the_interval_of_their_own():
    value, low, high = fit([1, 2], [1, 2], [0.9, 1.8], [1.1, 2.2])
    assert value == pytest.approx(1) and low < 1 < high and math.isfinite(high)


def test_the_resolution_is_that_of_the_pair_and_of_nothing_else():
    frame = synthetic(streaming)
    value, low, high = aa_resolution(frame)
    assert (value, low, high) == (pytest.approx(1 / 1.01), pytest.approx(0.98 / 1.02 / 1.01),
                                  pytest.approx(1.02 / 0.98 / 1.01))
    assert aa_resolution(frame[frame["replica"] != 1]) is None and aa_resolution(table([])) is None
    assert aa_resolution(frame.assign(kind="modelled").astype({"kind": "string"})) is None
