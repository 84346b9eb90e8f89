"""A real engine: llama.cpp's server on loopback is driven, its counters compared, its run recorded and served again."""
import json
import math

import pytest
from live_llama import llama_server

from kvlab.serving._replay_run import read_run
from kvlab.serving.drive import Ask, drive
from kvlab.serving.replay import replay
from kvlab.serving.scrape import Scrape
from kvlab.serving.step_fit import fitted_linear
from kvlab.serving.windows import History

SLOTS, CELLS = 2, 1024
META = {"model": "HuggingFaceTB/SmolLM2-135M", "engine": "llama.cpp",
        "engine_kwargs": {"max_num_seqs": SLOTS, "max_num_batched_tokens": 512, "enable_prefix_caching": False,
                          "async_scheduling": False, "tensor_parallel_size": 1},
        "kv_cache": {"num_gpu_blocks": CELLS // 16 + 1, "block_size": 16},
        "hardware": {"device_name": "the test's CPU"}}


@pytest.fixture(scope="module")
def server():
    """The address of a llama.cpp server that serves SmolLM2 with two slots."""
    with llama_server(SLOTS, CELLS) as url:
        yield url


def asks(seed):
    """Six requests for two slots: they queue."""
    return [Ask(0.15 * i, f"Chapter {seed}{i}. " + "The river rose and fell. " * (3 + 5 * (i % 3)), 6 + 4 * (i % 2))
            for i in range(6)]


@pytest.fixture(scope="module")
def runs(server, tmp_path_factory):
    """Two recorded runs, and what the server counted meanwhile."""
    folder, scrape = tmp_path_factory.mktemp("live"), Scrape.of(server, timeout_s=10)
    history = History([scrape.snapshot()])
    rows = [drive(server, asks(seed), folder / f"run{seed}", META, extra={"ignore_eos": True, "cache_prompt": False})
            for seed in (1, 2)]
    history.add(scrape.snapshot())
    return folder, rows, history.window(3600)


def test_what_was_recorded_is_what_the_server_counted(runs):
    _, rows, window = runs
    rows = [row for run in rows for row in run]
    assert not [row["error"] for row in rows if "error" in row]
    assert [row["output_toks"] for row in rows] == [ask.max_tokens for seed in (1, 2) for ask in asks(seed)]
    assert window.increase("generated_tokens") == sum(row["output_toks"] for row in rows)
    assert window.increase("prompt_tokens") == sum(row["input_toks"] for row in rows)
    assert all(row["queued_ts"] < row["first_token_ts"] < row["last_token_ts"] for row in rows)


def test_a_recorded_run_reads_as_what_was_sent(runs):
    folder, rows, _ = runs
    run = read_run(folder / "run1")
    assert run.get("model") == META["model"] and run.left_out == {} and len(run.requests) == 6
    assert [one.id for one in run.requests] == [row["request_id"] for row in rows[0]]      # sent in this order
    assert [one.output_tokens for one in run.requests] == [ask.max_tokens for ask in asks(1)]


def test_a_step_time_fitted_on_one_run_serves_both(runs, capsys):
    """On its own run the fit is near; on the other it is a prediction, printed and not bounded: a shared CPU drifts."""
    folder, _, _ = runs
    fitted = fitted_linear(folder / "run1")
    assert fitted.device == META["hardware"]["device_name"] and "run1" in fitted.source
    own, other = (replay(folder / name, step_time=fitted) for name in ("run1", "run2"))
    for found in (own, other):
        assert found.requests == 6 and found.preemptions == 0
        assert all(math.isfinite(error) for error in found.errors.values())
        assert found.step_time["device"] == "the test's CPU" and found.step_time["constants"] is None
    assert abs(own.errors["e2e_mean"]) < 0.25 and abs(own.errors["makespan"]) < 0.4
    with capsys.disabled():
        print("\nlive replay, in-sample and predicted: "
              + "; ".join(f"{name} {100 * own.errors[name]:+.0f} % {100 * other.errors[name]:+.0f} %"
                          for name in ("makespan", "ttft_mean", "tpot_mean", "e2e_mean")))


def test_a_step_time_is_not_carried_to_another_device(runs):
    folder, _, _ = runs
    with pytest.raises(ValueError, match="not carried to another device"):
        replay(folder / "run1", step_time=fitted_linear(folder / "run1"), gpu="RTX 4090")
    with pytest.raises(KeyError, match="no gpu named.*the test.*give it with --gpu"):
        replay(folder / "run1")


def test_a_request_that_fails_is_recorded_as_not_finished(server, tmp_path):
    rows = drive(server, [Ask(0, "Hello " * 3000, 4), Ask(0, "Hello", 2)], tmp_path / "run", META)
    assert "HTTP" in rows[0]["error"] and rows[0]["last_token_ts"] is None and rows[1]["output_toks"] >= 1
    kept = [json.loads(line) for line in (tmp_path / "run" / "requests.jsonl").read_text().splitlines()]
    assert kept == rows


def test_what_cannot_be_driven_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must look like http://host:port, without credentials"):
        drive("ftp://127.0.0.1", [Ask(0, "a", 1)], tmp_path / "a", META)
    with pytest.raises(ValueError, match="no requests"):
        drive("http://127.0.0.1:1", [], tmp_path / "b", META)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "x").write_text("")
    with pytest.raises(ValueError, match="not empty"):
        drive("http://127.0.0.1:1", [Ask(0, "a", 1)], tmp_path / "c", META)
    rows = drive("http://127.0.0.1:1", [Ask(0, "a", 1)], tmp_path / "d", META)      # nobody listens there
    assert "refused" in rows[0]["error"]
    with pytest.raises(ValueError, match="no finished request"):
        read_run(tmp_path / "d")
