"""A simulation as an engine's metrics: read back by the scraper, loaded by Prometheus, watched by the alerts."""
import json
import shutil
import subprocess

import pandas as pd
import pytest

from kvlab.serving.alerts import Thresholds, evaluate, timeline
from kvlab.serving.exposition import Exposition
from kvlab.serving.metrics import MEASURES, mappings, read
from kvlab.serving.request import Request, Served
from kvlab.serving.rules import rule_file
from kvlab.serving.scheduler import SchedulerConfig
from kvlab.serving.scrape import parse
from kvlab.serving.simulator import simulate
from kvlab.serving.step_time import fixed

COLUMNS = ("running", "waiting", "blocks_used", "kv_usage", "preemptions", "finished", "prompt_tokens",
           "generated_tokens", "cached_tokens", "queried_tokens")


def incident(seconds=900, begins=400, ends=500):
    """One request a second, served at once; for a while half of them are preempted and wait 20 s."""
    bad = [begins <= t < ends for t in range(seconds)]
    rows = {"t": [float(t) for t in range(seconds)], "running": [4 + 4 * b for b in bad],
            "waiting": [20 * b for b in bad], "blocks_used": [50 + 50 * b for b in bad],
            "kv_usage": [0.5 + 0.5 * b for b in bad], "preemptions": pd.Series(bad).cumsum() // 2,
            "finished": range(seconds),
            "prompt_tokens": [100 * t for t in range(seconds)], "generated_tokens": [10 * t for t in range(seconds)],
            "cached_tokens": [40 * t for t in range(seconds)], "queried_tokens": [100 * t for t in range(seconds)]}
    served = []
    for t in range(seconds - 25):
        wait = 20.0 if bad[t] else 0.1
        began = t + wait
        served.append(Served(Request(str(t), float(t), 100, 11), began, began + 0.2, began + 0.7, generated=11))
    served.append(Served(Request("refused", 1.0, 10**6, 1), rejected="larger than the pool"))
    return pd.DataFrame(rows), served


