"""The table of real start-up logs: its verdicts, that only the named columns count, and what no rule may explain."""
import csv
import random

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared_data import shared_data

from kvlab.catalog import data_dir, rows
from kvlab.serving._log_cells import engine, number, numbers
from kvlab.serving._log_models import find_model
from kvlab.serving._log_vllm import wordings
from kvlab.serving.server_logs import check, judge, summary

ROWS = rows("server_logs.csv")
INPUTS = ("model", "arch", "gpu", "n_gpus", "tp", "kv_cache_gib", "block_size", "max_model_len", "dtype", "kv_dtype",
          "swap_gib", "engine_version", "kv_tokens", "gpu_blocks", "cpu_blocks", "max_concurrency",
          "gpu_memory_utilization", "weights_gib")
EXACT = ["1", "2", "3", "4", "5", "16", "17", "38", "39", "42", "H60", "H95", "H102"]     # integers or bytes
ROUNDED = ["15", "19", "22", "37", "63", "H64", "H68", "H84", "H89"]
HYBRID = ["23", "25", "47", "51", "52", "54", "H79"]
LLAMA = ["H1", "H5", "H12", "H17", "H30", "H43", "H53"]
UNNAMED = ["13", "45", "53"]


def by_id(results):
    return {result["id"]: result for result in results}


RESULTS = by_id(check(ROWS))


def test_the_four_counts():
    first = [result for name, result in RESULTS.items() if not name.startswith("N")]
    assert summary(first) == {"agreed": 41, "explained": 8, "unexplained": 1, "unmatched": 18}
    assert summary(RESULTS.values()) == {"agreed": 65, "explained": 11, "unexplained": 2, "unmatched": 31}
    assert all(list(result) == ["id", "verdict", "what", "logged", "predicted", "note"] for result in RESULTS.values())


@pytest.mark.parametrize("name", EXACT + ROUNDED + HYBRID + LLAMA)
def test_rows_that_agree(name):
    assert RESULTS[name]["verdict"] == "agreed", RESULTS[name]


@pytest.mark.parametrize("name", ["1", "2", "3", "4", "5", "16", "17", "38", "39", "42", "H60", "25", "47", "H79"])
def test_integers_are_exact(name):
    assert RESULTS[name]["logged"] == RESULTS[name]["predicted"] and isinstance(RESULTS[name]["predicted"], int)


def test_what_agrees_is_predicted_within_its_rounding():
    for name, result in RESULTS.items():
        if result["verdict"] == "agreed" and result["what"] in ("kv_tokens", "max_concurrency", "gpu_blocks"):
            assert result["predicted"] == pytest.approx(result["logged"], abs=0.011), name
    assert RESULTS["N25"]["predicted"] == 2430.14, "before groups, tokens ÷ length without whole blocks"


@pytest.mark.parametrize("name, words", [
    ("14", "least of 4 ranks"), ("18", "need 7.46 GiB per rank"), ("26", "speculative decoding of 3 tokens"),
    ("27", "half the bytes"), ("46", "speculative decoding of 1 token"), ("48", "max_num_batched_tokens 2,048"),
    ("49", "round numbers"), ("50", "max_num_batched_tokens not printed"), ("N22", "swap space of 10 GiB"),
])
def test_explanations_say_their_arithmetic(name, words):
    assert RESULTS[name]["verdict"] == "explained" and words in RESULTS[name]["note"]


@pytest.mark.parametrize("name", UNNAMED)
def test_a_model_without_a_name_is_never_guessed(name):
    assert RESULTS[name]["verdict"] == "unmatched" and "not named" in RESULTS[name]["note"]


@pytest.mark.parametrize("name", ["7", "11", "28", "33", "40", "59", "60"])
def test_one_quantity_alone_is_unmatched_with_the_reason(name):
    assert RESULTS[name]["verdict"] == "unmatched" and "nothing to compare with" in RESULTS[name]["note"]


def test_what_no_rule_covers_stays_unexplained():
    assert {name for name, result in RESULTS.items() if result["verdict"] == "unexplained"} == {"57", "N23"}


