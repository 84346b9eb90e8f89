"""Recorded runs served again: real ones within 5 %, made ones exactly, bad ones refused with a sentence."""
import json
import random

import pytest
from made_runs import META, row, write
from shared_data import shared_data

from kvlab.catalog.gpus import gpu
from kvlab.catalog.models import model
from kvlab.serving._replay_run import read_run
from kvlab.serving._replay_setup import setup
from kvlab.serving.model_work import ranked
from kvlab.serving.replay import FITTED, explain, fitted_scale, replay
from kvlab.serving.request import Request
from kvlab.serving.scheduler import SchedulerConfig
from kvlab.serving.simulator import simulate
from kvlab.serving.step_models import parts
from kvlab.serving.step_time import Linear

RUNS = [("rtx4090_llama-3.1-8b", {}), ("rtxpro6000_llama-3.1-8b", {"gpu": "RTX PRO 6000"})]


def made(folder, scale=1.0, dp=1, meta=META, name="RTX 4090", **config):
    """A run that the simulator itself served, with a step time `scale` times the GPU's: what a replay must find."""
    rng, spec = random.Random(3), model(meta["model"])
    requests = [Request(f"r{i}", 0.05 * i, rng.randint(20, 900), rng.randint(2, 120)) for i in range(60)]
    step = parts(gpu(name), ranked(spec, dp=dp)).scaled(scale, "made")
    done = simulate(requests, SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512, async_scheduling=True,
                                              **config),
                    num_blocks=600, step_time=step, replicas=dp, lockstep=dp > 1)
    rows = [row(queued=5000 + one.request.arrival_s, first=5000 + one.first_token_s, last=5000 + one.last_token_s,
                prompt=one.request.prompt_tokens, output=one.generated, extra=None) | {"request_id": one.request.id}
            for one in done.served]
    series = "t,running,waiting,kv_cache_pct,other\n" + "".join(
        f"{t},{running},{waiting},{100 * usage},x\n" for t, running, waiting, _, usage, *_ in done.samples)
    return write(folder, rows, meta, series)


@pytest.mark.parametrize("name,given", RUNS)
def test_a_real_run_fitted_on_itself_is_within_five_percent(name, given):
    found = replay(shared_data(f"engine_runs/{name}"), fit="scalar", **given)
    assert found.requests == 300 and found.left_out == {} and len(found.errors) == 13
    assert max(map(abs, found.errors.values())) < 0.05
    assert "fitted on this run" in found.step_time["source"] and found.step_time["in_sample"]


@pytest.mark.parametrize("name,given", RUNS)
def test_the_data_sheet_and_one_factor_are_enough_on_a_real_run(name, given):
    """Out-of-fit evidence: without any constant but the sheet's, one factor brings all 13 statistics near."""
    sheet = replay(shared_data(f"engine_runs/{name}"), constants="sheet", **given)
    fitted = replay(shared_data(f"engine_runs/{name}"), constants="sheet", fit="scalar", **given)
    assert sheet.errors["tpot_mean"] < -0.15                        # no engine reaches its data sheet
    assert 1.1 < fitted.scale < 1.7 and max(map(abs, fitted.errors.values())) < 0.05


def test_a_real_runs_facts_and_their_sources():
    found = replay(shared_data("engine_runs/rtx4090_llama-3.1-8b"))
    assert found.blocks["value"] == 2588 and found.blocks["kind"] == "quoted" and found.blocks["source"] == "meta"
    assert abs(found.blocks["modelled_error"]) < 0.05               # kvlab plan comes that near
    assert found.scheduler["max_num_seqs"] == {"value": 256, "source": "meta"}
    assert found.scheduler["async_scheduling"]["value"] is True
    assert found.real["makespan"] == pytest.approx(183.569, abs=1e-3) and found.simulated["ttft_mean"] > 0
    assert found.series_mae["running"] < 3 and found.series_mae["kv_cache_pct"] < 4
    assert "perhaps this one" in found.step_time["in_sample"]


