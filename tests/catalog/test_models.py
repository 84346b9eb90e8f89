"""data/models.csv builds every ModelSpec, and each row reproduces its own golden byte columns."""
import sys
from subprocess import run

import pytest

from kvlab.catalog import data_dir, rows
from kvlab.catalog.models import aliases, model, models
from kvlab.kv.sizing import article_formula_bytes, kv_bytes, kv_bytes_per_token, state_bytes, weight_bytes

ROWS = rows("models.csv")
LONG = 131072
GiB, MiB = 2**30, 2**20


def by_name(row):
    return row["model"]


def test_every_row_is_a_model_with_a_source():
    assert list(models()) == [row["model"] for row in ROWS]
    assert len(models()) == 119
    for row in ROWS:
        assert row["source"] and row["source"] in model(row["model"]).source
        assert bool(row["params"]) == bool(row["params_source"])


@pytest.mark.parametrize("row", ROWS, ids=by_name)
def test_row_reproduces_its_golden_columns(row):
    spec = model(row["model"])
    kv, state = kv_bytes(spec, LONG, "bf16"), state_bytes(spec)
    assert spec.num_layers == int(row["layers"])
    assert kv_bytes_per_token(spec, LONG, "bf16") == int(row["kv_bytes_per_token"])
    assert abs((kv + state) / GiB - float(row["kv_GiB_at_131072"])) <= 0.51e-4
    formula = article_formula_bytes(spec, LONG)
    assert formula == int(row["article_formula_bytes_per_token"]) * LONG
    assert formula / (kv + state) == pytest.approx(float(row["article_formula_over_truth"]), abs=0.0051)


@pytest.mark.parametrize("row", [r for r in ROWS if "DeepSeek-V4" not in r["model"]], ids=by_name)
def test_constant_state_is_exact(row):
    assert state_bytes(model(row["model"])) == float(row["const_state_MiB"]) * MiB


def test_only_incomplete_rows_are_approximate():
    approximate = {name for name, spec in models().items() if spec.approximate}
    assert {"deepseek-ai/DeepSeek-V4-Flash", "deepseek-ai/DeepSeek-V4-Pro"} < approximate
    for name in approximate - {"deepseek-ai/DeepSeek-V4-Flash", "deepseek-ai/DeepSeek-V4-Pro"}:
        # the source has linear layers without the size of their state: 0 is not a fact and the row says so
        linear = [layer for layer in model(name).layers if layer.kind == "linear"]
        assert linear and state_bytes(model(name)) == 0 and "state" in model(name).approximate
    for name, spec in models().items():
        hidden = "linear" in {layer.kind for layer in spec.layers} and not state_bytes(spec)
        assert not hidden or name in approximate


@pytest.mark.parametrize("name", ["Qwen/Qwen2-72B", "qwen/qwen2-72b", "qwen2-72b", "QWEN2-72B-INSTRUCT",
                                  "Qwen/Qwen2-72B-Instruct"])
def test_qwen2_72b_is_found_by_any_of_its_names(name):
    spec = model(name)
    assert spec.name == "Qwen/Qwen2-72B-Instruct"
    assert (spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.num_layers) == (64, 8, 128, 80)


def test_qwen2_72b_parameters_follow_from_its_config():
    vocab, hidden, ffn, layers, kv_width = 152064, 8192, 29568, 80, 8 * 128
    attention = 2 * hidden * hidden + hidden + 2 * (hidden * kv_width + kv_width)
    total = 2 * vocab * hidden + layers * (attention + 3 * hidden * ffn + 2 * hidden) + hidden
    spec = model("Qwen/Qwen2-72B")
    assert spec.params == total == 72_706_203_648
    assert weight_bytes(spec) == 145_412_407_296
    assert "computed from config" in spec.source


def test_unknown_parameters_are_missing_not_zero():
    unknown = [spec for spec in models().values() if spec.params is None]
    assert unknown
    assert all(weight_bytes(spec) is None for spec in unknown)
    assert all(spec.params is None or spec.params > 10**8 for spec in models().values())


def test_aliases_lead_to_rows_and_hide_none():
    assert aliases()["Qwen/Qwen2-72B"] == "Qwen/Qwen2-72B-Instruct"
    assert not {name.lower() for name in aliases()} & {name.lower() for name in models()}
    names = [name for row in ROWS for name in (row["model"], *filter(None, row["aliases"].split(";")))]
    assert len({name.lower() for name in names}) == len(names)
    for name, target in aliases().items():
        assert model(name) is models()[target]


def test_unknown_model_names_near_ones_and_the_command_that_lists_all():
    with pytest.raises(KeyError, match="Did you mean 'Qwen/Qwen2-72B'") as error:
        model("Qwen/Qwen2-72C")
    assert "kvlab ls models" in str(error.value) and "(or Qwen/Qwen-72B" in str(error.value)


def test_part_of_a_name_is_not_enough():
    with pytest.raises(KeyError, match="no model named 'qwen2'"):
        model("qwen2")


def test_a_changed_listing_does_not_change_the_catalogue():
    models().clear()
    assert len(models()) == 119


def test_per_kind_heads_and_widths():
    def kinds(name):
        return {layer.kind: (layer.count, layer.num_kv_heads, layer.head_dim, layer.shape.v_dim)
                for layer in model(name).layers}
    assert kinds("google/gemma-4-26B-A4B") == {"full": (5, 2, 512, 512), "sliding": (25, 8, 256, 256)}
    assert kinds("nvidia/Gemma-4-31B-IT-NVFP4") == {"full": (10, 4, 512, 512), "sliding": (50, 16, 256, 256)}
    assert kinds("XiaomiMiMo/MiMo-V2-Flash") == {"full": (9, 4, 192, 128), "sliding": (39, 8, 192, 128)}
    assert kinds("deepseek-ai/DeepSeek-V3") == {"mla": (61, 1, 576, 512)}


def test_catalogue_and_sizing_load_neither_torch_nor_pandas():
    code = ("import sys, kvlab.catalog.models, kvlab.catalog.gpus, kvlab.kv.sizing as s; "
            "s.size(kvlab.catalog.models.model('qwen2-72b'), 4096, kv_format='int8/token'); "
            "print(sorted({'torch', 'pandas', 'numpy', 'matplotlib'} & set(sys.modules)))")
    done = run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_data_dir_holds_the_files():
    assert {"models.csv", "gpus.csv"} <= {path.name for path in data_dir().iterdir()}
