"""The table of serving engines: every answer has a source, a version and a day; names are found or refused."""
import re

import pytest

from kvlab.catalog.engines import ASPECTS, engine, engines
from kvlab.listing import LISTS


def test_every_engine_answers_every_question_or_leaves_it_empty():
    assert list(engines()) == ["vLLM", "SGLang", "TGI", "Triton + TensorRT-LLM", "llama.cpp",
                               "transformers continuous batching", "LMDeploy"]
    for found in engines().values():
        assert list(found.cells) == list(ASPECTS)


def test_no_answer_without_a_source_and_no_source_without_an_answer():
    for found in engines().values():
        for aspect, cell in found.cells.items():
            if cell.what:
                assert cell.source.startswith("https://") and re.fullmatch(r"\d{4}-\d\d-\d\d", cell.read), aspect
                assert cell.version == found.version
            else:
                assert not cell.source and not cell.read, aspect


def test_what_the_article_compares():
    assert "maintenance since 2025-12-11" in engine("tgi").cells["status"].what
    assert "recompute" in engine("vllm").cells["under_pressure"].what
    assert "total" in engine("vLLM").cells["memory_fraction"].what
    assert "free" in engine("Triton").cells["memory_fraction"].what
    assert "shortest-prefill-first" in engine("sglang").cells["policies"].what


def test_unknown_and_ambiguous_names_are_refused():
    with pytest.raises(KeyError, match="Did you mean .*vLLM"):
        engine("vLMM")
    with pytest.raises(KeyError, match="could be any of: TGI, Triton"):
        engine("T")


def test_the_list_has_one_line_per_answer():
    rows = list(LISTS["engines"]())
    assert len(rows) == len(engines()) * len(ASPECTS)
    assert set(rows[0]) == {"name", "aspect", "what", "version", "source"}
