"""The arithmetic behind the claims on shared KV heads, against numbers worked out by hand from the configurations."""
import pytest

from kvlab.catalog.models import model
from kvlab.claims import grouped_heads, named_models
from kvlab.claims._results import Results


@pytest.fixture(scope="module")
def found():
    results = Results()
    return {claim.id: {one.name: one for one in claim.evidence(results)}
            for claim in (*grouped_heads.CLAIMS, *named_models.CLAIMS)}


def test_bytes_per_token_of_the_named_models(found):
    sizes = {name: found["C16"][f"bytes_{name}"].value / 1024 for name in ("qwen2", "deepseek", "k3")}
    assert sizes == {"qwen2": 320, "deepseek": 68.625, "k3": 27}


def test_gqa_alone_compresses_by_its_group_ratio_and_mla_by_more(found):
    assert [found["C16"][f"gqa_{at}"].value for at in ("8k", "128k", "1m")] == [16, 16, 16]
    assert found["C16"]["mla_128k"].value == pytest.approx(128 * 256 / 576)     # 128 heads of K and V, one latent
    k3 = 93 * 96 * 256 * 2 * 131_072 / (24 * 576 * 2 * 131_072 + 414 * 2**20)
    assert grouped_heads._compression(model("Kimi-K3"), 131_072) == pytest.approx(k3)
    assert found["C16"]["other_128k"].value >= k3


def test_kimi_k3_has_no_grouped_layer_and_keeps_far_less_than_64_8_would(found):
    k3 = found["C19"]
    assert [k3[f"{kind}_layers"].value for kind in ("grouped", "mla", "linear")] == [0, 24, 69]
    assert k3["kv_bytes"].value / 2**30 == 3.375 and k3["as_said"].value / 2**30 == 46.5
    assert sum(found["C20"][f"{kind}_saved"].value for kind in ("grouped", "mla", "linear")) == pytest.approx(1)


def test_what_a_ratio_saves_and_what_is_left_of_it_with_more_ranks_than_kv_heads(found):
    saved = {name: one.value for name, one in found["C21"].items()}
    assert saved["at_64_8"] == 0.875 and saved["least"] == 0.5
    assert saved["most"] == pytest.approx(1 - 8 / 232)                  # Falcon 180B
    assert saved["per_rank"] == 0.75                                    # one KV head a rank where MHA has 64 ÷ 16
    assert found["C22"]["saved"].value == pytest.approx(0.984375)


def test_qwen2s_family_is_counted_by_its_heads(found):
    assert found["C18"]["family"].value * found["C18"]["family"].n == 2
    assert all(heads in found["C18"]["family"].about.en for heads in ("14/2", "12/2", "28/4", "40/8"))


def test_errors_are_those_of_shapes_that_share(found):
    assert 0 < found["C17"]["grouped"].value < found["C17"]["repeated"].value < 1e-5
    assert "ratios 4, 8, 32" in found["C17"]["repeated"].about.en and found["C17"]["expanded"].n == 512
