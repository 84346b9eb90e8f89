"""kvlab simulate: what it prints, what it writes, and the sentences for wrong use."""
import gzip
import json
import math
import sys

import pandas as pd
import pytest

from kvlab.cli import main


@pytest.fixture
def kvlab(monkeypatch, capsys):
    """Run the command line; (code, stdout, stderr)."""
    def run(*args):
        monkeypatch.setattr(sys, "argv", ["kvlab", "simulate", *map(str, args)])
        with pytest.raises(SystemExit) as left:
            main()
        return (left.value.code, *capsys.readouterr())
    return run


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({"id": f"q{i}", "arrival_s": 0.2 * i, "prompt_tokens": 50 + 10 * i,
                                        "output_tokens": 5 + i}) + "\n" for i in range(30)))
    return path


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "meta.json").write_text(json.dumps({"model": "meta-llama/Llama-3.1-8B", "vllm_version": "0.19.0",
                                                  "kv_cache": {"num_gpu_blocks": 600}}))
    (folder / "requests.jsonl").write_text("".join(json.dumps(
        {"request_id": i, "input_toks": 200, "output_toks": 20, "queued_ts": 100 + i, "first_token_ts": 100.1 + i,
         "last_token_ts": 100.6 + i}) + "\n" for i in range(8)))
    return folder


LLAMA = ("meta-llama/Llama-3.1-8B", "--gpu", "RTX 4090")


def test_a_summary_in_words(kvlab, trace):
    code, out, err = kvlab(*LLAMA, "--requests", trace, "--blocks", 500)
    assert code == 0 and err == ""
    for said in ("all times simulated", "TTFT", "TPOT", "p99", "30 finished", "preemptions", "prefix hits",
                 "step time, modelled: RTX 4090, data sheet and constants of runs of it", "in-sample",
                 "500 blocks a replica (quoted)"):
        assert said in out
    assert max(map(len, out.splitlines())) < 200 and "least squares" not in out
    in_full = kvlab(*LLAMA, "--requests", trace, "--blocks", 500, "--explain")[1]
    assert "step time, modelled: RTX 4090's data sheet; vLLM 0.19.0" in in_full and "least squares" in in_full


def test_a_summary_in_json_and_what_is_written(kvlab, trace, tmp_path):
    files = [tmp_path / name for name in ("t.json.gz", "m.txt", "o.parquet")]
    code, out, _ = kvlab(*LLAMA, "--requests", trace, "--json", "--trace", files[0], "--metrics", files[1], "--out",
                         files[2])
    found = json.loads(out)
    assert code == 0 and found["summary"]["requests"] == 30 and found["written"] == [str(path) for path in files]
    assert found["blocks"]["kind"] == "modelled" and found["blocks"]["source"].startswith("kvlab plan")
    assert found["scheduler"]["max_num_seqs"] == 256 and found["scheduler"]["max_num_batched_tokens"] == 2048
    assert found["step_time"]["constants"]["kv_share"] < 1
    with gzip.open(files[0]) as file:
        assert json.load(file)["otherData"]["clock"] == "simulated"
    assert 'kvlab_sim:request_success_total{' in files[1].read_text()
    table = pd.read_parquet(files[2])
    assert list(table["id"]) == [f"q{i}" for i in range(30)] and table["ttft_s"].min() > 0
    assert math.isclose(table["ttft_s"].mean(), found["summary"]["ttft_mean_s"])


def test_a_trace_of_less_than_a_second_has_metrics_too(kvlab, trace, tmp_path):
    code, _, err = kvlab(*LLAMA, "--requests", trace, "--count", 1, "--blocks", 500, "--metrics", tmp_path / "m.txt")
    assert (code, err) == (0, "") and 'finished_reason="stop",model_name="meta-llama/Meta-Llama-3.1-8B"} 1.0' in (
        tmp_path / "m.txt").read_text()


def test_a_workload_at_a_rate_is_the_same_for_the_same_seed(kvlab):
    asked = (*LLAMA, "--requests", "azure_2023_conv", "--count", 40, "--rate", 2, "--blocks", 2000, "--json")
    one, two, other = (json.loads(kvlab(*asked, *more)[1])["summary"] for more in ((), (), ("--seed", 1)))
    assert one == two != other and one["requests"] == 40


