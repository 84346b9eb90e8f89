"""kvlab plan: what it prints, what it refuses in one sentence, and its exit codes."""
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from shared_data import shared_data

from kvlab.cli import main


@pytest.fixture
def run_here(monkeypatch, capsys):
    def called(*arguments):
        monkeypatch.setattr(sys, "argv", ["kvlab", "plan", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()
    return called


LLAMA = ("llama-3.1-8b", "--gpu", "RTX 4090", "--util", 0.9, "--max-len", 8192, "--graphs-gib", 0)


def test_text_says_terms_kinds_and_what_binds(run_here):
    code, out, err = run_here(*LLAMA)
    assert (code, err) == (0, "")
    for words in ("VRAM             23.52", "weights          14.96", "activation peak", "CUDA graphs       0.00",
                  "KV pool", "quoted", "modelled", "the pool binds, not max_num_seqs 256", "native", "storage-only",
                  "tp 1 is the least"):
        assert words in out
    assert max(map(len, out.splitlines())) <= 200


def test_json_is_the_whole_plan(run_here):
    code, out, _ = run_here(*LLAMA, "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["gpu"], found["tp"], found["binds"], found["starts"]) == ("RTX 4090", 1, "pool", True)
    assert [term["name"] for term in found["terms"]] == ["VRAM", "weights", "non-torch", "activation peak",
                                                         "CUDA graphs"]
    assert found["terms"][4]["value"] == 0 and found["pool"]["low"] < found["pool"]["value"] < found["pool"]["high"]
    assert found["requests"] == (found["blocks"] - 1) // 512
    assert [row["kv_format"] for row in found["formats"]][:2] == ["bf16", "fp8_e4m3"]


def test_every_flag_arrives(run_here):
    _, out, _ = run_here("qwen2-72b", "--gpu", "H200", "--gpus", 8, "--tp", 4, "--util", 0.8, "--max-num-seqs", 33,
                         "--max-batched-tokens", 4096, "--block-size", 32, "--max-len", 5000, "--kv-format", "fp8_e4m3",
                         "--prefix-share", 0.25, "--weights-gib", 140, "--vram-gib", 141, "--non-torch-gib", 1,
                         "--activation-gib", 2, "--graphs-gib", 3, "--json")
    found = json.loads(out)
    assert [found[name] for name in ("gpus", "tp", "replicas", "util", "max_num_seqs", "max_batched_tokens",
                                     "block_size", "max_len", "kv_format", "prefix_share")] == [
        8, 4, 2, 0.8, 33, 4096, 32, 5000, "fp8_e4m3", 0.25]
    assert [term["value"] / 2**30 for term in found["terms"]] == [141, 35, 1, 2, 3]
    assert found["shared_blocks"] == 1250 // 32
    two = ("qwen2-72b", "--gpu", "H200", "--gpus", 2, "--tp", 2, "--max-len", 100, "--json")
    _, out, _ = run_here(*two, "--blocks", 1000)
    assert json.loads(out)["blocks"] == 1000
    _, out, _ = run_here(*two, "--pool-gib", 5)
    assert json.loads(out)["blocks"] == 2048
    _, out, _ = run_here(*two, "--weight-bits", 8)
    assert json.loads(out)["terms"][1]["how"].endswith("× 8 bits, scales and unquantised layers not counted, ÷ tp 2")


def test_what_does_not_start_is_shown_with_exit_code_1(run_here):
    code, out, _ = run_here("llama-3.1-8b", "--gpu", "RTX 4090")
    assert code == 1 and out.startswith("DOES NOT START: not one request of 131,072 tokens") and (
        "note: does not start: one request of 131,072 tokens takes 8,192 blocks" in out)


def test_a_cpu_is_planned_by_its_pool_alone_with_its_own_defaults(run_here):
    code, out, _ = run_here("llama-3.1-8b", "--gpu", "CPU server EPYC 9654 12ch DDR5-4800", "--pool-gib", 40,
                            "--block-size", 128, "--max-len", 4096, "--json")
    found = json.loads(out)
    assert (code, found["terms"], found["max_num_seqs"], found["max_batched_tokens"]) == (0, [], 128, 2048)
    assert found["blocks"] == 40 * 2**30 // (128 * 131072)


def test_which_gpus(run_here):
    code, out, _ = run_here("qwen2-72b", "--need", 16, "--max-len", 4096)
    assert code == 0 and "A100 SXM4 80GB" in out and "16 requests of 4,096 tokens" in out
    _, out, _ = run_here("qwen2-72b", "--need", 16, "--max-len", 4096, "--json")
    assert all(option["live"] >= 16 and option["kind"] == "modelled" for option in json.loads(out))
    _, out, _ = run_here("qwen2-72b", "--need", 10**8, "--max-len", 4096)
    assert "no GPU of the catalogue holds that, 8 of them" in out
    code, out, _ = run_here("qwen2-72b", "--need", 10**8, "--max-len", 4096, "--json")
    assert (code, json.loads(out)) == (1, [])


def test_which_gpus_of_so_many(run_here):
    code, out, _ = run_here("llama-3.1-8b", "--need", 16, "--gpus", 2, "--max-len", 4096, "--json")
    found = json.loads(out)
    assert code == 0 and {one["gpus"] for one in found} == {2}
    assert {one["gpu"]: bool(one["notes"]) for one in found}["T4"]
    _, out, _ = run_here("llama-3.1-8b", "--need", 16, "--gpus", 2)
    assert "whole context (--max-len sets fewer tokens)" in out and "2 GPUs of a kind" in out


def test_a_question_whose_answer_is_no_has_exit_code_1(run_here):
    code, out, err = run_here("llama-3.1-8b", "--gpu", "T4")
    assert (code, err) == (1, "") and "does not fit: weights" in out and "needs at least 2 GPUs" in out
    code, out, _ = run_here("llama-3.1-8b", "--gpu", "L4", "--pool-gib", 300, "--json")
    assert code == 1 and json.loads(out)["starts"] is False and "a pool of 300.00 GiB" in json.loads(out)["why"]
    code, out, _ = run_here("deepseek-v3", "--gpu", "H200", "--blocks", 40000)
    assert code == 1 and "weights of at least 312.47 GiB (4 bits a parameter)" in out
    assert "Exit code: 0 if it fits, 1" in run_here("--help")[1]


def test_the_common_formula_is_one_line_where_it_is_far_off(run_here):
    words = "the common formula, (VRAM − weights) ÷ (KV of one request × 1.3 … 1.5), would give"
    _, near, _ = run_here("llama-3.1-8b", "--gpu", "A100 PCIe 40GB", "--max-len", 8192)
    _, far, _ = run_here("deepseek-v3", "--gpu", "H200", "--gpus", 8, "--max-len", 4096, "--weight-bits", 8)
    assert words not in near and far.count(words) == 1 and "requests per replica, not " in far


def test_the_longest_context(run_here):
    code, out, _ = run_here("llama-3.1-8b", "--gpu", "RTX 4090", "--longest", "--json")
    found = json.loads(out)
    assert code == 0 and 30_000 < found["max_len"] < 45_000 and not found["bound_by_context"]
    assert found["kind"] == "modelled"
    code, out, _ = run_here("llama-3.1-8b", "--gpu", "H200", "--longest", "--need", 2)
    assert code == 0 and ("2 requests of up to 131,072 tokens fit at once with tp 1, the model's whole context "
                          "(modelled)") in out
    code, out, _ = run_here("qwen2-72b", "--gpu", "T4", "--longest")
    assert code == 1 and "do not fit at any length" in out


def test_lengths_of_a_trace(run_here, tmp_path):
    trace = tmp_path / "own.jsonl"
    trace.write_text("".join(json.dumps(dict(id=str(i), arrival_s=i, prompt_tokens=100, output_tokens=60)) + "\n"
                             for i in range(3)))
    code, out, _ = run_here(*LLAMA, "--requests", trace)
    assert code == 0 and "mean, complete" in out and "10.0" in out
    code, _, err = run_here(*LLAMA, "--requests", tmp_path / "absent.jsonl")
    assert code == 2 and "absent.jsonl" in err


def test_lengths_of_a_real_trace(run_here):
    code, out, _ = run_here("llama-3.1-8b", "--gpu", "H200", "--max-len", 16384, "--requests",
                            shared_data("traces/azure_2023_conv.csv"), "--json")
    found = {row["name"]: row for row in json.loads(out)["lengths"]}
    assert code == 0 and 1300 < found["mean, complete"]["tokens"] < 1450
    assert found["p50, complete"]["requests"] > found["p99, complete"]["requests"] > found["longest"]["requests"]


@pytest.mark.parametrize("arguments, words", [
    ((), "say which MODEL"),
    (("llama-3.1-8b",), "say which --gpu"),
    (("llama-3.1-8b", "--gpu", "H20O"), "Did you mean"),
    (("lama-3.1-8b", "--gpu", "H200"), "Did you mean"),
    (("deepseek-v3", "--gpu", "H200", "--gpus", 8), "add --weight-bits 8 (`kvlab plan deepseek-ai"),
    (("deepseek-v3", "--gpu", "H200", "--gpus", 8, "--blocks", 40000), "say its --tp"),
    (("llama-3.1-8b", "--gpu", "H200", "--weight-bits", 5), "must be 4, 8 or 16"),
    (("llama-3.1-8b", "--gpu", "Apple M1", "--tp", 2, "--pool-gib", 1), "Apple M1 is one device"),
    (("llama-3.1-8b", "--gpu", "Apple M1", "--gpus", 2, "--pool-gib", 1), "Apple M1 is one device"),
    (("llama-3.1-8b", "--need", 4, "--requests", "a.csv"), "would not look at --requests"),
    (("llama-3.1-8b", "--gpu", "H200", "--longest", "--requests", "a.csv"), "would not look at --requests"),
    (("llama-3.1-8b", "--gpu", "H200", "--longest", "--need", 0), "need=0"),
    (("llama-3.1-8b", "--gpu", "H200", "--gpus", 3, "--tp", 2), "no multiple of tp=2"),
    (("llama-3.1-8b", "--gpu", "H200", "--gpus", 5, "--tp", 5), "does not fit the heads"),
    (("llama-3.1-8b", "--gpu", "H200", "--gpus", 0), "gpus=0"),
    (("llama-3.1-8b", "--gpu", "H200", "--util", 1.5), "util=1.5"),
    (("llama-3.1-8b", "--gpu", "H200", "--kv-format", "int4/channel/g32"), "splits the scale groups"),
    (("llama-3.1-8b", "--gpu", "H200", "--kv-format", "fp9"), "no KV format named 'fp9'"),
    (("llama-3.1-8b", "--gpu", "Apple M4 Max"), "is none: give --pool-gib"),
    (("llama-3.1-8b", "--gpu", "Gaudi 3", "--longest"), "is none: give --pool-gib"),
    (("llama-3.1-8b", "--gpu", "H200", "--need", 4), "leave --gpu out"),
    (("llama-3.1-8b", "--longest"), "--longest needs the --gpu"),
    (("llama-3.1-8b", "--gpu", "H200", "--longest", "--max-len", 5), "give one of them"),
    (("llama-3.1-8b", "--check-logs", "a.csv"), "MODEL cannot be set with --check-logs"),
    (("--from-log", "b.log", "--tp", 2), "--tp cannot be set with --from-log: leave it out"),
    (("--check-logs", "a.csv", "--from-log", "b.log"), "--from-log cannot be set with --check-logs")])
def test_wrong_use_is_one_sentence(run_here, arguments, words):
    code, out, err = run_here(*arguments)
    assert (code, out) == (2, "")
    assert words in err and err.startswith("kvlab: ") and err.count("\n") == 1


def test_check_logs_prints_the_rows_it_is_given(run_here, monkeypatch, tmp_path):
    made = [dict(id="1", verdict="agreed", what="gpu_blocks", logged=2588, predicted=2588, note=""),
            dict(id="x\x1b[2J", verdict="unmatched", what="kv_tokens", logged=None, predicted=None, note="no model")]
    monkeypatch.setitem(sys.modules, "kvlab.serving.server_logs", SimpleNamespace(
        check=lambda path: made, summary=lambda found: dict(agreed=1, explained=0, unexplained=0, unmatched=1)))
    code, out, _ = run_here("--check-logs", tmp_path / "logs.csv", "--json")
    assert code == 0 and json.loads(out) == made
    _, out, _ = run_here("--check-logs", tmp_path / "logs.csv")
    assert "1 agreed, 0 explained, 0 unexplained, 1 unmatched" in out
    assert "2,588" in out and "\x1b" not in out and "\\x1b" in out


def test_the_table_of_real_logs(run_here):
    logs = shared_data("server_logs.csv")
    code, out, _ = run_here("--check-logs", logs, "--json")
    found = json.loads(out)
    assert code == 0 and set(found[0]) == {"id", "verdict", "what", "logged", "predicted", "note"}
    verdicts = [row["verdict"] for row in found]
    _, out, _ = run_here("--check-logs", logs)
    assert out.splitlines()[-1] == ", ".join(
        f"{verdicts.count(word)} {word}" for word in ("agreed", "explained", "unexplained", "unmatched"))


LOG = """INFO worker.py: Initializing a V0 LLM engine (v0.7.3) with config: model='meta-llama/Meta-Llama-3-8B', \
tensor_parallel_size=1
INFO worker.py: model weights take 14.96GiB; the rest of the memory reserved for KV Cache is 53.29GiB.
INFO executor_base.py: # CUDA blocks: 27284, # CPU blocks: 2048 \x1b]0;bell\x07
"""


def test_from_log_says_what_was_read_where_and_how_it_is_judged(run_here, tmp_path):
    log = tmp_path / "vllm.log"
    log.write_text(LOG)
    code, out, _ = run_here("--from-log", log, "--json")
    found = json.loads(out)
    assert (code, found["weights_gib"], found["gpu_blocks"]) == (0, "14.96", "27284")
    assert (found["check"]["verdict"], found["check"]["predicted"] in (2048, 27284)) == ("agreed", True)
    _, out, _ = run_here("--from-log", log)
    assert "14.96" in out and "# CUDA blocks: 27284" in out and "\nagreed: " in out and "\x1b" not in out
    assert ("what fits in this pool: kvlab plan meta-llama/Meta-Llama-3-8B --gpu GPU --blocks 27284 --weights-gib 14.96"
            in out)
    log.write_text("nothing of the kind")
    code, _, err = run_here("--from-log", log)
    assert code == 2 and err.count("\n") == 1


def test_a_log_with_a_gpu_is_planned_and_a_model_may_be_named(run_here, tmp_path):
    log = tmp_path / "vllm.log"
    log.write_text(LOG.replace("meta-llama/Meta-Llama-3-8B", "/models/ours"))
    code, out, _ = run_here("--from-log", log)
    assert code == 0 and "unmatched" in out and "what fits" not in out
    code, out, _ = run_here("--from-log", log, "Meta-Llama-3-8B", "--gpu", "A100 SXM4 80GB", "--max-len", 8192,
                            "--json")
    found = json.loads(out)
    assert (code, found["check"]["verdict"], found["model"]) == (0, "agreed", "meta-llama/Meta-Llama-3-8B")
    assert (found["plan"]["blocks"], found["plan"]["requests"]) == (27284, 27283 // 512)
    _, out, _ = run_here("--from-log", log, "Meta-Llama-3-8B", "--gpu", "A100 SXM4 80GB")
    assert "what fits in this pool:" in out and "one request of 8,192 tokens: 512 blocks" in out
    code, out, _ = run_here("--from-log", log, "Meta-Llama-3-8B", "--gpu", "L4")
    assert code == 1 and "no plan: does not fit: a pool of 53.29 GiB" in out
    log.write_text(LOG.replace("tensor_parallel_size=1", "tensor_parallel_size=2"))
    _, out, _ = run_here("--from-log", log)
    assert "--gpu GPU --gpus 2 --tp 2 --blocks 27284 --weights-gib 29.92" in out
    log.write_text("llama_kv_cache: size = 90.00 MiB ( 1024 cells, 30 layers, 4/4 seqs), K (f16): 45.00 MiB, V (f16): "
                   "45.00 MiB\n")
    code, out, _ = run_here("--from-log", log, "SmolLM2-135M")
    assert code == 0 and "\nagreed: " in out and "no plan: `kvlab plan` models the blocks of vLLM" in out


def test_planning_loads_neither_torch_nor_pandas():
    code = ("import sys; sys.argv = ['kvlab', 'plan', 'llama-3.1-8b', '--gpu', 'H200']\n"
            "from kvlab.cli import main\n"
            "try: main()\n"
            "except SystemExit: pass\n"
            "print(sorted({'torch', 'matplotlib', 'pandas'} & set(sys.modules)), file=sys.stderr)")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr.strip() == "[]"