def test_a_run_that_lacks_gpu_and_blocks_takes_them_from_arguments_and_capacity():
    folder = shared_data("engine_runs/rtxpro6000_llama-3.1-8b")
    with pytest.raises(ValueError, match="does not say its GPU: give it with --gpu"):
        replay(folder)
    found = replay(folder, gpu="RTX PRO 6000", gpus=1)
    assert found.blocks["kind"] == "modelled" and found.blocks["source"].startswith("capacity")
    assert found.series_mae["kv_cache_pct"] == "0 in every row of the run"
    given = replay(folder, gpu="RTX PRO 6000", blocks=30_000)
    assert given.blocks["value"] == 30_000 and given.blocks["source"].startswith("argument")
    with pytest.raises(ValueError, match="it has 1 replicas of 1 GPUs"):
        replay(folder, gpu="RTX PRO 6000", gpus=2)


def test_a_made_run_is_found_exactly(tmp_path):
    found = replay(made(tmp_path / "run"))
    assert all(abs(error) < 1e-9 for error in found.errors.values())
    assert found.requests == 60 and found.scale == 1 and found.fit == "none"
    assert found.series_mae == {name: pytest.approx(0, abs=1e-9) for name in ("running", "waiting", "kv_cache_pct")}


def test_the_factor_of_a_made_run_is_found(tmp_path):
    folder = made(tmp_path / "run", scale=1.3)
    found = replay(folder, fit="scalar")
    assert found.scale == pytest.approx(1.3, rel=0.01) and abs(found.errors["e2e_p99"]) < 0.02
    scale, words = fitted_scale(folder)
    carried = replay(made(tmp_path / "other", scale=1.3), carried=(scale, words))
    assert carried.fit == "carried" and "fitted on meta-llama" in carried.step_time["source"]
    assert max(abs(carried.errors[name]) for name in FITTED) < 0.02


@pytest.mark.parametrize("scale", [0.2, 6.0])
def test_a_factor_far_from_one_is_found(tmp_path, scale):
    assert replay(made(tmp_path / "run", scale=scale), fit="scalar").scale == pytest.approx(scale, rel=0.05)


def test_replicas_of_a_mixture_go_in_lockstep_and_share_the_blocks_that_vllm_sums(tmp_path):
    meta = META | {"model": "/data/model/Qwen3-30B-A3B-Instruct-2507", "vllm_version": "0.28.0",
                   "engine_kwargs": META["engine_kwargs"] | {"data_parallel_size": 2, "enable_expert_parallel": True},
                   "kv_cache": META["kv_cache"] | {"num_gpu_blocks": 1200},
                   "hardware": {"device_name": "NVIDIA RTX PRO 6000 Blackwell Server Edition"}}
    folder = made(tmp_path / "run", dp=2, meta=meta | {"model": "Qwen/Qwen3-30B-A3B"}, name="RTX PRO 6000")
    write(folder, [line + "\n" for line in (folder / "requests.jsonl").read_text().splitlines()], meta)
    found = replay(folder)
    assert found.blocks["value"] == 600 and found.blocks["replicas"] == 2
    assert "sums over its 2" in found.blocks["source"]
    assert all(abs(error) < 1e-9 for error in found.errors.values())
    assert setup(read_run(folder)).lockstep


def test_explain_swaps_one_thing_at_a_time(tmp_path):
    folder = made(tmp_path / "run", scale=1.25)
    meta = META | {"kv_cache": META["kv_cache"] | {"gpu_memory_utilization": 0.9},
                   "engine_kwargs": META["engine_kwargs"] | {"max_model_len": 4096}}
    (folder / "meta.json").write_text(json.dumps(meta))
    found = explain(folder)
    assert [(one["blocks"], one["step_time"]) for one in found["rows"]] == [
        ("true", "modelled"), ("true", "fitted"), ("modelled", "modelled"), ("modelled", "fitted")]
    errors = {(one["blocks"], one["step_time"]): one["errors"]["e2e_mean"] for one in found["rows"]}
    split = {part: values["e2e_mean"] for part, values in found["split"].items()}
    assert split["blocks"] == errors["modelled", "modelled"] - errors["true", "modelled"]
    assert split["step_time"] == errors["true", "modelled"] - errors["true", "fitted"] < -0.1
    assert split["scheduler"] == errors["true", "fitted"] and abs(split["scheduler"]) < 0.02
    assert found["rows"][2]["num_blocks"] != 600 and found["missing"] == ""
    del meta["kv_cache"]["num_gpu_blocks"]
    (folder / "meta.json").write_text(json.dumps(meta))
    assert explain(folder)["split"]["blocks"] is None and "does not say its blocks" in explain(folder)["missing"]