def test_only_the_named_columns_count_nor_ids_nor_order():
    """All other columns removed or scrambled, ids new, lines shuffled: every line keeps its result."""
    noise = random.Random(3)
    mixed = [{**{column: row.get(column, "") for column in INPUTS[:-2]}, "id": f"x{at}", "notes": noise.choice(
        ["agrees", "MISMATCH", "0"]), "source": str(noise.random()), "rel_err_pct": "999", "verdict": "agrees",
        "block_model_tokens": "1", "check": "gib/tokens err"} for at, row in enumerate(ROWS)]
    shuffled = mixed[:]
    noise.shuffle(shuffled)
    again = by_id(check(shuffled))
    for at, row in enumerate(ROWS):
        assert {**again[f"x{at}"], "id": row["id"]} == RESULTS[row["id"]]


def test_the_table_beside_the_checkout_gives_the_same():
    path = shared_data("server_logs.csv")
    found = by_id(check(path))
    assert all(RESULTS[name] == result for name, result in found.items()) and len(found) == 68


def test_a_frame_a_path_and_rows_are_the_same():
    path = data_dir() / "server_logs.csv"
    assert check(path) == check(str(path)) == check(ROWS)
    frame = check(pd.read_csv(path))
    assert [(r["id"], r["verdict"], r["predicted"]) for r in frame] == [
        (r["id"], r["verdict"], r["predicted"]) for r in RESULTS.values()]


@pytest.mark.parametrize("column, factor", [(c, f) for c in ("kv_tokens", "gpu_blocks", "cpu_blocks", "max_concurrency")
                                            for f in (0.55, 0.9, 1.1, 1.7)])
