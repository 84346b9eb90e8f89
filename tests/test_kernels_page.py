"""The page about kernels is true: its variant is right as printed, and what it names is there."""
import importlib.util
import re
from pathlib import Path

import pytest

from kvlab.attention import Comparison, reference, trial
from kvlab.attention._variant import variants
from kvlab.figures import figures
from kvlab.kv.cache import Layout
from kvlab.shapes import AttentionShape, Workload

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    path = tmp_path_factory.mktemp("printed") / "mine.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location("mine", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Mine()


def test_the_printed_variant_reads_pages_where_they_lie(mine):
    workload = Workload(AttentionShape(8, 2, 16), q_lens=(1, 1, 1), kv_lens=(1, 33, 70))
    one = trial(mine, workload, layout=Layout(16, "random", "token"))
    assert mine.why_not(one) is None
    inputs = Comparison((one,)).inputs()[one.kv_format, one.layout][0]
    exact = reference(workload, inputs.q_BTQD, inputs.k, inputs.v)
    assert (mine.prepare(one, inputs)().double() - exact).norm() < 1e-6 * exact.norm()
    assert mine.cost(one).read_bytes > 0


def test_the_printed_variant_refuses_what_it_does_not_take(mine):
    decode = Workload.decode(AttentionShape(8, 2, 16), kv_len=32)
    assert "stores int8" in mine.why_not(trial(mine, decode, kv_format="int8/token"))
    assert "decode steps" in mine.why_not(trial(mine, Workload.prefill(AttentionShape(8, 2, 16), q_len=4)))


def test_every_variant_figure_and_file_that_the_page_names_is_there():
    rows = [line.split("|")[1:] for line in PAGE.splitlines() if line.startswith("| `")]
    named = [name for first, *_ in rows for name in re.findall(r"`(\w+)`", first)]
    assert {"paged", "triton_paged", "triton_flash", "cascade", "mla_expand", "c_decode"} <= set(named)
    assert set(named) <= set(variants.names()), "a variant that is not there"
    drawn = set(re.findall(r"kvlab figure (\w+)", PAGE))
    assert drawn == {"kernels", "block_size", "format_speed", "flash_flops", "format_support"} <= set(figures.names())
    for path in re.findall(r"`((?:kernels|tests|kvlab|notebooks|data)/[\w/.]+?\.\w+)", PAGE):
        assert (ROOT / path).is_file() or (ROOT / "kvlab" / path).is_file(), path