def test_rows_in_any_order_with_nulls_and_extras(tmp_path):
    rows = [row(i, 1000 + i, 1001 + i, 1003 + i, scheduled_ts=None) for i in range(5)]
    whole = replay(write(tmp_path / "a", rows))
    mixed = [rows[3], rows[0], rows[4], rows[2], rows[1], row(7, 1001.5, None, None),
             row(8, output=0), row(9, prompt=None), row(10, queued_ts=None, arrival_time=None), "\n"]
    found = replay(write(tmp_path / "b", mixed))
    assert found.requests == 5 and found.real == whole.real
    assert found.left_out == {"with no output tokens": 1, "with no prompt tokens": 1, "without a queued_ts": 1,
                              "not finished in the run (served here all the same)": 1}
    assert found.steps >= whole.steps                               # the unfinished one was served beside them


def test_a_request_of_one_token_has_no_tpot(tmp_path):
    found = replay(write(tmp_path / "run", [row(0, 1000, 1001, 1001, output=1)]))
    assert found.errors["tpot_mean"] is None and found.real["tpot_p99"] is None and found.errors["e2e_mean"] is not None


def test_a_stamp_of_zero_is_none(tmp_path):
    """vLLM's statistics begin at 0.0 and stay there for what did not come."""
    rows = [row(0), row(1, 1000.5, 1001, 0.0), row(2, 1000.6, 0.0, 0.0), row(3, queued_ts=0.0, arrival_time=0)]
    found = replay(write(tmp_path / "run", rows))
    assert found.requests == 1 and found.left_out == {
        "without a queued_ts": 1, "not finished in the run (served here all the same)": 2}


def test_requests_come_when_they_arrived_not_when_the_engine_next_looked(tmp_path):
    """queued_ts is up to a step late; the least lag is the difference of the two clocks."""
    rows = [row(0, 1000.0), row(1, 1000.8, arrival_time=1.7e9 + 1000.5), row(2, 1001.0, 1001.5)]
    run = read_run(write(tmp_path / "run", rows))
    assert run.clock == "arrival_time" and [one.arrived_s for one in run.requests] == pytest.approx([0, 0.5, 1.0])
    assert replay(tmp_path / "run").real["ttft_p50"] == pytest.approx(0.5, abs=1e-6)
    far = [row(0, 1000.0), row(1, 1000.8, arrival_time=1.7e9 + 100.0)]
    apart = read_run(write(tmp_path / "far", far))
    assert any("up to a step late" in note for note in replay(tmp_path / "far").notes)
    assert not any("up to a step late" in note for note in replay(tmp_path / "run").notes)
    assert apart.clock == "queued_ts" and [one.arrived_s for one in apart.requests] == pytest.approx([0, 0.8])


def test_arrival_time_stands_in_where_it_is_of_the_same_clock(tmp_path):
    rows = [row(i, 1000 + i, 1001 + i, 1002 + i, queued_ts=None, arrival_time=1000.0 + i) for i in range(3)]
    assert replay(write(tmp_path / "run", rows)).real["ttft_mean"] == pytest.approx(1.0)
    rows = [row(0), row(1, queued_ts=None, arrival_time=1.7e9 + 1000.5)]        # epoch seconds beside monotonic ones
    assert [one.arrived_s for one in read_run(write(tmp_path / "two", rows)).requests] == pytest.approx([0, 0.5])
    rows = [row(0, arrival_time=None), row(1, queued_ts=None)]
    assert replay(write(tmp_path / "three", rows)).left_out == {"without a queued_ts": 1}