def test_a_traces_times_are_scaled_to_a_rate(kvlab, trace, tmp_path):
    for rate in (1, 20):
        kvlab(*LLAMA, "--requests", trace, "--rate", rate, "--blocks", 500, "--out", tmp_path / f"{rate}.csv")
    slow, fast = (pd.read_csv(tmp_path / f"{rate}.csv") for rate in (1, 20))
    assert slow["arrival_s"].iloc[-1] == pytest.approx(29) and fast["arrival_s"].iloc[-1] == pytest.approx(29 / 20)


def test_options_reach_the_scheduler(kvlab, trace):
    options = {"--policy": "short_first", "--admission": "first_chunk", "--max-num-seqs": 3, "--max-batched-tokens": 64,
               "--watermark": 0.1, "--aging": 2.5, "--short-threshold": 99, "--max-len": 300}
    given = [part for pair in options.items() for part in pair]
    found = json.loads(kvlab(*LLAMA, "--requests", trace, "--blocks", 500, "--json", "--no-prefix-caching",
                             "--async-scheduling", *given)[1])["scheduler"]
    assert found == found | dict(policy="short_first", admission="first_chunk", max_num_seqs=3, watermark=0.1,
                                 max_num_batched_tokens=64, aging_s=2.5, short_threshold=99, max_model_len=300,
                                 prefix_caching=False, async_scheduling=True)


def test_replicas_share_the_requests(kvlab, trace):
    one = json.loads(kvlab(*LLAMA, "--requests", trace, "--rate", 60, "--blocks", 500, "--json")[1])
    four = json.loads(kvlab(*LLAMA, "--gpus", 4, "--tp", 1, "--requests", trace, "--rate", 60, "--blocks", 500,
                            "--json")[1])
    assert (one["replicas"], four["replicas"]) == (1, 4)
    assert four["summary"]["e2e_mean_s"] < one["summary"]["e2e_mean_s"]


def test_kernels_of_this_machine_are_a_step_time(kvlab, trace):
    from kvlab.catalog import data_dir
    kernels = data_dir() / "reference" / "memory_wall.parquet"
    code, out, _ = kvlab("SmolLM2-135M", "--kernels", kernels, "--blocks", 400, "--requests", trace, "--count", 3,
                         "--json")
    found = json.loads(out)["step_time"]
    assert code == 0 and "GPU" not in found["device"] and "measured on" in found["source"]
    for wrong, why in ((("--gpu", "H200"), "not carried to another"), (("--replay", "x"), "not replayed with them")):
        code, _, err = kvlab("SmolLM2-135M", "--kernels", kernels, "--blocks", 400, *wrong)
        assert code == 2 and why in err
    code, _, err = kvlab("SmolLM2-135M", "--kernels", kernels)
    assert code == 2 and "needs --blocks" in err


def test_the_last_state_is_the_summarys(kvlab, tmp_path):
    for gpus in (1, 3):
        out = kvlab(*LLAMA, "--gpus", gpus, "--tp", 1, "--count", 60, "--rate", 5, "--blocks", 2000, "--json",
                    "--metrics", tmp_path / "m.txt")[1]
        lines = dict(line.rsplit(" ", 1) for line in (tmp_path / "m.txt").read_text().splitlines() if line[0] != "#")
        state = {name.partition("{")[0].removeprefix("kvlab_sim:"): float(value) for name, value in lines.items()}
        assert state["request_success_total"] == json.loads(out)["summary"]["requests"] == 60
        assert state["num_requests_running"] == state["num_requests_waiting"] == 0


def test_what_a_trace_leaves_out_is_said(kvlab, trace, tmp_path):
    trace.write_text(trace.read_text() + "{bad\n")
    asked = (*LLAMA, "--requests", trace, "--blocks", 500)
    code, _, err = kvlab(*asked)
    assert code == 2 and "line 31" in err and "--skip-bad" in err and 'bad="skip"' not in err
    code, out, _ = kvlab(*asked, "--skip-bad")
    assert code == 0 and "left out: 1 bad lines (the first:" in out
    assert "line 31" in json.loads(kvlab(*asked, "--skip-bad", "--rate", 3, "--json")[1])["left_out"]
    burst = tmp_path / "burst.csv"
    burst.write_text("Timestamp,Request tokens,Response tokens\n0,10,5\n1,10,0\n2,10,5\n")
    assert "left out: 1 that failed in the trace itself" in kvlab(*LLAMA, "--requests", burst, "--blocks", 500)[1]