def promtool(folder, *words, **more):
    """What promtool answers in that folder; the test is skipped where there is none."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool, of the Debian package prometheus, is not installed")
    return subprocess.run([found, *words], cwd=folder, capture_output=True, text=True, timeout=60, **more)


@pytest.fixture(scope="module")
def simulated():
    return Exposition(*incident(), num_blocks=100, block_size=16, model="a \"model\"\n\\")


def test_the_text_is_read_back_by_the_scraper(simulated):
    got = read(parse(simulated.text(450.0)), 450.0)
    assert got.engine == "kvlab_sim" and got.kind == "simulated"
    values = {measure: got.value(measure) for measure in MEASURES if got.value(measure) is not None}
    assert values == dict(running=8, waiting=20, kv_usage=1.0, preemptions=25, finished=450, prompt_tokens=45000,
                          generated_tokens=4500, prefix_queried_tokens=45000, prefix_hit_tokens=18000, kv_tokens=1600,
                          kv_blocks=100, block_size=16)
    assert set(got.missing) == {"itl_s"} and "gaps between" in got.missing["itl_s"]
    assert got == read(simulated.families([450.0]), 450.0) == next(simulated.snapshots([450.0]))


def test_histograms_hold_what_had_been_observed_by_then(simulated):
    _, served = incident()
    got = next(simulated.snapshots([450.3]))
    first = sum(one.first_token_s is not None and one.first_token_s <= 450.3 for one in served)
    ended = [one for one in served if one.last_token_s is not None and one.last_token_s <= 450.3]
    assert first > len(ended)
    assert {measure: next(iter(series.values()))[-1][1] for measure, series in got.histograms.items()} == {
        "ttft_s": first, "queue_s": len(ended), "tpot_s": len(ended), "e2e_s": len(ended)}
    queue = dict(next(iter(got.histograms["queue_s"].values())))
    assert queue[0.3] == sum(one.queue_s <= 0.3 for one in ended) and queue[20.0] == len(ended)
    assert 'request_queue_time_seconds_sum{engine="0"' in simulated.text(450.0)


def test_between_two_rows_the_earlier_one_counts_and_before_the_first_none(simulated):
    assert next(simulated.snapshots([450.9])).value("finished") == 450
    with pytest.raises(ValueError, match="begins at 0.0 s, and -1 s was asked for"):
        simulated.text(-1)


def test_the_incident_fires_while_it_is_in_the_window_and_not_before(simulated):
    limits = Thresholds(preemption_ratio=0.05, queue_p99_s=10, kv_usage=0.6, hit_rate=0.3, window_s=60)
    fired = {}
    for t, alerts in timeline(simulated.snapshots(simulated.times[::10]), limits):
        for alert in alerts:
            if alert.firing:
                fired.setdefault(alert.name, []).append(t)
    assert set(fired) == {"preemption_ratio", "queue_p99_s", "kv_usage"}                  # the hit rate is 40 %
    for times in fired.values():
        assert 400 < min(times) <= 440 and 490 <= max(times) <= 600
    newest = evaluate(simulated.snapshots([0.0, 899.0]), Thresholds(window_s=1000))
    assert newest[0].value == pytest.approx(50 / 899) and newest[0].firing


def test_the_names_are_vllms():
    def stems(engine, prefix):
        return {measure: known[0].text.removeprefix(prefix)
                for measure, (known, _) in mappings(engine).items() if known}
    own, theirs = stems("kvlab_sim", "kvlab_sim:"), stems("vllm", "vllm:")
    assert own == {measure: name for measure, name in theirs.items() if measure in own}


def test_prometheus_loads_the_backfill(simulated, tmp_path):
    (tmp_path / "metrics").write_text(text := simulated.openmetrics(1_700_000_000, simulated.times[::15]))
    assert text.endswith("# EOF\n")
    done = promtool(tmp_path, "tsdb", "create-blocks-from", "openmetrics", "metrics", "data")
    assert done.returncode == 0, done.stderr
    samples = sum(not line.startswith("#") for line in text.splitlines())
    stored = promtool(tmp_path, "tsdb", "list", "data")
    numbers = [line.split() for line in stored.stdout.splitlines()[1:] if line.strip()]
    assert sum(int(line[4]) for line in numbers) == samples > 60 * 90
    done = promtool(tmp_path, "check", "metrics", input=simulated.text())
    said = done.stderr.splitlines() + done.stdout.splitlines()
    assert said and all("should not contain ':'" in line for line in said)                  # vLLM's names have colons


def test_the_rules_fire_on_the_simulated_series(simulated, tmp_path):
    """The rule file and the timeline's own alert, on the same numbers, at the same minutes."""
    limits, times = Thresholds(), simulated.times[::60]
    text = rule_file("kvlab_sim", limits)
    (tmp_path / "rules.yml").write_text("\n".join(line for line in text.splitlines()
                                                  if "annotations" not in line and "summary" not in line) + "\n")
    snaps = list(simulated.snapshots(times))
    inputs = [{"series": f'kvlab_sim:{name}{{engine="0",instance="i",job="j"}}',
               "values": " ".join(f"{snap.value(measure):g}" for snap in snaps)}
              for measure, name in (("preemptions", "num_preemptions_total"), ("finished", "request_success_total"))]
    labels = {"severity": "warning", "engine": "kvlab_sim", "instance": "i", "job": "j"}
    cases = [{"eval_time": f"{minute}m", "alertname": "KVPreemptionRatioHigh",
              "exp_alerts": [{"exp_labels": labels}] if alerts[0].firing else []}
             for minute, (_, alerts) in enumerate(timeline(snaps, limits)) if minute]
    assert {bool(case["exp_alerts"]) for case in cases} == {True, False}
    (tmp_path / "test.yml").write_text(json.dumps({"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": [
        {"interval": "1m", "input_series": inputs, "alert_rule_test": cases}]}))
    done = promtool(tmp_path, "test", "rules", "test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_timeline_that_is_none():
    table, _ = incident(10)
    with pytest.raises(ValueError, match="it lacks kv_usage, t"):
        Exposition(table.drop(columns=["kv_usage", "t"]))
    with pytest.raises(ValueError, match="at least one row"):
        Exposition(table.iloc[:0])
    with pytest.raises(ValueError, match="backward"):
        Exposition(table.iloc[::-1])


def test_a_real_simulation_is_one_too():
    requests = [Request(str(i), i * 0.01, 64, 64) for i in range(40)]
    run = simulate(requests, SchedulerConfig(max_num_seqs=16), num_blocks=60, block_size=16, step_time=fixed(0.01),
                   every_s=0.1)
    table = run.timeline()
    got = list(Exposition(table, run.served, num_blocks=run.num_blocks, block_size=run.block_size).snapshots())
    for i in (0, len(table) // 2, -1):
        row = table.iloc[i]
        assert [got[i].value(name) for name in ("running", "waiting", "kv_usage", "preemptions", "finished")] == [
            row[name] for name in ("running", "waiting", "kv_usage", "preemptions", "finished")]
        ended = sum(one.last_token_s <= row["t"] for one in run.served)
        assert next(iter(got[i].histograms["e2e_s"].values()))[-1][1] == ended == row["finished"]
    assert got[-1].value("preemptions") == run.preemptions > 0 and got[-1].value("finished") > 30
