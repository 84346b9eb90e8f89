"""Both READMEs are true and alike: their variant is right as printed, commands exist, numbers come out."""
import re
from collections import Counter

import pytest
from documents import blocks, headings, inline, links, options_in, options_of, read, uncommented, verbs

from kvlab.attention import VariantRef
from kvlab.attention._matrix import cells
from kvlab.catalog import gpus
from kvlab.catalog.models import model, models
from kvlab.kv.sizing import article_formula_bytes, crossover_tokens, kv_bytes, weight_bytes
from kvlab.probes import measure
from kvlab.probes.kernel_error import KernelError

README, CHINESE = read("README.md"), read("README.zh-CN.md")


def test_the_printed_variant_agrees_with_the_oracle(tmp_path):
    """Every cell that `kvlab check my.py:Mine` goes through, in this process."""
    (variant,) = [code for code in blocks(README, "python") if code.startswith("# my.py")]
    (tmp_path / "my.py").write_text(variant, encoding="utf-8")
    matrix = cells(VariantRef.of(f"{tmp_path / 'my.py'}:Mine"), device="cpu", dtypes=("fp32", "bf16"))
    rows = [measure(comparison, (KernelError(),))[0] for _, comparison in matrix]
    counts = Counter(row["status"] for row in rows)
    assert set(counts) == {"ok", "skipped"} and counts["ok"] > 150, [row["error"] for row in rows if row["error"]][:5]


def test_the_numbers_of_the_first_screen():
    spec = model("Qwen/Qwen2-72B")
    assert f"{weight_bytes(spec) / 1e9:.0f} GB" == "145 GB" and f"{kv_bytes(spec, 2048, 'bf16') / 1e9:.2f}" == "0.67"
    assert f"{crossover_tokens(spec):,}" == "443,763" and int(crossover_tokens(spec) / spec.context) == 13
    english, chinese = " ".join(README.split()), " ".join(CHINESE.split())
    for sentence in ("145 GB of weights", "0.67 GB of K and V", "443,763 cached tokens, over thirteen full contexts"):
        assert sentence in english
    for sentence in ("权重占 145 GB", "K 和 V 只占 0.67 GB", "缓存到 443,763 个 token，相当于十三个多完整的上下文窗口"):
        assert sentence in chinese


def test_the_catalogue_is_as_large_as_both_say():
    counts = len(models()), len(gpus.gpus())
    assert f"{counts[0]} models and {counts[1]} accelerators" in " ".join(README.split())
    assert f"{counts[0]} 个模型和 {counts[1]} 种加速器" in CHINESE


def test_the_formulas_factor_for_deepseek_v3():
    spec = model("deepseek-ai/DeepSeek-V3")
    factor = f"{article_formula_bytes(spec, 4096) / kv_bytes(spec, 4096, 'bf16'):.0f}"
    assert f"{factor} times too much for DeepSeek-V3" in " ".join(README.split())
    assert f"用在 DeepSeek-V3 上，结果是实际的 {factor} 倍" in CHINESE


@pytest.mark.parametrize("text", [README, CHINESE], ids=["en", "zh"])
def test_a_row_of_the_table_of_commands_names_options_that_its_verb_has(text):
    rows = [line for line in text.splitlines() if re.match(r"\| `kvlab [a-z-]+", line)]
    named = {re.match(r"\| `kvlab ([a-z-]+)", row)[1]: options_in(row) for row in rows}
    assert set(named) == set(verbs())
    for verb, options in named.items():
        assert set(options) <= options_of(verb), (verb, set(options) - options_of(verb))


def test_each_names_the_other_in_its_first_line():
    assert "(README.zh-CN.md)" in README.splitlines()[0] and "(README.md)" in CHINESE.splitlines()[0]


def test_the_skeleton_is_the_same():
    assert [level for level, _ in headings(README)] == [level for level, _ in headings(CHINESE)]
    assert not re.search("[\u4e00-\u9fff]", "".join(words for _, words in headings(README)))
    for language in ("", "python"):
        here, there = ([uncommented(code) for code in blocks(text, language)] for text in (README, CHINESE))
        assert here == there
    rows = [[line.count("|") for line in text.splitlines() if line.startswith("|")] for text in (README, CHINESE)]
    assert rows[0] == rows[1]


def test_links_pictures_and_named_commands_are_the_same():
    here, there = links(README)[1:], links(CHINESE)[1:]
    assert sorted(here) == sorted(there) and len(here) > 40
    assert [one for one in here if one.endswith(".png")] == [one for one in there if one.endswith(".png")] != []
    assert {verb for verb, _ in inline(README)} == {verb for verb, _ in inline(CHINESE)}


def test_what_stands_in_python_is_there():
    import kvlab
    named = {name for text in (README, CHINESE) for code in blocks(text, "python")
             for name in re.findall(r"\bkvlab\.(\w+)\(", code)}
    assert {"measure", "run", "ledger", "size"} <= named <= set(kvlab.__all__)