def test_quantised_weights_are_smaller_and_read_faster(kvlab, trace):
    def found(*more):
        return json.loads(kvlab(*LLAMA, "--requests", trace, "--json", *more)[1])
    plain, bits, gib = found(), found("--weight-bits", 4), found("--weights-gib", 5)
    assert bits["blocks"]["value"] > plain["blocks"]["value"] < gib["blocks"]["value"]
    for one in (bits, gib):
        assert one["summary"]["tpot_mean_s"] < 0.7 * plain["summary"]["tpot_mean_s"]
    assert found("--util", 0.8)["blocks"]["value"] < plain["blocks"]["value"]
    assert found("--kv-format", "fp8_e4m3")["blocks"]["value"] >= 2 * plain["blocks"]["value"] - 1
    assert "--weight-bits" in kvlab("gpt-oss-20b", "--gpu", "RTX PRO 6000")[2]
    code, out, _ = kvlab("gpt-oss-20b", "--gpu", "RTX PRO 6000", "--requests", trace, "--weight-bits", 4)
    assert code == 0 and "30 finished" in out


@pytest.mark.parametrize("gpu,tp,link", [("H100 SXM", 4, "over NVLink, assumed, not fitted; not in-sample"),
                                         ("H100 PCIe", 4, "over PCIe as between two RTX PRO 6000")])
def test_the_link_between_ranks_is_said(kvlab, trace, gpu, tp, link):
    out = kvlab("Llama-3.1-8B", "--gpu", gpu, "--gpus", tp, "--tp", tp, "--requests", trace, "--count", 2)[1]
    assert link in next(line for line in out.splitlines() if line.startswith("step time"))


def test_the_highest_rate_that_keeps_a_limit(kvlab):
    asked = (*LLAMA, "--requests", "azure_2023_conv", "--count", 80, "--blocks", 2500, "--json")
    limits = ("--find-rate", "--ttft-p99", "1500ms", "--tpot-p99", "50ms")
    found = json.loads(kvlab(*asked, *limits)[1])
    rate, above = found["find_rate"]["rate"], found["find_rate"]["above"]
    assert rate < above <= 1.02 * rate and found["find_rate"]["kind"] == "simulated"
    assert found["summary"] == json.loads(kvlab(*asked, "--rate", rate)[1])["summary"]
    assert found["summary"]["ttft_p99_s"] < 1.5 and found["summary"]["tpot_p99_s"] < 0.05
    over = json.loads(kvlab(*asked, "--rate", above)[1])["summary"]
    assert over["ttft_p99_s"] >= 1.5 or over["tpot_p99_s"] >= 0.05
    assert "highest rate with ttft p99 < 1.5 s and tpot p99 < 50 ms" in kvlab(*asked[:-1], *limits)[1]
    code, out, err = kvlab(*asked, "--find-rate", "--tpot-p99", "1ms")
    assert code == 2 and out == "" and "tpot_p99_s < 0.001 does not hold even at" in err


def test_a_request_larger_than_the_pool_is_rejected_and_said(kvlab, trace):
    code, out, _ = kvlab(*LLAMA, "--requests", trace, "--blocks", 20)
    assert code == 0 and "rejected, the first: it needs" in out
    code, out, _ = kvlab(*LLAMA, "--requests", trace, "--blocks", 2)
    assert code == 1 and "0 finished" in out


def test_a_replay_in_json_and_in_words(kvlab, run):
    code, out, _ = kvlab("--replay", run, "--gpu", "RTX 4090", "--fit", "scalar", "--json")
    found = json.loads(out)
    assert code == 0 and found["fit"] == "scalar" and {"makespan", "ttft_mean", "ttft_p99", "tpot_mean", "e2e_mean",
                                                       "e2e_p99"} <= set(found["errors"])
    assert found["blocks"]["value"] == 600 and found["real"]["makespan"] == pytest.approx(7.6)
    code, out, err = kvlab("--replay", run, "--gpu", "RTX 4090", "--explain")
    assert code == 0 and err.startswith("kvlab: fitting a factor")
    assert kvlab("--replay", run, "--gpu", "RTX 4090")[2] == ""
    for said in ("error = simulated ÷ real − 1", "TTFT p99", "blocks of a replica: 600", "scheduler, the rest",
                 "of the error", "note: the run's tokens are not recorded"):
        assert said in out
    assert "explain" in json.loads(kvlab("--replay", run, "--gpu", "RTX 4090", "--explain", "--json")[1])


