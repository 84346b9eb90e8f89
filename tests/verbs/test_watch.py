"""kvlab watch on a server that answers as told: what is shown, stored and returned."""
import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import pytest
from fake_engine import FakeClock, FakeEngine, vllm_page
from typer.testing import CliRunner

from kvlab.cli import app
from kvlab.record.store import read_table
from kvlab.serving.alerts import Thresholds
from kvlab.serving.scrape import Scrape, ScrapeError
from kvlab.serving.watching import watch
from kvlab.verbs import _watch_table

TWO, THREE = ("--every", "1s", "--for", "1.5s"), ("--every", "1s", "--for", "2.5s")               # so many scrapes


@pytest.fixture(autouse=True)
def paced(monkeypatch):
    """No token, and a clock on which a second passes at once: the number of scrapes depends on no machine's load."""
    monkeypatch.delenv("KVLAB_TOKEN", raising=False)
    clock = FakeClock()
    monkeypatch.setattr("kvlab.serving.watching.watch", partial(watch, clock=clock, sleep=clock.sleep))


def run(*words):
    """(exit code or the error that it was, standard output)."""
    done = CliRunner().invoke(app, ["watch", *map(str, words)], standalone_mode=False)
    return done.return_value if done.exception is None else done.exception, done.stdout


def test_one_line_per_scrape_and_the_alerts_at_the_end():
    pages = [vllm_page(running=3, waiting=2, usage=0.42, queried=100, hit=10),
             vllm_page(running=4, waiting=0, usage=0.5, preempted=1, finished=100, queried=200, hit=90,
                       queue=(100, 100, 100))]
    with FakeEngine(*pages) as engine:
        code, shown = run(engine.url, *TWO)
        assert code == 0 and shown.splitlines()[0] == f"vllm at {engine.url}/metrics"
        lines = [line for line in shown.splitlines() if " s  running" in line]
        assert "running 3  waiting 2  KV 42 %  gen -" in lines[0] and "hits - " in lines[0]
        assert "running 4  waiting 0  KV 50 %" in lines[1] and "hits 80 %  preempted 1 % of finished" in lines[1]
        assert "queue 0.15/0.297 s" in lines[1]
        assert shown.splitlines()[-1] == "ok: preemption_ratio 0.01 (fires > 0.05) (over 1 s so far)"
        assert "times are p50/p99 over the window; preempted: requests preempted per request finished" in shown
        assert any(line.startswith("missing ttft_s: this server does not export vllm:time_to_first_token_seconds (yet)")
                   for line in shown.splitlines())


def test_an_alert_that_fires_is_shown_and_is_code_1():
    pages = [vllm_page(), vllm_page(preempted=9, finished=100)]
    with FakeEngine(*pages) as engine:
        code, shown = run(engine.url, *TWO)
        assert code == 1 and "FIRING: preemption_ratio 0.09 (fires > 0.05) (over 1 s so far)" in shown
    with FakeEngine(*pages) as engine:
        assert run(engine.url, *TWO, "--preemption-ratio", "0.1")[0] == 0
    with FakeEngine(vllm_page(usage=0.95)) as engine:
        code, shown = run(engine.url, "--once", "--kv-usage", "0.9")
        assert code == 1 and "FIRING: kv_usage 0.95 (fires > 0.9) (since the engine's start)" in shown


def test_an_alert_that_fired_and_is_over_is_still_code_1():
    pages = [vllm_page(usage=0.95), vllm_page(usage=0.1)]
    with FakeEngine(*pages) as engine:
        code, shown = run(engine.url, *TWO, "--kv-usage", "0.9", "--window", "1ms")
        assert code == 1 and "FIRING: kv_usage 0.95 (fires > 0.9)" in shown and "; over by now" in shown