@pytest.mark.parametrize("rows,why", [
    (["{\"request_id\": 1,\n"], "line 1 is not JSON"),
    ([row(0), "[1, 2]\n"], "line 2 is no JSON object"),
    ([row(0, queued=float("nan"))], "line 1 has NaN; a number must be finite"),
    ([row(0, queued=-3.0)], "queued_ts=-3.0 is no time of at least 0 s"),
    ([row(0, first=999.0)], "line 1: queued at 1000.0, first token at 999.0, last at 1002.0: times go back"),
    ([row(0, last=1000.5)], "times go back"),
    ([row(0, last=2e6)], "stamps of different clocks"),
    ([row(0, prompt=-1)], "input_toks=-1 is no whole number"),
    ([row(0, output=2.5)], "output_toks=2.5"),
    ([row(0, output=True)], "output_toks=True"),
    ([row(0), row(0, 1001, 1002, 1003)], "line 2: request_id 'r0' was there before"),
    ([row(0), row(1, 9e5, 9e5, 9e5)], "not stamps of one clock"),
    ([row(0, first=None, last=None)], "no finished request"),
    ([row(0, output=0)], "no finished request: nothing to compare with; left out: 1 with no output tokens"),
    ([], "no finished request"),
])
def test_bad_requests_are_refused_with_their_line(tmp_path, rows, why):
    import re
    with pytest.raises(ValueError, match=re.escape(why)):
        replay(write(tmp_path / "run", rows))


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is no folder"):
        replay(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="has no requests.jsonl"):
        replay(tmp_path)
    with pytest.raises(ValueError, match="not JSON"):
        (write(tmp_path / "a", [row(0)]) / "meta.json").write_text("{")
        replay(tmp_path / "a")
    (write(tmp_path / "b", []) / "requests.jsonl").write_bytes(b"{\xff}\n")
    with pytest.raises(ValueError, match="line 1 is not UTF-8"):
        replay(tmp_path / "b")
    (write(tmp_path / "d", [row(0)], series="t,running\n1," + 2**18 * "9")).exists()
    with pytest.raises(ValueError, match="is no CSV"):
        read_run(tmp_path / "d")
    with pytest.raises(KeyError, match="scaler"):
        replay(write(tmp_path / "c", [row(0)]), fit="scaler")
    with pytest.raises(KeyError, match="constants"):
        replay(tmp_path / "c", constants="H100")
    with pytest.raises(ValueError, match="blocks=1,000,000,000 are more than the"):
        replay(tmp_path / "c", blocks=10**9)
    with pytest.raises(KeyError, match="RTX 40900"):
        replay(tmp_path / "c", gpu="RTX 40900")
    with pytest.raises(ValueError, match="either fitted"):
        replay(tmp_path / "c", fit="scalar", carried=(1.0, ""))


def test_a_request_larger_than_the_pool_is_rejected_with_the_arithmetic(tmp_path):
    rows = [row(0), row(1, prompt=20_000)]
    found = replay(write(tmp_path / "run", rows))
    (why, count), = found.left_out.items()
    assert count == 1 and found.requests == 1
    assert "it needs 1,251 blocks (20,010 tokens in blocks of 16), and the pool has 599" in why
    with pytest.raises(ValueError, match="finished none of the run's requests: it needs 1,251 blocks"):
        replay(write(tmp_path / "all", [row(1, prompt=20_000)]))


def test_a_series_with_holes_is_read_as_far_as_it_goes(tmp_path):
    series = "t,running,note\n1.0,1,a\n2.0,,b\n3.0,nan,c\n4.0,x,d\n5.0\n"
    run = read_run(write(tmp_path / "run", [row(0)], series=series))
    assert run.series == {"t": [1.0], "running": [1.0]}
    assert read_run(write(tmp_path / "two", [row(0)], series="time,running\n1,1\n")).series == {}


def test_a_step_time_of_ones_own_is_of_its_device_only(tmp_path):
    folder = made(tmp_path / "run")
    own = Linear(0.01, 1e-5, 1e-4, 0, "RTX 4090", "a test")
    with pytest.raises(ValueError, match="not carried to another device"):
        replay(folder, step_time=own)                               # the run says NVIDIA GeForce RTX 4090
    found = replay(folder, step_time=own, gpu="RTX 4090")
    assert found.step_time["constants"] is None and found.step_time["source"].startswith("a test")