def test_a_factor_is_carried(kvlab, run):
    own = json.loads(kvlab("--replay", run, "--gpu", "RTX 4090", "--fit", "scalar", "--json")[1])
    carried = json.loads(kvlab("--replay", run, "--gpu", "RTX 4090", "--scale-from", run, "--scale-gpu", "RTX 4090",
                               "--json")[1])
    assert carried["fit"] == "carried" and carried["scale"] == own["scale"] and carried["errors"] == own["errors"]


@pytest.mark.parametrize("args,why", [
    ((), "say which MODEL to simulate, or give a recorded run with --replay"),
    (("Llama-3.1-8B",), "say on which --gpu"),
    (("Llama-3.1-8B", "--gpu", "RTX 4090", "--fit", "scalar"), "give it with --replay"),
    (("Llama-3.1-8B", "--gpu", "RTX 40900"), "RTX 40900"),
    (("Llama-3.1-8B", "--gpu", "RTX 4090", "--requests", "no_such"), "neither a file nor a workload"),
    (("Llama-3.1-8B", "--gpu", "RTX 4090", "--rate", "0"), "rate=0.0 must be above 0"),
    (("Llama-3.1-8B", "--gpu", "RTX 4090", "--policy", "lottery"), "policy='lottery' is unknown"),
    (("Llama-3.1-8B", "--gpu", "RTX 4090", "--out", "table.txt"), "ends in .csv or .parquet"),
    (("Llama-3.1-8B", "--gpu", "RTX 4090", "--constants", "H100"), "H100"),
    (("Llama-3.1-8B", "--gpu", "RTX 4090", "--blocks", "0"), "blocks=0"),
    (("--replay", "/no/such/folder"), "is no folder"),
    (("--replay", ".", "--scale-gpu", "H200"), "give that too"),
    (("--replay", ".", "--requests", "x", "--max-num-seqs", "3"), "--requests, --max-num-seqs cannot be set with --re"),
    (("Llama-3.1-8B", "--gpu", "RTX 4090", "--scale-gpu", "H200"), "give it with --replay"),
    (("Llama-3.1-8B", "--gpu", "RTX 4090", "--trace", "x.txt"), "--trace x.txt: give a name that ends in .json or .j"),
    (("Llama-3.1-8B", "--gpu", "RTX 4090", "--trace", "/no/such/t.json"), "/no/such/t.json: there is no folder"),
    (("Llama-3.1-8B", "--gpu", "RTX 4090", "--metrics", "/"), "--metrics /: that is a folder"),
    pytest.param(("Llama-3.1-8B", "--gpu", "RTX 4090", "--count", "1", "--metrics", "/proc/m.txt"), "cannot be written",
                 marks=pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")),
    (("--replay", ".", "--find-rate"), "--find-rate cannot be set with --replay"),
    (("SmolLM2-135M", "--kernels", "/no/such", "--blocks", "9"), "/no/such is no file; give readings.parquet"),
    (("SmolLM2-135M", "--kernels", "x", "--blocks", "9", "--util", "0.5"), "--util, --weights-gib, --weight-bits and"),
    (("deepseek-v3", "--gpu", "H200", "--gpus", "8", "--tp", "1", "--blocks", "41071"), "does not fit"),
    (("Llama-3.1-8B", "--gpu", "RTX 4090", "--find-rate"), "--find-rate needs a limit, such as --ttft-p99 2s"),
    (("Llama-3.1-8B", "--gpu", "RTX 4090", "--ttft-p99", "2s"), "are limits of --find-rate: give that too"),
    (("Llama-3.1-8B", "--gpu", "RTX 4090", "--find-rate", "--ttft-p99", "2 weeks"), "--ttft-p99 '2 weeks' is no time"),
    (("Llama-3.1-8B", "--gpu", "RTX 4090", "--find-rate", "--tpot-p99", "2s", "--rate", "1"), "give one of them"),
])
def test_wrong_use_is_one_sentence(kvlab, args, why):
    code, out, err = kvlab(*args)
    assert code == 2 and out == "" and why in err and "Traceback" not in err and err.count("\n") == 1