def test_once_tells_of_the_time_since_the_start():
    with FakeEngine(vllm_page(preempted=2, finished=100, queue=(50, 100, 100))) as engine:
        code, shown = run(engine.url, "--once", "--json")
        (line,) = map(json.loads, shown.splitlines())
        assert code == 0 and line["window_s"] is None and line["engine"] == "vllm" and line["model"] == "org/m"
        assert line["values"]["preemption_ratio"] == 0.02 and line["values"]["queue_s_p50"] == pytest.approx(0.3)
        assert line["missing"]["finished_per_s"] == "a rate needs a second scrape"
        assert line["alerts"][0]["note"] == "since the engine's start" and len(engine.seen) == 1


def test_the_table_that_is_written(tmp_path):
    pages = [vllm_page(), vllm_page(preempted=1, finished=100, queue=(0, 0, 3))]
    with FakeEngine(*pages) as engine:
        code, shown = run(engine.url, *TWO, "--out", tmp_path / "w.parquet")
    assert code == 0 and shown.splitlines()[-1] == str(tmp_path / "w.parquet")
    table = read_table(tmp_path / "w.parquet")
    last = table[table["case_id"] == table["case_id"].max()].set_index("metric")
    told = last.loc["preemption_ratio", ["value", "unit", "kind", "method"]].tolist()
    assert told == [0.01, "ratio", "measured", "derived"]
    assert last.loc["preemption_ratio", "source"] == "vllm: vllm:num_preemptions_total ÷ vllm:request_success_total"
    assert 0 < last.loc["preemption_ratio", "window_s"] < 5 and last.loc["running", "model"] == "org/m"
    assert last.loc["queue_s_p99", "value"] == 60 and "at least" in last.loc["queue_s_p99", "note"]
    assert last.loc["ttft_s_p50", "kind"] == "missing" and "does not export" in last.loc["ttft_s_p50", "note"]
    first = table[table["case_id"] == table["case_id"].min()].set_index("metric")
    assert first.loc["preemption_ratio", "note"] == "a ratio needs a second scrape"
    assert first.loc["running", "case"].endswith("+00:00")


def test_a_simulation_is_no_measurement(tmp_path):
    with FakeEngine(vllm_page().replace("vllm:", "kvlab_sim:")) as engine:
        run(engine.url, "--once", "--out", tmp_path / "w.parquet")
    assert set(read_table(tmp_path / "w.parquet")["kind"]) == {"simulated", "missing"}


def test_a_scrape_that_fails_is_shown_and_the_watch_goes_on(tmp_path):
    pages = [vllm_page(finished=10), {"body": "no", "status": 500}, vllm_page(finished=14)]
    with FakeEngine(*pages) as engine:
        code, shown = run(engine.url, *THREE, "--json", "--out", tmp_path / "w.parquet")
        lines = [json.loads(line) for line in shown.splitlines()]
        assert code == 1 and "answers 500" in lines[1]["problem"] and not lines[1]["values"]
        assert lines[2]["problem"] == "" and lines[2]["values"]["finished"] == 14
    table = read_table(tmp_path / "w.parquet")
    assert set(table[table["case_id"] == "000001"]["status"]) == {"failed"}
    assert set(table[table["case_id"] == "000002"]["status"]) == {"ok"}


def test_lines_stay_short_when_an_alert_fires():
    clock, late = FakeClock(), "a counter went down: restarted, counted from 0; " * 3
    with FakeEngine(vllm_page(), vllm_page(preempted=9, finished=100)) as engine:
        *_, look = watch(Scrape.of(engine.url), Thresholds(), 1.0, 1.5, clock=clock, sleep=clock.sleep)
    full = [replace(one, kind="measured", value=12_345.678) for one in look.readings]
    look = replace(look, readings=tuple(full), alerts=(replace(look.alerts[0], note=late),), restarts=("finished",))
    lines = _watch_table.line(look).splitlines()
    assert max(map(len, lines)) < 160 and all(line.startswith(" " * 10) for line in lines[1:])
    assert any(line.strip().startswith("FIRING: preemption_ratio 0.09") for line in lines)
    joined = " ".join(line.strip() for line in lines)
    assert joined.count("12,346/12,346 s") == 5 and "RESTARTED (finished)" in joined


