"""The numbers that claims of section 1 rest on, against arithmetic by hand."""
import pandas as pd
import pytest

from kvlab.catalog.models import model
from kvlab.claims import _steps, bandwidth, bottleneck
from kvlab.claims._base import judged
from kvlab.claims._results import Results
from kvlab.shapes import LayerSpec

CLAIMS = {claim.id: claim for claim in (*bottleneck.CLAIMS, *bandwidth.CLAIMS)}
PARAMS, TABLE, PER_TOKEN = 72_706_203_648, 152_064 * 8192, 327_680       # of Qwen2-72B; its embedding table; KV bytes


def evidence(claim, results=None):
    return {one.name: one for one in CLAIMS[claim].evidence(results or Results())}


@pytest.mark.parametrize(("name", "share"), [
    ("Qwen/Qwen2-72B-Instruct", 1), ("deepseek-ai/DeepSeek-V3", 1), ("moonshotai/Kimi-K3", 24 / 93),
    ("openai/gpt-oss-120b", 0.5), ("google/gemma-3-27b-it", 10 / 62), ("mistralai/Mistral-7B-v0.1", 0),
    ("deepseek-ai/DeepSeek-V3.2", 0), ("MiniMaxAI/MiniMax-M3", 0),
    ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 6 / 29)])            # 23 Mamba layers; 23 MLP blocks cache nothing
def test_the_layers_that_read_all_earlier_tokens(name, share):
    assert bottleneck.whole_share(model(name)) == pytest.approx(share)


def test_the_cache_of_2048_tokens_and_the_weights():
    sizes, shares = evidence("C02"), evidence("C03")
    assert sizes["gqa"].value == sizes["llama"].value == 0.625 * 2**30 and sizes["mha"].value == 5 * 2**30
    assert shares["kv_over_weights"].value == pytest.approx(PER_TOKEN * 2048 / (2 * PARAMS))
    assert shares["with_64_heads"].value == pytest.approx(8 * shares["kv_over_weights"].value)
    assert shares["equal_at"].value == 443_763


def test_what_a_decode_step_reads():
    read = 2 * (PARAMS - TABLE)
    for batch_size in (1, 16, 256):
        kv = PER_TOKEN * batch_size * 2048
        assert _steps.kv_share(_steps.decode(batch_size)) == pytest.approx(kv / (kv + read))
    half = _steps.tokens_at_share(0.5)
    assert half == read // PER_TOKEN == 436_160
    assert _steps.kv_share(_steps.decode(half, 1)) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize(("batch_size", "share"), [(1, 0.0067), (4, 0.0266), (8, 0.0523), (16, 0.1009)])
def test_the_share_of_the_peak_that_a_decode_step_reaches_at_best(batch_size, share):
    assert _steps.mfu(_steps.decode(batch_size)) == pytest.approx(share, rel=0.01)


@pytest.mark.parametrize(("layer", "flop_per_byte"), [
    (LayerSpec("full", 1, num_q_heads=64, num_kv_heads=64, head_dim=128), 1),
    (LayerSpec("full", 1, num_q_heads=64, num_kv_heads=8, head_dim=128), 8),
    (LayerSpec("mla", 1, num_q_heads=64, num_kv_heads=1, head_dim=576, v_head_dim=512), 121),
    (LayerSpec("mla", 1, num_q_heads=128, num_kv_heads=1, head_dim=576, v_head_dim=512), 242)])
def test_the_intensity_of_decode_attention(layer, flop_per_byte):
    assert bandwidth.intensity(layer) == pytest.approx(flop_per_byte, abs=0.5)


def test_twice_the_arithmetic_helps_what_arithmetic_limits():
    assert _steps.gain(_steps.decode(1)) == 1 and _steps.gain(_steps.prefill()) == pytest.approx(2)
    assert _steps.memory_to_compute(_steps.decode(256, 128)) < 1 < _steps.memory_to_compute(_steps.decode(256, 4096))
    with pytest.raises(ValueError, match="no dense 16-bit rate of Apple M1"):
        _steps.roofline("Apple M1")


def test_the_exponent_of_time_over_context_is_the_tables(monkeypatch):
    rows = [dict(run_id="r", hardware="none", metric="latency_s", kind="measured", status="ok",
                 phase="decode", variant=variant, batch_size=1,
                 group_ratio=8, kv_len=2**k, replica=0, value=scale * 2**(k / 2), low=scale * 2**(k / 2),
                 high=scale * 2**(k / 2)) for k in range(10, 15) for variant, scale in (("slow", 9), ("fast", 1))]
    results = Results()
    table, steps = pd.DataFrame(rows), results.rows("memory_wall")
    monkeypatch.setattr(results, "rows", lambda study: table if study == "memory_wall" else steps)
    assert bandwidth._exponent(results).value == pytest.approx(0.5)
    table = table[table["kv_len"] < 2**13]
    assert bandwidth._exponent(results).kind == "missing"


def test_busy_sms_are_taken_from_a_run_that_watched_a_gpu(monkeypatch):
    results = Results()
    table = results.rows("counters").copy()
    counted = (table["metric"] == "sm_utilization") & (table["phase"] == "decode")
    assert evidence("C06", results)["sm_busy"].kind == "missing"
    table.loc[counted, "kind"], table.loc[counted, "value"] = "measured", 0.9
    table.loc[table.index[counted][0], "value"] = 0.8
    rows = results.rows
    monkeypatch.setattr(results, "rows", lambda study: table if study == "counters" else rows(study))
    assert evidence("C06", results)["sm_busy"].value == 0.8
    verdict = judged(CLAIMS["C06"], CLAIMS["C06"].evidence(results)).verdict
    assert verdict.word == "supported" and "SMs had work for 80% of the time" in verdict.because.en
