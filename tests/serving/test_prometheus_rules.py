"""The rule file, judged by Prometheus itself: promtool checks it, fires it and agrees with kvlab's own arithmetic."""
import json
import math
import shutil
import subprocess

import pytest
from fake_engine import vllm_page

from kvlab.serving.alerts import Thresholds, evaluate
from kvlab.serving.metrics import PREFIXES, read
from kvlab.serving.rules import rule_file
from kvlab.serving.scrape import parse
from kvlab.serving.windows import quantile

ALL = Thresholds(preemption_ratio=0.05, queue_p99_s=10, kv_usage=0.9, hit_rate=0.3)


@pytest.fixture(scope="module")
def promtool():
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool, of the Debian package prometheus, is not installed")

    def run(folder, *words):
        return subprocess.run([found, *words], cwd=folder, capture_output=True, text=True, timeout=60)
    return run


@pytest.mark.parametrize("engine", PREFIXES)
def test_promtool_accepts_the_rules_of_every_engine(engine, promtool, tmp_path):
    (tmp_path / "rules.yml").write_text(text := rule_file(engine, ALL, skip_missing=True))
    done = promtool(tmp_path, "check", "rules", "rules.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    count = text.count("- alert:")
    assert f"SUCCESS: {count} rules found" in done.stdout
    assert count + text.count("\n# ") == 4                     # what is left out is said
    assert count == {"vllm": 4, "sglang": 4, "kvlab_sim": 4, "trtllm": 3, "llamacpp": 1, "tgi": 1, "triton": 1}[engine]


@pytest.mark.parametrize("engine", PREFIXES)
def test_kvlabs_own_linter_accepts_the_rules_of_every_engine(engine, tmp_path):
    from kvlab.serving.lint import lint
    (tmp_path / "rules.yml").write_text(rule_file(engine, ALL, skip_missing=True))
    report = lint([tmp_path / "rules.yml"])
    assert not report.findings and not report.skipped and (report.counts["ok"] or engine == "kvlab_sim")


def test_a_metric_of_former_versions_alone_makes_no_rule():
    text = rule_file("llamacpp", ALL, skip_missing=True)
    assert "# kv_usage: llama.cpp exports no use of its cache any more" in text and "kv_cache_usage_ratio" not in text
    with pytest.raises(ValueError, match="llamacpp cannot have the alert kv_usage: llama.cpp exports no use"):
        rule_file("llamacpp", Thresholds(None, kv_usage=0.9))


SERIES = {"ratio": ("num_preemptions_total", "request_success_total"),
          "hits": ("prefix_cache_hits_total", "prefix_cache_queries_total")}


def series(prefix, name, values, **labels):
    text = ",".join(f'{key}="{value}"' for key, value in {"instance": "a:8000", "job": "llm", **labels}.items())
    return {"series": f"{prefix}{name}{{{text}}}", "values": values}


def judge(promtool, folder, engine, thresholds, inputs, expected, minutes, exprs=()):
    """Run promtool's unit test: which alerts fire after so many minutes."""
    (folder / "rules.yml").write_text(rule_file(engine, thresholds, skip_missing=True))
    rules = {"KVPreemptionRatioHigh", "QueueTimeP99High", "KVUsageHigh", "PrefixHitRateLow"}
    cases = [{"eval_time": f"{minutes}m", "alertname": name, "exp_alerts": [
        {"exp_labels": {"severity": "warning", "engine": engine, "instance": "a:8000", "job": "llm"}}]
        if name in expected else []} for name in rules]
    for case in cases:                                        # the summary holds the value, which differs in rounding
        for alert in case["exp_alerts"]:
            alert["exp_annotations"] = {}
    test = {"rule_files": ["bare.yml"], "evaluation_interval": "1m",
            "tests": [{"interval": "1m", "input_series": inputs, "alert_rule_test": cases,
                       "promql_expr_test": list(exprs)}]}
    lines = (folder / "rules.yml").read_text().splitlines()
    bare = [line for line in lines if "annotations:" not in line and "summary:" not in line]
    (folder / "bare.yml").write_text("\n".join(bare) + "\n")
    (folder / "test.yml").write_text(json.dumps(test))
    done = promtool(folder, "test", "rules", "test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("engine, prefix", [("vllm", "vllm:"), ("kvlab_sim", "kvlab_sim:")])
def test_a_high_ratio_fires_and_a_low_one_does_not(engine, prefix, promtool, tmp_path):
    finished = series(prefix, "request_success_total", "0+100x10", finished_reason="stop")
    judge(promtool, tmp_path, engine, ALL, [series(prefix, "num_preemptions_total", "0+6x10"), finished],
           {"KVPreemptionRatioHigh"}, 8)
    judge(promtool, tmp_path, engine, ALL, [series(prefix, "num_preemptions_total", "0+4x10"), finished], set(), 8)


def test_a_restart_neither_fires_nor_hides(promtool, tmp_path):
    finished = series("vllm:", "request_success_total", "1000 1100 1200 0 100 200 300 400")
    judge(promtool, tmp_path, "vllm", ALL, [series("vllm:", "num_preemptions_total", "90 90 90 0 0 0 0 0"), finished],
           set(), 5)
    preempted = series("vllm:", "num_preemptions_total", "90 90 90 0 40 80 80 80")
    judge(promtool, tmp_path, "vllm", ALL, [preempted, finished], {"KVPreemptionRatioHigh"}, 6)


def test_preemptions_without_a_finished_request_fire_as_here(promtool, tmp_path):
    judge(promtool, tmp_path, "vllm", ALL, [series("vllm:", "num_preemptions_total", "0+1x8"),
                                             series("vllm:", "request_success_total", "7x8")],
           {"KVPreemptionRatioHigh"}, 8)
    judge(promtool, tmp_path, "vllm", ALL, [series("vllm:", "num_preemptions_total", "3x8"),
                                             series("vllm:", "request_success_total", "7x8")], set(), 8)


def test_the_other_three(promtool, tmp_path):
    inputs = [series("vllm:", "kv_cache_usage_perc", "0.97x8", engine="0"),
              series("vllm:", "kv_cache_usage_perc", "0.10x8", engine="1"),        # the fullest engine counts
              series("vllm:", "prefix_cache_hits_total", "0+20x8"),
              series("vllm:", "prefix_cache_queries_total", "0+100x8"),
              series("vllm:", "request_queue_time_seconds_bucket", "0+5x8", le="0.3"),
              series("vllm:", "request_queue_time_seconds_bucket", "0+100x8", le="60.0"),
              series("vllm:", "request_queue_time_seconds_bucket", "0+100x8", le="+Inf")]
    judge(promtool, tmp_path, "vllm", ALL, inputs, {"KVUsageHigh", "PrefixHitRateLow", "QueueTimeP99High"}, 8)
    judge(promtool, tmp_path, "vllm", Thresholds(None, 60, 0.98, 0.1), inputs, set(), 8)


def test_older_names_stand_in(promtool, tmp_path):
    inputs = [series("vllm:", "gpu_cache_usage_perc", "0.97x8"),
              series("vllm:", "gpu_prefix_cache_hits_total", "0+20x8"),
              series("vllm:", "gpu_prefix_cache_queries_total", "0+100x8")]
    judge(promtool, tmp_path, "vllm", ALL, inputs, {"KVUsageHigh", "PrefixHitRateLow"}, 8)


def test_sglangs_ranks_are_copies(promtool, tmp_path):
    inputs = [series("sglang:", "num_retracted_requests_total", "0+4x8", tp_rank=str(rank)) for rank in range(8)]
    inputs += [series("sglang:", "num_requests_total", "0+100x8", is_streaming="true")]
    judge(promtool, tmp_path, "sglang", ALL, inputs, set(), 8)


def test_tritons_older_backend_has_its_usage_computed(promtool, tmp_path):
    inputs = [series("", "nv_trt_llm_kv_cache_block_metrics", value, kv_cache_block_type=kind)
              for kind, value in (("used", "95x8"), ("max", "100x8"), ("free", "5x8"))]
    judge(promtool, tmp_path, "triton", ALL, inputs, {"KVUsageHigh"}, 8)


def test_prometheus_and_kvlab_have_the_same_quantiles(promtool, tmp_path):
    buckets = {0.1: 3, 0.25: 3, 0.5: 40, 2.5: 95, math.inf: 100}
    inputs = [series("", "h_bucket", str(count), le=f"{bound:g}".replace("inf", "+Inf"))
              for bound, count in buckets.items()]
    exprs = [{"expr": f"histogram_quantile({q}, sum by (le) (h_bucket))", "eval_time": "0m",
              "exp_samples": [{"labels": "{}", "value": quantile(q, buckets).value}]}
             for q in (0.01, 0.25, 0.5, 0.9, 0.99)]
    judge(promtool, tmp_path, "vllm", ALL, inputs, set(), 0, exprs)


def test_the_live_alerts_say_the_same_as_the_rules(promtool, tmp_path):
    """One incident, minute by minute, with a restart in it, by both."""
    preempted, finished = [0, 1, 2, 0, 9, 18, 27], [0, 50, 100, 0, 50, 100, 150]
    inputs = [series("vllm:", "num_preemptions_total", " ".join(map(str, preempted))),
              series("vllm:", "request_success_total", " ".join(map(str, finished)))]
    snaps = [read(parse(vllm_page(preempted=a, finished=b)), 60.0 * i)
             for i, (a, b) in enumerate(zip(preempted, finished))]
    for minute in (2, 3, 5, 6):
        fires = evaluate(snaps[:minute + 1], Thresholds())[0].firing
        judge(promtool, tmp_path, "vllm", Thresholds(), inputs, {"KVPreemptionRatioHigh"} if fires else set(), minute)


def test_refusals_and_durations():
    with pytest.raises(ValueError, match="triton cannot have the alert preemption_ratio: the backend gives paused"):
        rule_file("triton", Thresholds())
    with pytest.raises(ValueError, match="no alert to write for triton: preemption_ratio"):
        rule_file("triton", Thresholds(), skip_missing=True)
    with pytest.raises(ValueError, match="no threshold is set"):
        rule_file("vllm", Thresholds(None))
    with pytest.raises(KeyError, match="no engine named 'vlm'"):
        rule_file("vlm", Thresholds())
    for seconds, text in ((300, "[5m]"), (7200, "[2h]"), (90, "[90s]"), (0.5, "[500ms]")):
        assert text in rule_file("vllm", Thresholds(window_s=seconds))
