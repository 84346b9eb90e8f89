"""The command line: what it prints, what it refuses in one sentence, and its exit codes."""
import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvlab.cli import main
from kvlab.record.reading import COLUMNS

ROOT = Path(__file__).parents[1]


def kvlab(*arguments, cwd=None):
    """(exit code, stdout, stderr) of the command in a process of its own."""
    done = subprocess.run([sys.executable, "-m", "kvlab", *arguments], capture_output=True, text=True, cwd=cwd,
                          timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"})
    return done.returncode, done.stdout, done.stderr


def called(monkeypatch, capsys, *arguments):
    """(exit code, stdout, stderr) of the command in this process."""
    monkeypatch.setattr(sys, "argv", ["kvlab", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, *capsys.readouterr()


@pytest.fixture
def run_here(monkeypatch, capsys):
    return lambda *arguments: called(monkeypatch, capsys, *arguments)


def test_help_and_size_load_neither_torch_nor_matplotlib():
    code = ("import sys; sys.argv = ['kvlab', *sys.argv[1:]]\n"
            "from kvlab.cli import main\n"
            "try: main()\n"
            "except SystemExit: pass\n"
            "print(sorted({'torch', 'matplotlib', 'pandas'} & set(sys.modules)), file=sys.stderr)")
    for arguments in (["--help"], ["size", "Qwen/Qwen2-72B", "--kv-len", "4096"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        assert done.stderr.strip() == "[]"


def test_size_of_the_articles_example(run_here):
    code, out, _ = run_here("size", "Qwen/Qwen2-72B", "--kv-len", "4096", "--json")
    found = json.loads(out)
    assert code == 0
    assert list(found)[:10] == ["model", "kv_len", "batch_size", "kv_format", "tp", "kv_bytes", "kv_bytes_per_token",
                                "state_bytes", "weight_bytes", "article_formula_bytes"]
    assert (found["kv_bytes"], found["kv_bytes_per_token"], found["weight_bytes"]) == (
        1_342_177_280, 327_680, 145_412_407_296)
    assert found["kv_bytes"] / 2**30 == 1.25


def test_size_in_words_names_the_crossover_and_the_formula(run_here):
    code, out, err = run_here("size", "qwen2-72b", "--kv-len", "40000", "--batch", "2", "--tp", "16")
    assert code == 0 and "443,763 cached tokens, over all sequences" in out and "on each of 16 ranks" in out
    assert "growth per token" in out and "(1.00 × the KV cache in 16 bit)" in out
    assert "beyond the 32,768 tokens of context that the catalogue gives for Qwen/Qwen2-72B-Instruct" in err


def test_size_compares_the_formula_in_16_bit_whatever_the_format(run_here):
    shown = [run_here("size", "deepseek-ai/DeepSeek-V3", "--kv-len", "4096", "--kv-format", name)[1]
             for name in ("bf16", "int8/token")]
    assert all("(56.89 × the KV cache in 16 bit)" in out for out in shown) and shown[0] != shown[1]


def test_size_says_why_there_is_no_crossover(run_here):
    assert "KV never outgrows the weights: the cache stops growing before" in run_here(
        "size", "mistralai/Mistral-7B-v0.1", "--kv-len", "10")[1]
    out = run_here("size", "facebook/opt-175b", "--kv-len", "10")[1]
    assert "whether KV outgrows the weights is unknown: so is the parameter count" in out
    assert "weights (16 bit)         unknown" in out and "never" not in out


def test_the_version_and_help_without_arguments(run_here):
    from kvlab import __version__
    assert run_here("--version") == (None, f"kvlab {__version__}\n", "")      # sys.exit(None) is 0
    code, out, err = run_here()
    assert code == 0 and "Usage:" in out and "measure" in out and err == ""


@pytest.mark.parametrize("arguments, sentence", [
    (["size", "Qwen/Qwen2-7", "--kv-len", "10"], "Did you mean 'Qwen/Qwen2-72B'"),
    (["size", "Qwen/Qwen2-72B", "--kv-len", "0"], "at least 1"),
    (["size", "Qwen/Qwen2-72B", "--kv-len", "-5"], "at least 1"),
    (["size", "Qwen/Qwen2-72B", "--kv-len", "10", "--kv-format", "int8/tokn"], "Did you mean 'int8/token'"),
    (["size", "Qwen/Qwen2-72B", "--kv-len", "10", "--tp", "3"], "allowed tp"),
    (["size", "Qwen/Qwen2-72B"], "--kv-len"),
    (["ls", "model"], "Did you mean 'models'"),
    (["ls"], "say what to list: models, gpus, variants, formats, probes, studies, figures, metrics"),
    (["size", "llama-4-scout", "--kv-len", "10"], "Did you mean 'meta-llama/Llama-4-Scout"),
    (["measure", "--variant", "my.py", "--kv-len", "64"], "is a file; name the class in it: my.py:Class"),
    (["measure", "--variant", "naive", "--kv-len", "64", "--page-order", "in_order"], "give --block-size too"),
    (["measure", "--variant", "paged", "--kv-len", "64", "--page-order", "sorted"], "allowed: in_order, random"),
    (["measure", "--variant", "naive", "--kv-len", "64", "--latent", "64"], "needs --kv-heads 1 (got 8)"),
    (["measure", "--variant", "naive", "--kv-len", "64", "--kv-heads", "1", "--latent", "129"], "1 … --head-dim 128"),
    (["measure", "--variant", "paged", "--kv-len", "64", "--shared-prefix", "20"],
     "no multiple of the block size 16; take 16 or 32"),
    (["measure", "--variant", "cascade", "--kv-len", "64"], "give --shared-prefix"),
    (["measure", "--variant", "mla_expand", "--kv-len", "64"], "--latent on the command line"),
    (["measure", "--variant", "triton_paged", "--kv-len", "64"], "a time of the interpreter is no number"),
    (["measure", "--variant", "naive", "--kv-len", "64", "--threads", "4096"], "logical cores"),
    (["measure", "--variant", "flsh", "--kv-len", "64"], "Did you mean 'flash'"),
    (["measure", "--variant", "flash", "--kv-len", "64", "--q-heads", "30", "--kv-heads", "8"], "not a multiple"),
    (["measure", "--variant", "flash", "--kv-len", "64", "--q-len", "65"], "kv_len=64 is less than q_len=65"),
    (["measure", "--variant", "flash", "--kv-len", "-1"], "at least 1"),
    (["measure", "--variant", "flash", "--kv-len", "64", "--batch", "0"], "at least 1"),
    (["measure", "--variant", "flash", "--kv-len", "64", "--kv-format", "int9"], "no KV format named 'int9'"),
    (["measure", "--variant", "flash", "--kv-len", "64", "--device", "gpu"], "allowed: cpu, cuda"),
    (["measure", "--variant", "flash", "--kv-len", "4000000000"], "are free"),
    (["measure", "--variant", "nope.py:Mine", "--kv-len", "64"], "cannot read 'nope.py'"),
    (["measure", "--variant", "naive", "--kv-len", "64", "--block-size", "16"], "use the variant paged"),
    (["run", "memory_wal"], "Did you mean 'memory_wall'"),
    (["run", "memory_wall", "--size", "tiny"], "allowed: smoke, small, large"),
    (["run", "memory_wall", "--variants", "sdp"], "Did you mean 'sdpa'"),
    (["run", "memory_wall", "--model", "Qwen/Qwen2-73B"], "Did you mean 'Qwen/Qwen2-72B'"),
    (["run", "memory_wall", "--resume", "nothing"], "no run named 'nothing'; there is none here yet"),
    (["run", "memory_wall", "--out", "no/such/folder"], "cannot write results"),
    (["figure", "memory_wal"], "Did you mean 'memory_wall'"),
    (["figure", "memory_wall", "--format", "gif"], "allowed: png, pdf"),
    (["figure", "memory_wall", "--run", "nothing"], "no run named 'nothing'"),
    (["report", "nothing"], "no run named 'nothing'"),
    (["check", "sdp"], "Did you mean 'sdpa'"),
    (["frobnicate"], "frobnicate"),
])
def test_wrong_use_is_one_sentence_and_exit_code_2(run_here, tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    code, out, err = run_here(*arguments)
    assert code == 2 and sentence in err
    assert err.startswith("kvlab: ") and len(err.strip().splitlines()) == 1
    assert out == "" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["models", "gpus", "variants", "formats", "probes", "studies", "figures", "metrics"])
def test_ls_lists_objects_with_a_name(run_here, what):
    code, out, _ = run_here("ls", what, "--json")
    rows = json.loads(out)
    assert code == 0 and rows and all(isinstance(row["name"], str) and row["name"] for row in rows)
    code, out, _ = run_here("ls", what)
    assert code == 0 and rows[0]["name"][:20] in out


def test_ls_says_why_a_probe_cannot_run_here(run_here):
    rows = {row["name"]: row for row in json.loads(run_here("ls", "probes", "--json")[1])}
    assert rows["timer"]["cannot_run_here"] == ""
    import pynvml
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        assert "LibraryNotFound" in rows["nvml"]["cannot_run_here"]


def test_measure_gives_every_number_its_kind(tmp_path):
    arguments = ["measure", "--variant", "flash", "--batch", "4", "--kv-len", "256", "--q-heads", "8", "--kv-heads",
                 "2", "--head-dim", "32", "--kv-format", "int8/token"]
    code, out, _ = kvlab(*arguments, "--json", cwd=tmp_path)
    rows = json.loads(out)
    assert code == 0 and all(list(row) == list(COLUMNS) for row in rows)
    kinds = {row["metric"]: row["kind"] for row in rows}
    assert kinds["latency_s"] == kinds["kernel_error"] == kinds["peak_extra_bytes"] == "measured"
    assert kinds["ideal_bytes"] == "modelled"
    assert {row["variant"] for row in rows} == {"flash", ""} and {row["format_path"] for row in rows} == {"decoded", ""}
    code, out, _ = kvlab(*arguments, cwd=tmp_path)
    assert code == 0 and "flash: decode, batch 4" in out and "latency_s" in out and "measured" in out
    assert list(tmp_path.iterdir()) == []


def test_measure_shows_layout_and_clock_and_says_a_reason_once(run_here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["measure", "--variant", "paged", "--kv-len", "64", "--q-heads", "4", "--kv-heads", "2", "--head-dim",
                 "16", "--page-order", "in_order"]
    code, out, _ = run_here(*arguments)
    lines = out.splitlines()
    assert code == 0 and "K/V fp32 in blocks of 16, in_order, " in lines[0] and " fp32 on cpu, 1 thread; " in lines[0]
    assert lines[2].startswith("latency_s ") and "timer:thread_cpu" in lines[2]
    rows = json.loads(run_here(*arguments, "--json")[1])
    assert {row["page_order"] for row in rows if row["variant"]} == {"in_order"}
    reasons = {}
    for row in rows:
        if row["value"] is None:
            reasons.setdefault(row["error"] or row["note"], []).append(row["metric"])
    assert any(len(names) > 1 for names in reasons.values())
    for names in reasons.values():
        names = list(dict.fromkeys(names))
        sought = [name for name in ("sm_utilization", "hbm_bytes") if name in names]
        first = [*sought, *(name for name in names if name not in sought)]
        shown = ", ".join(names) if len(names) < 5 else f"{', '.join(first[:3])} and {len(names) - 3} more"
        start = shown.split()[0]                             # a long cell goes on in the next line
        assert any(line.startswith(start) for line in lines) and all(word in out for word in shown.split())


WRONG = '''
from kvlab.attention.naive import Naive
from dataclasses import dataclass
from typing import ClassVar

@dataclass(frozen=True)
class Wrong(Naive):
    name: ClassVar[str] = "wrong"
    def prepare(self, trial, inputs):
        call = super().prepare(trial, inputs)
        return lambda: call() * 1.5
'''


def test_measure_and_check_of_a_wrong_variant_end_with_1(tmp_path):
    (tmp_path / "my.py").write_text(WRONG)
    code, out, _ = kvlab("measure", "--variant", "my.py:Wrong", "--kv-len", "64", "--head-dim", "32", cwd=tmp_path)
    assert code == 1 and out.count("which exceeds the ") == 1 and "wrong: decode" in out
    assert "tolerance 3.8e-06" in " ".join(out.split())
    code, out, _ = kvlab("check", "my.py:Wrong", cwd=tmp_path)
    assert code == 1 and "\n0 cells agree" in out and "exceeds the tolerance" in out
    code, out, _ = kvlab("check", "my.py:Wrong", "--json", cwd=tmp_path)
    assert code == 1 and {cell["status"] for cell in json.loads(out)} == {"failed", "skipped"}


def test_check_gives_up_after_three_deaths_of_its_process(tmp_path):
    (tmp_path / "my.py").write_text(WRONG.replace("call() * 1.5", "__import__('os')._exit(3)"))
    code, out, err = kvlab("check", "my.py:Wrong", "--json", cwd=tmp_path)
    cells = json.loads(out)
    died = [cell for cell in cells if "the worker process died: " in cell["remark"]]
    assert code == 1 and len(died) == 3 and cells[-1] == died[-1]
    assert "brought its process down three times" in err and "Traceback" not in err


def test_a_failing_variant_is_one_line_whatever_its_errors(capsys):
    import pandas as pd

    from kvlab.show import print_failures
    rows = [("mine", "c1", "failed", "first"), ("mine", "c2", "oom", "second"), ("mine", "c2", "failed", "first"),
            ("sdpa", "c1", "failed", "other"), ("naive", "c1", "ok", ""), ("", "c3", "failed", "all of it")]
    print_failures(pd.DataFrame(rows, columns=["variant", "case_id", "status", "error"]))
    assert capsys.readouterr().err.splitlines() == ["! mine: first (2 cases)", "! sdpa: other (1 case)",
                                                    "! case: all of it (1 case)"]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """A run of the study at size smoke with a variant from outside the package: (folder, exit code, stdout)."""
    folder = tmp_path_factory.mktemp("smoke")
    (folder / "my.py").write_text(WRONG.replace("* 1.5", "").replace("Wrong", "Mine").replace("wrong", "mine"))
    code, out, err = kvlab("run", "memory_wall", "--size", "smoke", "--variants", "sdpa,naive,my.py:Mine",
                           "--out", ".", cwd=folder)
    assert "Traceback" not in err
    return folder, code, out


def test_run_ends_with_the_run_directory_and_says_its_findings(smoke):
    folder, code, out = smoke
    last = folder / out.strip().splitlines()[-1]
    assert code == 0 and last.parent == folder / "memory_wall"
    assert {p.name for p in last.iterdir()} >= {"manifest.json", "readings.jsonl", "readings.parquet", "figures",
                                                "samples"}
    assert out.index("KV outgrows them beyond 443,763") < out.index("Why is decoding slow?") < out.index("Resolution:")
    for words in ("Decode time grows with ideal bytes", "of the matmul ceiling", "Prefill memory of naive grows as",
                  "Resolution:", "443,763", "Next: kvlab report"):
        assert words in out
    manifest = json.loads((last / "manifest.json").read_text())
    assert any("class Mine" in source["source"] for source in manifest["variants"])


def test_a_variant_of_the_users_own_is_in_the_tables_and_the_figures(smoke):
    folder, _, out = smoke
    last = folder / out.strip().splitlines()[-1]
    for name in ("memory_wall", "decode_time", "attention_memory"):
        assert (last / "figures" / f"{name}.png").stat().st_size > 10_000
        drawn = (last / "figures" / f"{name}.csv").read_text()
        assert {"mine", "sdpa"} <= {row["variant"] for row in csv.DictReader(drawn.splitlines())}
        assert ",Mine," not in drawn


def test_report_figure_and_resume_of_a_finished_run(smoke):
    folder, _, out = smoke
    last = out.strip().splitlines()[-1]
    code, told, _ = kvlab("report", last, cwd=folder)
    page = (folder / told.strip()).read_text()
    assert code == 0 and ">mine<" in page and "data:image/png;base64" in page
    assert not re.search(r"(src|href)=.?https?:", page)
    code, told, _ = kvlab("figure", "decode_time", "--run", last, "--out", "drawn", "--format", "pdf", cwd=folder)
    assert code == 0 and (folder / "drawn" / "decode_time.pdf").exists() and (folder / "drawn/decode_time.csv").exists()
    before = (folder / last / "readings.jsonl").read_bytes()
    code, told, _ = kvlab("run", "memory_wall", "--resume", last, "--out", ".", cwd=folder)
    assert code == 0 and told.strip().splitlines()[-1] == last
    assert (folder / last / "readings.jsonl").read_bytes() == before


def test_a_read_only_output_folder_is_refused_before_measuring(tmp_path):
    (tmp_path / "profiles").write_text("a file where the folder should be")
    code, out, err = kvlab("run", "memory_wall", "--size", "smoke", cwd=tmp_path)
    assert code == 2 and "cannot write results" in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_what_was_committed_and_says_how_to_go_on(tmp_path, sign):
    process = subprocess.Popen([sys.executable, "-m", "kvlab", "run", "memory_wall", "--size", "smoke", "--variants",
                                "sdpa,naive", "--out", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True)
    deadline = time.monotonic() + 120
    while not any(b'{"commit"' in j.read_bytes()
                  for j in tmp_path.glob("*/*/readings.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, sign)
    out, err = process.communicate(timeout=60)
    run = next(tmp_path.glob("memory_wall/*"))
    assert process.returncode == 130 and f"--resume {run}" in err and "Traceback" not in err
    assert (run / "readings.parquet").exists()
    from kvlab.record.store import RunStore
    kept = RunStore.open(run).committed
    assert kept
    if sign == signal.SIGTERM:                              # all else is the same, and takes its time
        return
    code, out, err = kvlab("run", "memory_wall", "--resume", str(run), "--out", str(tmp_path))
    finished = RunStore.open(run)
    assert code == 0 and kept < finished.committed and len(finished.committed) == 11 and finished.problems == []


def test_a_run_on_a_device_that_is_not_there_is_refused_before_anything_is_written(tmp_path):
    if torch_sees_cuda():
        pytest.skip("there is a CUDA device")
    code, out, err = kvlab("run", "memory_wall", "--size", "smoke", "--device", "cuda", cwd=tmp_path)
    assert code == 2 and not out and not list(tmp_path.iterdir())
    assert err.startswith("kvlab: nothing of memory_wall can be measured on cuda: torch sees no CUDA device")


def torch_sees_cuda():
    import torch
    return torch.cuda.is_available()


def test_size_takes_a_name_from_python_too():
    import kvlab as package
    assert package.size("Qwen/Qwen2-72B", 4096) == package.size(package.model_spec("Qwen/Qwen2-72B"), 4096)
    assert package.size("Qwen/Qwen2-72B", 4096).kv_bytes == 1_342_177_280


@pytest.fixture
def scorable(tmp_path):
    """A folder with a tiny random model and a tokenizer of bytes, and a text."""
    safetensors = pytest.importorskip("safetensors.torch", reason="reads a model from safetensors")
    tokenizers = pytest.importorskip("tokenizers", reason="cuts text into tokens")
    from kvlab.model.config import DecoderConfig
    from kvlab.model.decoder import Decoder
    facts = dict(model_type="llama", vocab_size=256, hidden_size=24, intermediate_size=16, num_hidden_layers=1,
                 num_attention_heads=1, num_key_value_heads=1, head_dim=8, max_position_embeddings=128,
                 rms_norm_eps=1e-5, rope_theta=1e4, hidden_act="silu", tie_word_embeddings=False)
    folder, text = tmp_path / "tiny", tmp_path / "mine.txt"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(facts))
    made = Decoder.random(DecoderConfig.from_config(facts, "made"))
    safetensors.save_file(made.weights, folder / "model.safetensors")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    cutter = tokenizers.Tokenizer(tokenizers.models.BPE({one: i for i, one in enumerate(alphabet)}, []))
    cutter.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    cutter.decoder = tokenizers.decoders.ByteLevel()
    cutter.save(str(folder / "tokenizer.json"))
    text.write_text(" ".join(str(i * i) for i in range(60)))
    return str(folder), f"file:{text}"


def test_score_prints_a_line_per_format_and_json_of_the_same(scorable, run_here):
    model, text = scorable
    asked = ("score", model, "--text", text, "--kv-format", "int8/token, fp8_e4m3", "--window", "64")
    code, out, err = run_here(*asked)
    assert code == 0 and "Traceback" not in err
    for said in ("int8/token", "fp8_e4m3", "KL (nat)", "2 × 64 tokens", "an fp32 cache", "95 %"):
        assert said in out
    code, out, _ = run_here(*asked, "--json")
    about = json.loads(out)
    found = about.pop("formats")
    assert about == dict(model=model, text=text, text_sha256=about["text_sha256"], window=64, count=2, start=0,
                         calibration=None) and len(about["text_sha256"]) == 64
    assert code == 0 and list(found) == ["int8/token", "fp8_e4m3"]
    assert 0 < found["int8/token"]["kl"]["value"] < found["fp8_e4m3"]["kl"]["value"]
    assert found["fp8_e4m3"]["kl"]["n"] == 128 and found["fp8_e4m3"]["margin"] == 0.001


@pytest.mark.parametrize("more, said", [
    (("--margin", "0"), "--margin 0 must be a number above 0"), (("--margin", "nan"), "--margin nan must"),
    (("--kv-format", " ,"), "names no format"), (("--calibration", "pydoc:if"), "none of fp8_e4m3 has static scales"),
    (("--window", "32", "--count", "2"), "2 × 32 tokens are too few for an interval"),
    (("--kv-format", "int8/tokn"), "int8/token"),
    (("--text", "pydoc:execmodl"), "pydoc:execmodl")])
def test_score_refuses_before_it_loads_the_model(more, said, run_here, tmp_path):
    mine = tmp_path / "a.txt"
    mine.write_text("word " * 900)
    code, out, err = run_here("score", "no/such-model", "--text", f"file:{mine}", *more)
    assert code == 2 and out == "" and said in err and "no/such-model" not in err


def test_score_says_that_a_text_is_too_short(scorable, run_here):
    model, text = scorable
    code, _, err = run_here("score", model, "--text", text, "--window", "512")
    assert code == 2 and "1024 are needed for 2 × 512" in err


def test_score_says_which_text_gave_static_scales_and_refuses_a_format_before_it_scores(scorable, run_here):
    model, text = scorable
    asked = ("score", model, "--text", text, "--window", "64")
    code, out, _ = run_here(*asked, "--kv-format", "int8/tensor")
    assert code == 0 and "static scales from pydoc:debugger" in out
    code, out, err = run_here(*asked, "--kv-format", "int8/token,q8_0")
    assert code == 2 and out == "" and "layer 0 cannot keep its K and V as q8_0" in err


def test_the_first_line_of_a_call_says_which_way_ran_and_what_was_asked():
    import io
    from contextlib import redirect_stdout

    from kvlab.attention import Comparison, trial
    from kvlab.kv.cache import Layout
    from kvlab.probes import measure
    from kvlab.probes.kernel_error import KernelError
    from kvlab.shapes import AttentionShape, Workload
    from kvlab.show import print_readings
    latent = AttentionShape(4, 1, 24, 16, True, 20)
    shared, plain = Workload(latent, (1, 1), (48, 48), 32), Workload(AttentionShape(4, 2, 16), (1,), (9,))
    for workload, variant, layout, words in (
            (shared, "paged_gather", Layout(16, "random"), (
                "V the first 16 channels of K", "window 20", "prefix 32 (stored once per sequence)", "gathered")),
            (shared, "paged_gather", Layout(16, share_prefix=True), ("prefix 32, K/V",)),
            (plain, "naive", Layout(), ("contiguous, native", "cpu, 1 thread;"))):
        one = trial(variant, workload, layout=layout)
        with redirect_stdout(io.StringIO()) as told:
            print_readings(measure(Comparison((one,)), [KernelError()]), one)
        assert all(word in told.getvalue() for word in words), told.getvalue()[:300]