def test_a_restart_is_shown():
    with FakeEngine(vllm_page(finished=50), vllm_page(finished=2)) as engine:
        _, shown = run(engine.url, *TWO)
        assert "RESTARTED (finished)" in shown


def test_hostile_labels_are_escaped(tmp_path):
    page = vllm_page().replace("org/m", "\x1b[31mred")
    with FakeEngine(page) as engine:
        assert "\x1b" not in run(engine.url, "--once", "--json")[1] + run(engine.url, "--once")[1]


def test_what_an_engine_counts_late_is_said():
    page = "llamacpp:requests_processing 1\nllamacpp:tokens_predicted_total 8\n"
    with FakeEngine(page) as engine:
        assert "note: generated_tokens counted when a request ends" in run(engine.url, "--once")[1].splitlines()


def test_the_live_table():
    """On a terminal: drawn by rich, without control characters of the server's."""
    from rich.console import Console

    with FakeEngine(vllm_page().replace("org/m", "\x1b[31m[bold]m"), vllm_page(preempted=1)) as engine:
        clock = FakeClock()
        looks = watch(Scrape.of(engine.url), Thresholds(kv_usage=0.9), 1.0, 2.5, clock=clock, sleep=clock.sleep)
        console = Console(width=100, force_terminal=False, record=True, file=io.StringIO())
        for look in looks:
            console.print(_watch_table.table(look, engine.url))
    text = console.export_text()
    assert "\x1b" not in text and r"\x1b[31m[bold]m at " in text
    assert "FIRING: preemption_ratio no value" in text and "ok: kv_usage 0.5" in text
    assert "1 preemptions and no finished request" in text and "missing ttft_s:" in text


@pytest.mark.parametrize("words, match", [
    ((), "give the address of a server"), (("--rules", "x.yml"), "give the address"),
    (("localhost:1", "--engine", "vllm"), "--engine goes with --rules"),
    (("localhost:1", "--every", "often"), "--every 'often' is no time"), (("localhost:1", "--for", "0s"), "is no time"),
    (("localhost:1", "--every", "9000h"), "of up to a year"), (("localhost:1", "--timeout", "9" * 400), "is no time"),
    (("localhost:1", "--kv-usage", "95"), "at most 1"), (("ftp://x",), "must look like"),
    (("localhost:1", "--out", "x.csv"), "must be a .parquet file"),
    (("localhost:1", "--out", "/nowhere/x.parquet"), "in a folder that exists"),
    (("--rules", "/nowhere/x.yml", "--engine", "vllm"), "--rules /nowhere/x.yml must be a file in a folder"),
    (("--rules", "/", "--engine", "vllm"), "--rules / must be a file"),
    (("localhost:1", "--token-env", "NOT_SET_HERE"), "NOT_SET_HERE, which should hold the token, is not set"),
])
def test_wrong_use_is_one_sentence(words, match):
    error, _ = run(*words)
    assert isinstance(error, ValueError) and match in str(error)


def test_a_server_that_is_down_is_code_2_and_one_sentence():
    done = subprocess.run([sys.executable, "-m", "kvlab", "watch", "http://me:s3cret@127.0.0.1:9"], capture_output=True,
                          text=True, timeout=60, env={**os.environ, "KVLAB_TOKEN": "t0ken"})
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("kvlab: no answer from http://127.0.0.1:9/metrics: Connection refused")
    assert "s3cret" not in done.stderr and "t0ken" not in done.stderr


def test_rules_of_a_named_engine_and_of_a_server(tmp_path):
    code, shown = run("--rules", tmp_path / "a.yml", "--engine", "vllm", "--queue-p99", "10s", "--window", "10m")
    text = (tmp_path / "a.yml").read_text()
    assert code == 0 and shown.strip() == str(tmp_path / "a.yml") and text.count("- alert:") == 2
    assert "request_queue_time_seconds_bucket[10m]" in text and "> 10" in text
    with FakeEngine(vllm_page()) as engine:
        run(engine.url, "--rules", tmp_path / "b.yml", "--queue-p99", "10s", "--window", "10m")
    assert (tmp_path / "b.yml").read_text() == text
    error, _ = run("--rules", tmp_path / "c.yml", "--engine", "llamacpp")
    assert isinstance(error, ValueError) and "never preempts" in str(error) and not (tmp_path / "c.yml").exists()