def test_a_wrong_number_is_not_explained_away(column, factor):
    """One printed quantity changed: whatever was compared is unexplained then, but for what a rule bounds."""
    for row in ROWS:
        result = RESULTS[row["id"]]
        if not row[column] or float(row[column]) == 0 or result["verdict"] not in ("agreed", "explained"):
            continue
        wrong = float(row[column]) * factor
        changed = judge({**row, column: f"{wrong:.2f}" if column == "max_concurrency" else str(int(wrong) // 16 * 16)})
        alone = column == "gpu_blocks" and result["what"] == "cpu_blocks" and "also gpu_blocks" not in result["note"]
        fewer_of_ranks = int(row["n_gpus"] or 1) > 1 and "least of" in changed.note
        cells = row["id"] in ("H12", "H43")                 # padded cells, and slots that the table does not say
        assert changed.verdict == "unexplained" or alone or fewer_of_ranks or cells, (row["id"], changed)


def line(**cells):
    return {"n_gpus": "1", "tp": "1", "block_size": "16", "engine_version": "vLLM 0.12", **cells}


LLAMA_8B = dict(model="meta-llama/Llama-3.1-8B", kv_cache_gib="10.00", kv_tokens="81920")


def test_unequal_ranks_need_several_ranks_and_at_least_three_quarters():
    assert judge(line(**LLAMA_8B)).verdict == "agreed"
    fewer = dict(LLAMA_8B, kv_cache_gib="12.00")
    assert judge(line(**fewer)).verdict == "unexplained", "one GPU has no other rank"
    two = dict(model="meta-llama/Llama-3.1-8B", n_gpus="2", tp="2", kv_cache_gib="6.00", kv_tokens="81920")
    assert judge(line(**two)).verdict == "explained"
    assert judge(line(**dict(two, kv_cache_gib="6.80"))).verdict == "unexplained", "73 % of the pool"
    assert judge(line(**dict(two, kv_cache_gib="4.90"))).verdict == "unexplained", "more than the pool holds"


def test_fp8_of_the_checkpoint_needs_an_unstated_kv_dtype():
    doubled = dict(LLAMA_8B, kv_tokens="163840")
    assert "half the bytes" in judge(line(**doubled, kv_dtype="auto")).note
    assert judge(line(**doubled, kv_dtype="bf16")).verdict == "unexplained"
    assert judge(line(**doubled, kv_dtype="fp8")).verdict == "agreed"
    assert judge(line(**dict(LLAMA_8B, kv_tokens="122880"), kv_dtype="auto")).verdict == "unexplained"


def test_a_latent_is_counted_twice_by_old_versions_only():
    old = dict(model="deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct", tp="2", n_gpus="2", kv_cache_gib="14.46",
               kv_tokens="249584")
    assert "PR 14462" in judge(line(**dict(old, engine_version="vLLM 0.7.3"))).note
    assert judge(line(**dict(old, engine_version="vLLM 0.9.1"))).verdict == "unexplained"
    assert judge(line(**dict(old, kv_tokens="499184", engine_version="vLLM 0.9.1"))).verdict == "agreed"


def test_speculation_needs_a_family_with_mtp_or_the_word():
    plain = dict(model="meta-llama/Llama-3.1-8B", kv_cache_gib="10.00", kv_tokens=str(5120 * 32 // 33 * 16))
    assert judge(line(**plain)).verdict == "unexplained"
    assert "speculative" in judge(line(**dict(plain, model="meta-llama/Llama-3.1-8B + EAGLE"))).note


def test_swap_space_is_whole_gib_and_only_where_it_is_not_printed():
    cpu = dict(model="meta-llama/Llama-3.1-8B", engine_version="vLLM V0 2024-06", kv_dtype="fp16")
    assert judge(line(**cpu, cpu_blocks="2048")).verdict == "agreed"
    assert judge(line(**cpu, cpu_blocks="4096")).note.startswith("swap space of 8 GiB")
    assert judge(line(**cpu, cpu_blocks="4097")).verdict == "unexplained"
    assert judge(line(**cpu, cpu_blocks="4096", swap_gib="4")).verdict == "unexplained"


def test_round_numbers_need_a_round_pool_too():
    told = dict(model="google/gemma-4-31B-it", gpu="A100-80GB", kv_cache_gib="50", kv_tokens="55000",
                engine_version="vLLM 0.20.0")
    assert judge(line(**told)).verdict == "explained"
    assert judge(line(**dict(told, kv_cache_gib="50.37"))).verdict == "unexplained"
    assert judge(line(**dict(told, kv_tokens="65000"))).verdict == "unexplained"
    assert judge(line(**dict(told, kv_tokens="54321"))).verdict == "unexplained"


def test_pipeline_stages_hold_their_share_of_the_layers():
    two = line(model="meta-llama/Llama-3.1-70B", n_gpus="4", tp="2", kv_cache_gib="20.00", kv_tokens="262144",
               kv_dtype="bf16")
    assert "2 pipeline stages" in judge(two).note and judge(two).verdict == "agreed"
    assert judge(dict(two, n_gpus="2")).verdict == "unexplained"


@pytest.mark.parametrize("cells, verdict, words", [
    (dict(engine_version="SGLang 0.5.1", model="meta-llama/Llama-3.1-8B", kv_cache_gib="54.04", kv_tokens="442750",
          block_size="1"), "agreed", "131,072 B"),
    (dict(engine_version="SGLang 0.5.1", model="meta-llama/Llama-3.1-8B", kv_cache_gib="58.02", kv_tokens="442750",
          block_size="1"), "unexplained", "58.02"),                             # decimal GB would be 58.03
    (dict(engine_version="SGLang 2026-01", model="XiaomiMiMo/MiMo-V2-Flash", arch="full pool", tp="4", n_gpus="4",
          kv_cache_gib="2.01", kv_tokens="375360", block_size="64"), "agreed", "full layers"),
    (dict(engine_version="SGLang 0.5.15", model="zai-org/GLM-5.1-FP8", tp="8", n_gpus="8", kv_cache_gib="8.14",
          kv_tokens="142208", block_size="64", kv_dtype="fp8_e4m3"), "agreed", "61,464 B"),
    (dict(engine_version="SGLang 0.4", model="Qwen/Qwen3-32B", tp="4", n_gpus="4", kv_cache_gib="32.00",
          kv_tokens="131072", block_size="1"), "explained", "split over 1 of 4 ranks"),
    (dict(engine_version="TensorRT-LLM 0.9", model="Qwen2.5-1.5B", kv_cache_gib="7.31", kv_tokens="273792"),
     "agreed", "28,672 B"),
    (dict(engine_version="TensorRT-LLM 0.9", model="Qwen2.5-1.5B", kv_cache_gib="7.31", kv_tokens="273792",
          gpu_blocks="8000", block_size="32"), "unexplained", "8,000 blocks of 32"),
    (dict(engine_version="LMDeploy 0.4 TurboMind", model="internlm2-chat-7b", gpu_blocks="500", block_size="8 MB"),
     "agreed", "64 tokens x 131,072 B"),
    (dict(engine_version="LMDeploy 0.4 TurboMind", model="internlm2-chat-7b", gpu_blocks="500", block_size="64",
          kv_cache_gib="2.014", kv_dtype="int8"), "agreed", "67,584 B"),
    (dict(engine_version="LMDeploy 0.4 TurboMind", model="internlm2-chat-7b", gpu_blocks="500", block_size="9.5 MB"),
     "unexplained", "8.000 MiB"),
    (dict(engine_version="transformers 5", model="Qwen/Qwen3-32B", gpu_blocks="814", block_size="256",
          kv_tokens="208384"), "agreed", "814 blocks"),
    (dict(engine_version="llama.cpp b9000", model="qwen3:8b-q4_K_M", kv_cache_gib="5.625", kv_tokens="40960"),
     "agreed", "5,760.00 MiB"),
    (dict(engine_version="llama.cpp 2026", model="openai/gpt-oss-120b", kv_cache_gib="2.28515625",
          max_model_len="65535"), "agreed", "(4 slots)"),
    (dict(engine_version="llama.cpp 2026", model="openai/gpt-oss-120b", arch="non-SWA layers", kv_cache_gib="2.25",
          kv_tokens="65536"), "agreed", "18 full layers"),
    (dict(engine_version="llama.cpp 2025-01", model="DeepSeek-V3 Q2_K", kv_cache_gib="38.125", kv_tokens="8192"),
     "agreed", "stored expanded"),
    (dict(engine_version="llama.cpp 2026", model="qwen3:8b", kv_cache_gib="5.625", kv_tokens="40960",
          kv_dtype="tq3_0"), "unmatched", "not one of ggml's"),
    (dict(engine_version="vLLM 0.20", model="Qwen/Qwen3-8B", kv_cache_gib="1.0", kv_tokens="100",
          kv_dtype="turboquant"), "unmatched", "not known"),
    (dict(engine_version="vLLM 0.20", model="Qwen/Qwen3-8B", tp="3", n_gpus="3", kv_cache_gib="1.00",
          kv_tokens="100"), "unmatched", "allowed tp"),
])
def test_engines_and_their_words(cells, verdict, words):
    found = judge({"n_gpus": "1", "tp": "1", **cells})
    assert (found.verdict, words in found.note) == (verdict, True), found


@pytest.mark.parametrize("name, known", [
    ("TheBloke/Llama-2-7B-GPTQ", "meta-llama/Llama-2-7b-hf"), ("llama3-8b", "meta-llama/Meta-Llama-3-8B"),
    ("neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8-KV", "meta-llama/Meta-Llama-3.1-8B"),
    ("/models/models--meta-llama--llama-3-1-70b-instruct", "meta-llama/Llama-3.3-70B-Instruct"),
    ("unsloth/Qwen3.6-27B-GGUF UD-Q6_K_XL", "Qwen/Qwen3.5-27B"), ("qwen3-235b", "Qwen/Qwen3-235B-A22B-Instruct-2507"),
    ("qwen2.5:14b-instruct-q4_K_M", "Qwen/Qwen2.5-14B-Instruct-1M"), ("gemma3:27b", "google/gemma-3-27b-it"),
    ("NousResearch/Hermes-3-Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-8B"),
    ("DeepSeek-V3-0324-AWQ", "deepseek-ai/DeepSeek-V3"), ("gpt-oss-20b", "openai/gpt-oss-20b"),
    ("Qwen3-8B", "Qwen/Qwen3-8B"), ("mistral-7b", None), ("llama-7b", None), ("qwen3", None), ("8b", None),
    ("Qwen2.5-VL", None), ("Qwen3-VL-2B", None), ("not stated", None),
    ("Qwen3-8B like, name not in excerpt", None), ("(hybrid AWQ, name not in excerpt)", None),
])
def test_names_are_matched_and_never_derived(name, known):
    found, why = find_model(name, "")
    assert (found and found.name) == known and bool(why) == (known is None)


def test_an_architecture_cell_names_a_model_that_has_no_other_name():
    found, why = find_model("(30B-A3B class, FP8 weights; name not in excerpt)", "qwen3-30b-a3b")
    assert found.name == "Qwen/Qwen3-30B-A3B" and "architecture only" in why


@pytest.mark.parametrize("cell, value, half", [
    ("10.55", 10.55, 0.005), ("8", 8, 0.5), ("~50,000", 50_000, 5000), ("55k", 55_000, 500), ("10.79x", 10.79, 0.005),
    ("mem-fraction-static 0.93", 0.93, 0.005), ("2x RTX (3090 Ti named)", 2, 0.5), ("-1.05", -1.05, 0.005),
    ("1,687,476", 1_687_476, 0.5), ("9.000 MB", 9, 0.0005), (10.5, 10.5, 0.05)])
def test_numbers_keep_the_rounding_that_they_show(cell, value, half):
    found = number({"a": cell}, "a")
    assert (found.value, found.half) == (value, pytest.approx(half))


@pytest.mark.parametrize("cell", ["", None, float("nan"), "not stated", "v0.5", "K q8_0", "nan"])
def test_a_cell_without_a_number_is_none(cell):
    assert number({"a": cell}, "a") is None


def test_several_ranks_pools_are_the_least_and_k_and_v_are_added():
    two = dict(model="meta-llama/Llama-3.1-8B", tp="2", n_gpus="2", kv_tokens="81920")
    assert judge(line(**two, kv_cache_gib="rank 0: 5.00, rank 1: 5.31")).verdict == "agreed"
    one = line(model="meta-llama/Llama-3.1-8B", kv_tokens="442750", kv_cache_gib="K 27.02 V 27.02", block_size="1",
               engine_version="SGLang 2025-03")
    assert judge(one).verdict == "agreed"
    assert [n.value for n in numbers({"a": "24.62/24.58"}, "a")] == [24.62, 24.58]


@pytest.mark.parametrize("cell, meant", [
    ("vLLM 0.8.5", ("blocks",)), ("vLLM V0 2025-02", ("blocks",)), ("vLLM 0.11 2025-10", ("grouped",)),
    ("vLLM 0.20.1", ("grouped", "concurrency")), ("vLLM 0.21 2026-05", ("concurrency",)),
    ("vLLM 2026-08", ("concurrency",)), ("vLLM 2026-04", ("grouped", "concurrency")),
    ("vLLM", ("concurrency", "grouped", "blocks")), ("vLLM 0.9.2", ("grouped", "blocks"))])
def test_the_meaning_of_kv_cache_size_follows_the_version(cell, meant):
    assert wordings(engine(cell)) == meant


def test_bad_tables_are_refused(tmp_path):
    path = tmp_path / "logs.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no table of server logs"):
        check(path)
    path.write_bytes(b"kv_tokens,model\n\xff\xfe\x00,x\n")
    with pytest.raises(ValueError, match="UTF-8"):
        check(path)
    path.write_bytes(b"kv_tokens\n" + b"1" * (33 * 2**20))
    with pytest.raises(ValueError, match="larger than 32 MiB"):
        check(path)
    with pytest.raises(OSError):
        check(tmp_path / "none.csv")
    assert check([]) == [] and summary([]) == dict.fromkeys(("agreed", "explained", "unexplained", "unmatched"), 0)


@given(st.dictionaries(st.sampled_from(INPUTS + ("notes",)), st.one_of(
    st.text(max_size=40), st.integers(-10**20, 10**20), st.floats(), st.none(),
    st.sampled_from(["Qwen/Qwen3-8B", "openai/gpt-oss-20b", "Qwen/Qwen3.5-27B", "vLLM 0.24", "llama.cpp 2026", "SGLang",
                     "LMDeploy TurboMind", "TensorRT-LLM", "fp8", "16", "10.5", "131072", "8"]))))
def test_no_cell_breaks_it(row):
    result = check([row])[0]
    assert result["verdict"] in ("agreed", "explained", "unexplained", "unmatched") and result["note"]


def test_the_file_holds_observed_columns_and_sources_only():
    with open(data_dir() / "server_logs.csv", encoding="utf-8", newline="") as file:
        names = csv.DictReader(file).fieldnames
    assert set(names) == {"id", "source", *INPUTS}
    assert all(row["source"] for row in ROWS) and len({row["id"] for row in ROWS}) == len(ROWS) == 109
