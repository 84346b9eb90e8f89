"""Step times of GPUs: named constants with sources, parts that add up, and kernels of one's own machine."""
import re
from dataclasses import replace

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.catalog import data_dir
from kvlab.catalog.gpus import gpu, gpus
from kvlab.catalog.models import model
from kvlab.record.export import write_parquet
from kvlab.record.tables import read_table
from kvlab.serving._links import NVLINK, nvlink
from kvlab.serving.model_work import ranked
from kvlab.serving.step_models import AT_SHEET, Parts, chosen_rates, known_rates, parts, rates, rates_of_kernels
from kvlab.serving.step_time import Batch

LLAMA = ranked(model("meta-llama/Llama-3.1-8B"))
DECODE = Batch(decode_seqs=32, kv_tokens=40_000, sequences=32)
PREFILL = Batch(prefill_tokens=2048, prefill_pairs=2048 * 2049 // 2, kv_tokens=2048, sequences=1)


def test_every_line_of_the_table_names_a_gpu_and_a_run():
    for name in known_rates()[:-1]:
        found = rates(name)
        assert name in gpus() and "vLLM" in found.source and found.fitted_on
        assert [model(one).name for one in found.fitted_on] == list(found.fitted_on)
        shares = (found.weights_share, found.kv_share, found.flops_share, found.attention_share, found.experts_share)
        assert all(0 < share <= 1 for share in shares) and 0 < found.step_s < 0.01
    assert known_rates()[-1] == "sheet" and rates("sheet") is AT_SHEET


def test_a_gpu_without_a_run_gets_means_and_says_so():
    found, one, two = rates("H200 SXM 141GB"), rates("RTX 4090"), rates("RTX PRO 6000 Blackwell Server")
    assert found.kv_share == pytest.approx((one.kv_share * two.kv_share) ** 0.5)
    assert found.fitted_on == () and "every constant from RTX 4090, RTX PRO 6000" in found.source
    assert "experts_share, reduce_s, reduce_rate, nccl_s, nccl_rate from RTX PRO 6000" in one.source
    assert one.reduce_s == two.reduce_s


def test_decode_by_hand_at_the_data_sheet():
    step = parts(gpu("RTX 4090"), LLAMA, AT_SHEET)
    bytes_read = LLAMA.weight_bytes + 40_000 * 131_072
    assert step(DECODE) == pytest.approx(bytes_read / 1008e9)
    flops = LLAMA.flops_per_token * 2048 + LLAMA.flops_per_sequence
    cache, attention = 2048 * 131_072 / 1008e9, PREFILL.prefill_pairs * 4 * 32 * 32 * 128 / 165.2e12
    assert step(PREFILL) == pytest.approx(flops / 165.2e12 + cache + attention)


@given(st.integers(0, 4096), st.integers(0, 256), st.integers(0, 10**6), st.floats(0.1, 10))
def test_parts_add_up_and_scale(prefill, decode, cached, factor):
    batch = Batch(prefill_tokens=prefill, decode_seqs=decode, kv_tokens=cached, prefill_pairs=prefill * 100,
                  sequences=decode + (prefill > 0))
    step = parts(gpu("RTX PRO 6000"), ranked(model("Qwen3-30B-A3B"), dp=2))
    assert step(batch) == pytest.approx(sum(step.parts(batch).values()))
    assert step.scaled(factor, "x")(batch) == pytest.approx(factor * step(batch))
    more = replace(batch, kv_tokens=cached + 1000)
    assert step(more) > step(batch)


def test_a_mixed_step_does_not_hide_the_cache_behind_products():
    step = parts(gpu("RTX 4090"), LLAMA)
    mixed = replace(PREFILL, decode_seqs=32, kv_tokens=PREFILL.kv_tokens + 40_000, sequences=33)
    assert step(mixed) - step(PREFILL) > 40_000 * 131_072 / 1008e9


def test_ranks_pay_for_their_all_reduces():
    spec, device = model("Qwen3-32B"), gpu("RTX PRO 6000")
    two = parts(device, ranked(spec, tp=2))
    found = two.parts(DECODE)["collectives"]
    of = rates(device.name)
    assert found == pytest.approx(128 * (of.reduce_s + 32 * 2 * 5120 / of.reduce_rate))
    assert parts(device, ranked(spec)).parts(DECODE)["collectives"] == 0
    assert two(DECODE) > parts(device, ranked(spec))(DECODE) / 2


def test_ranks_on_nvlink_reduce_over_nvlink():
    """Llama-3.1-70B on 4 H100 SXM: 160 all-reduces of 10.7 µs beside 3350 GB/s of weights, not of 99 µs."""
    device, work = gpu("H100 SXM"), ranked(model("Llama-3.1-70B"), tp=4)
    of = chosen_rates(device.name, ranks=4)
    assert (of.reduce_s, of.reduce_rate) == (10.7e-6, 0.78 * 450e9) and "vllm#24111" in of.source
    one = parts(device, work, of).parts(Batch(decode_seqs=1, kv_tokens=500, sequences=1))
    assert one["collectives"] == pytest.approx(160 * (10.7e-6 + 1.5 * 16384 / 351e9)) and sum(one.values()) < 0.0155
    assert chosen_rates(device.name, ranks=4, nccl_only=True).reduce_s == 18.9e-6
    alone, two, four, eight = (parts(device, ranked(model("Llama-3.1-8B"), tp=tp), chosen_rates(device.name, ranks=tp))(
        DECODE) for tp in (1, 2, 4, 8))
    assert alone > 1.3 * two > 1.6 * four > 1.9 * eight


def test_a_link_of_ones_own_runs_or_asked_for_is_kept():
    own = rates("RTX PRO 6000 Blackwell Server")
    assert chosen_rates("RTX PRO 6000 Blackwell Server", ranks=2) == own
    asked = chosen_rates("H100 SXM5 80GB", "RTX PRO 6000 Blackwell Server", ranks=2)
    assert asked.reduce_s == own.reduce_s and asked.brief.endswith("as asked")
    assert chosen_rates("H100 SXM5 80GB", "sheet", ranks=2).reduce_s == 0
    assert chosen_rates("H100 SXM5 80GB") == rates("H100 SXM5 80GB")        # one rank: nothing to say of a link
    beyond = chosen_rates("H100 SXM5 80GB", ranks=16)
    assert beyond.reduce_s == own.reduce_s and "over PCIe" in beyond.brief and "over PCIe" in beyond.source


def test_every_gpu_on_a_board_or_bridge_has_its_nvlink():
    wanted = {name for name in gpus() if re.search("SXM|NVL|G[HB][23]00|H20$", name)}
    assert set(NVLINK) == wanted and nvlink("RTX 4090", 2) is nvlink("MI300X", 2) is nvlink("H100 NVL 94GB", 4) is None
    assert nvlink("B200 SXM", 8).bandwidth == 900e9 and nvlink("GB200 (per GPU)", 72) and nvlink("H100 NVL 94GB", 2)


def test_experts_are_read_and_then_multiplied_with_few_tokens():
    work, device = ranked(model("Qwen3-30B-A3B")), gpu("RTX PRO 6000")
    step, of = parts(device, work), rates(device.name)
    read = work.expert_bytes * work.touched_experts(32) / (device.bandwidth * of.weights_share)
    product = work.expert_flops_per_token * 32 / (device.flops["bf16"] * of.experts_share)
    assert step.parts(DECODE)["experts"] == pytest.approx(read + product) and read > product > 0


def test_replicas_exchange_the_tokens_of_all():
    step = parts(gpu("RTX PRO 6000"), ranked(model("Qwen3-30B-A3B"), dp=2))
    alone, beside = step.parts(DECODE), step.parts(replace(DECODE, peer_tokens=2048))
    of, tokens = rates("RTX PRO 6000 Blackwell Server"), DECODE.tokens + 2048
    assert beside["collectives"] == pytest.approx(96 * (of.nccl_s + tokens * 4096 / 2 / of.nccl_rate))
    assert beside["collectives"] > alone["collectives"] > 0 and beside["experts"] > alone["experts"]
    assert beside["weights"] == alone["weights"] and beside["cache"] == alone["cache"]


def test_what_a_sheet_lacks_is_refused():
    with pytest.raises(ValueError, match="dense rate of RTX 6000 Ada is not in the catalogue"):
        parts(gpu("RTX 6000 Ada"), LLAMA)
    with pytest.raises(ValueError, match="above 0"):
        Parts(LLAMA, 0, 1, AT_SHEET, "x", "y")
    with pytest.raises(ValueError, match="above 0"):
        parts(gpu("RTX 4090"), LLAMA).scaled(-1, "x")


REFERENCE = data_dir() / "reference" / "memory_wall.parquet"


def test_kernels_of_this_projects_own_reference():
    found, machine, read, product, itemsize = rates_of_kernels(REFERENCE)
    table = read_table(REFERENCE)
    assert machine in set(table["hardware"]) and itemsize == 4 and found.step_s == 0
    assert read == table[table["metric"] == "read_ceiling"]["value"].median() and product > read
    assert 0 < found.kv_share <= 1.2 and "measured on" in found.source and "left out" in found.source
    slow = rates_of_kernels(REFERENCE, "naive_repeat")[0]
    assert slow.kv_share < found.kv_share and "naive_repeat" in slow.source


def test_results_that_do_not_tell_are_refused(tmp_path):
    with pytest.raises(KeyError, match="no_such"):
        rates_of_kernels(REFERENCE, "no_such")
    (tmp_path / "a.parquet").write_text("hello")
    with pytest.raises(ValueError, match="a.parquet cannot be read as Parquet"):
        rates_of_kernels(tmp_path / "a.parquet")
    table = read_table(REFERENCE)
    write_parquet(table[table["metric"] != "read_ceiling"], tmp_path / "b.parquet")
    with pytest.raises(ValueError, match="has not all of read_ceiling"):
        rates_of_kernels(tmp_path / "b.parquet")
    two = pd.concat([table, table.assign(hardware="another machine")])
    write_parquet(two, tmp_path / "c.parquet")
    with pytest.raises(ValueError, match="one machine, dtype and number of threads"):
        rates_of_kernels(tmp_path / "c.parquet")
    with pytest.raises(FileNotFoundError):
        rates_of_kernels(tmp_path / "d.parquet")