def test_the_pace_and_the_end_are_those_asked_for():
    clock = FakeClock()
    with FakeEngine(vllm_page()) as engine:
        looks = list(watch(Scrape.of(engine.url), Thresholds(), 2.0, 10.0, clock=clock, sleep=clock.sleep))
        assert len(looks) == 5 and [round(look.elapsed_s) for look in looks] == [0, 2, 4, 6, 8]
        for bad in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="must be a positive time"):
                next(watch(Scrape.of(engine.url), Thresholds(), bad))
    with pytest.raises(ScrapeError):
        next(watch(Scrape.of("127.0.0.1:9"), Thresholds()))


def test_help_needs_nothing_heavy():
    code = ("import sys; import kvlab.cli; "
            "heavy = {'torch', 'pandas', 'prometheus_client', 'numpy', 'kvlab.serving.scrape'} & set(sys.modules); "
            "sys.exit(str(heavy) if heavy else 0)")
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_another_engine_at_the_same_address_ends_a_watch_and_keeps_what_was_seen(tmp_path):
    with FakeEngine(vllm_page(), "sglang:num_running_reqs 3\n") as engine:
        error, _ = run(engine.url, *TWO, "--out", tmp_path / "w.parquet")
    assert isinstance(error, ValueError) and "was vllm and is sglang now" in str(error)
    assert read_table(tmp_path / "w.parquet")["case_id"].nunique() == 1


def test_a_name_of_a_model_without_end_is_cut(tmp_path):
    with FakeEngine(vllm_page().replace("org/m", "m" * 100_000)) as engine:
        code, shown = run(engine.url, "--once", "--json", "--out", tmp_path / "w.parquet")
    assert code == 0 and len(shown) < 10_000 and read_table(tmp_path / "w.parquet")["model"].str.len().max() == 200


def test_numbers_that_no_engine_counts_to_are_missing():
    pages = [vllm_page(running="1.7e308", engine=i) for i in "01"]
    with FakeEngine("".join(pages)) as engine:
        code, shown = run(engine.url, "--once")
    assert code == 0 and "missing running: the server gives 1.7e+308, which is no number between 0 and 1e+18" in shown


def test_ctrl_c_before_the_first_scrape_is_no_watch(tmp_path):
    with FakeEngine({"body": vllm_page(), "pause_s": 60}) as engine:
        command = [sys.executable, "-m", "kvlab", "watch", engine.url, "--timeout", "60s", "--out"]
        watching = subprocess.Popen([*command, str(tmp_path / "w.parquet")], stderr=subprocess.PIPE, text=True)
        while not engine.seen:
            time.sleep(0.05)
        watching.send_signal(signal.SIGINT)
        assert "Traceback" not in watching.communicate(timeout=60)[1] and watching.returncode == 130
    assert not (tmp_path / "w.parquet").exists()


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_a_watch_and_keeps_what_was_seen(tmp_path, sign):
    with FakeEngine(vllm_page()) as engine:
        command = [sys.executable, "-m", "kvlab", "watch", engine.url, "--every", "100ms", "--json"]
        watching = subprocess.Popen([*command, "--out", str(tmp_path / "w.parquet")], stdout=subprocess.PIPE,
                                    stderr=subprocess.PIPE, text=True)
        lines = [watching.stdout.readline() for _ in range(2)]
        watching.send_signal(sign)
        rest, errors = watching.communicate(timeout=60)
    assert watching.returncode == 0 and "Traceback" not in errors
    seen = len(lines) + len(rest.splitlines())                           # the last may be kept and not yet shown
    assert read_table(tmp_path / "w.parquet")["case_id"].nunique() in (seen, seen + 1)
