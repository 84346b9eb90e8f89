"""The study's cases, its rows on a tiny made-up model, and findings that are true of tables whose truth is known."""
import json
from dataclasses import asdict, fields

import pandas as pd
import pytest
import torch

from kvlab.attention import Comparison
from kvlab.kv.formats import kv_format
from kvlab.model.config import DecoderConfig
from kvlab.model.decoder import Decoder
from kvlab.probes._base import Watch
from kvlab.record.reading import Reading, missing, schema, table
from kvlab.studies import _kv_quant_rows as rows
from kvlab.studies import kv_quant
from kvlab.studies._kv_quant_cases import ContextCase, MixCase, ScoreCase, SensitivityCase
from kvlab.studies._worker import case_from

CONFIG = DecoderConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_layers=2, num_q_heads=4, num_kv_heads=2,
                       head_dim=32, context=4096)


class Letters:
    def encode(self, content, add_special_tokens):
        return type("Encoding", (), {"ids": [ord(c) % 97 for c in content]})()

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(97 + i) for i in ids)


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path):
    """A random decoder in the place of every model, made-up texts, one thread."""
    def content(seed):
        letters = torch.randint(0, 97, (2000,), generator=torch.Generator().manual_seed(seed))
        return "".join(chr(97 + int(i)) for i in letters)
    made = {"file:a": content(1), "file:b": content(2), "pydoc:debugger": content(3), "file:short": "abc"}
    decoder = Decoder(CONFIG, Decoder.random(CONFIG).weights, Letters(), "tiny")

    def load(name, tokenizer=True):
        if name == "absent":
            raise ValueError("absent is not installed; pip install it")
        return decoder
    monkeypatch.setattr(rows, "load_decoder", load)
    monkeypatch.setattr(rows, "text", made.__getitem__)
    rows._decoder.cache_clear()
    rows._reference.cache_clear()
    rows._KEPT.clear()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    rows._decoder.cache_clear()
    rows._reference.cache_clear()
    rows._KEPT.clear()


def case(kind=ScoreCase, fmt="int8/token", documents=("file:a", "file:b"), window=96, **more):
    return kind("tiny", fmt, documents, window, **more)


def value(found, metric, **where):
    chosen = found[found["metric"] == metric]
    for column, wanted in where.items():
        chosen = chosen[chosen[column] == wanted]
    assert len(chosen) == 1, chosen
    return chosen.iloc[0]


@pytest.mark.parametrize("size", kv_quant.SIZES)
def test_cases_differ_name_real_formats_and_survive_the_way_to_a_worker(size):
    every = list(kv_quant.cases(size))
    assert len({one.comparison_id for one in every}) == len(every)
    for one in every:
        kind = type(one)
        again = case_from(f"{kind.__module__}:{kind.__qualname__}", json.loads(json.dumps(asdict(one))))
        assert again == one and again.comparison_id == one.comparison_id
        if not isinstance(one, Comparison):
            kv_format(one.kv_format)
            assert set(one.columns()) <= set(table([]).columns) and json.loads(one.columns()["case"])["model"]


def test_small_holds_what_the_issue_asks():
    every = list(kv_quant.cases("small"))
    scored = [one for one in every if isinstance(one, ScoreCase)]
    assert {one.kv_format for one in scored} >= {
        "fp16", "bf16", "fp8_e4m3", "fp8_e4m3/token", "fp8_e4m3/tensor", "fp8_e5m2", "int8/token", "int8/tensor",
        "int8/head", "int8/channel", "int4/token/g32", "kivi4/g32/r32", "kivi2/g32/r32", "int8/token+int4/token/g32"}
    assert [one.label for one in scored if one.calibration == "range:8"] == ["int8/tensor, guessed range ±8"]
    assert all(one.against == "fp8_e4m3" for one in scored if one.kv_format in ("int8/token", "int8/tensor"))
    assert all(one.calibration not in one.documents for one in scored)
    decode = [one for one in every if isinstance(one, Comparison)]
    timed = [t.kv_format for one in decode for t in one.trials]
    assert sorted(timed) == sorted({one.kv_format for one in scored})
    for one in decode:
        assert one.workload.shape == kv_quant.MODEL_SHAPE
        assert max(one.cache_bytes().values()) <= 2 * min(one.cache_bytes().values())
    assert {one.window for one in every if isinstance(one, ContextCase)} == {8192}
    assert {one.kv_format for one in every if isinstance(one, SensitivityCase)} == set(kv_quant.MIXED)


def test_a_scored_format_has_quality_test_bytes_and_difference(tmp_path):
    one, stages = case(against="fp8_e4m3"), []
    found = table(kv_quant.run(one, artifacts=tmp_path, watch=Watch(at=lambda where, stage: stages.append(stage))))
    schema().validate(found)
    whole = found[found["scope"] == "texts"]
    assert set(whole["metric"]) == {*rows.METRICS, "kl_difference", "nll_difference"}
    assert set(found["case_id"][found["scope"] == "texts"]) == {one.comparison_id}
    kl = value(whole, "kl")
    assert kl["n"] == 192 and kl["low"] < kl["value"] < kl["high"] and "bootstrap" in kl["method"]
    for said in ("rounded through the storage format", "fp32", "sha256"):
        assert said in kl["note"]
    assert value(whole, "kl_difference")["high"] < 0 and "fp8_e4m3" in value(whole, "kl_difference")["note"]
    assert value(whole, "kv_bytes_per_token")["value"] == 2 * 2 * 2 * (32 + 4)
    wide, narrow = value(whole, "perplexity_delta"), value(whole, "perplexity_delta_90")
    assert wide["value"] == narrow["value"] and wide["low"] < narrow["low"] and "margin 0.1 %" in narrow["note"]
    assert len(found[found["scope"] == "document"]) == 2 and {"file:a", "file:b"} < set(found["data"])
    kept, = (tmp_path / "samples").glob("*.parquet")
    assert pd.read_parquet(kept)["kl"].mean() == pytest.approx(kl["value"])
    assert any("layer 1" in stage for stage in stages)


def test_static_scales_say_where_they_come_from_and_a_guess_clips():
    calibrated, guessed = (table(kv_quant.run(case(fmt="int8/tensor", calibration=c)))
                           for c in ("pydoc:debugger", "range:0.2"))
    a, b = (value(found, "kl", scope="texts") for found in (calibrated, guessed))
    assert "static scales of pydoc:debugger, 256 tokens" in a["note"] and "range:0.2, guessed" in b["note"]
    assert a["kv_format"] == "int8/tensor" and b["kv_format"] == "int8/tensor, guessed range ±0.2"
    assert b["value"] > 10 * a["value"]


def test_a_text_that_calibrates_itself_fails_in_words():
    found = kv_quant.run(case(fmt="int8/tensor", calibration="file:a"))
    assert [row["status"] for row in found] == ["failed"] and "must come from another text" in found[0]["error"]


@pytest.mark.parametrize("one, why", [(ScoreCase("absent", "bf16", ("file:a",), 96), "pip install"),
                                      (ScoreCase("tiny", "bf16", ("file:short",), 96), "has 3 tokens")])
def test_what_is_not_there_is_missing_with_the_reason(one, why):
    found = table(kv_quant.run(one))
    assert set(found["kind"]) == {"missing"} and set(found["metric"]) == set(rows.METRICS)
    assert found["note"].str.contains(why).all() and (found["status"] == "ok").all()
    said = kv_quant.findings(found)
    assert len(said) == 1 and said[0].kind == "missing" and why in said[0].sentence


def test_context_is_in_buckets_and_each_is_a_line():
    found = table(kv_quant.run(case(ContextCase, documents=("file:a",), window=1200, every=2)))
    assert sorted(set(found["kv_len"])) == [512, 1024, 1200] and found["case_id"].nunique() == 3
    assert set(found["metric"]) == {"kl", "top1_agreement"}
    assert value(found, "kl", kv_len=512)["n"] == 256 and "tokens 0 … 511" in set(found["scope"])


def test_sensitivity_has_a_line_per_layer_and_side_and_the_mix_chooses_from_it():
    found = table(kv_quant.run(case(SensitivityCase, "int4/token/g32")))
    assert set(found["scope"]) == {f"layer {i} {side}" for i in (0, 1) for side in "KV"}
    mixed = table(kv_quant.run(case(MixCase, "int8/token+int4/token/g32", sensed=96)))
    whole = mixed[mixed["scope"] == "texts"]
    uniform = sum(kv_format("int8/token+int4/token/g32").nbytes(4096, CONFIG.shape(i)) for i in (0, 1)) / 4096
    assert value(whole, "kv_bytes_per_token")["value"] <= uniform
    sensed = mixed[mixed["scope"] == "sensed windows"]
    assert set(sensed["kind"]) == {"measured", "modelled"} and sensed["case_id"].nunique() == 1
    assert "K+V of layers 0 … 1: int" in value(whole, "kl")["note"]
    assert any(f.name == "mix" and "predicted" in f.sentence for f in kv_quant.findings(mixed))


def test_one_line_per_format_joins_bytes_time_error_and_kl():
    scored = kv_quant.run(case())
    context = dict(phase="decode", variant="sdpa", kv_format="int8/token", replica=0, case_id="d", comparison_id="c")
    decode = [{**context, **asdict(Reading(name, 1e-3, unit, "measured"))} for name, unit in
              (("latency_s", "s"), ("kernel_error", "ratio"), ("format_error", "ratio"), ("ideal_bytes", "B"))]
    line, = kv_quant.per_format(table(scored + decode)).to_dict("records")
    for metric in ("latency_s", "ideal_bytes", "kernel_error", "format_error", "kl", "kv_bytes_per_token"):
        assert line[metric] > 0


def told(fmt, metric, number, low, high, unit="ratio", kind="measured", n=1000, scope="texts", **more):
    return {"kv_format": fmt, "model": "m", "case_id": fmt + scope, "source": "kv_quant", **more,
            **asdict(Reading(metric, number, unit, kind, low=low, high=high, n=n, scope=scope))}


def verdicts(fp8, int8):
    made = [told(fmt, "perplexity_delta_90", sum(ends) / 2, *ends)
            for fmt, ends in (("fp8_e4m3", fp8), ("int8/tensor", int8))]
    made += [told(fmt, "kl", 1e-3, 9e-4, 2e-3, "nat") for fmt in ("fp8_e4m3", "int8/tensor")]
    found = {f.name: f.sentence for f in kv_quant.findings(table(made))}
    return [next(word for word in ("supported", "refuted", "inconclusive") if f": {word} for" in found[name])
            for name in ("fp8_below_0.1_%:fp8_e4m3", "int8_0.1_to_0.3_%:int8/tensor")]


@pytest.mark.parametrize("fp8, int8, expected", [
    ((-5e-4, 9e-4), (1.1e-3, 2.9e-3), ["supported", "supported"]),
    ((1.1e-3, 9e-3), (4e-3, 5e-3), ["refuted", "refuted"]),
    ((-5e-4, 2e-3), (5e-4, 2e-3), ["inconclusive", "inconclusive"]),
    ((-9e-3, -2e-3), (-5e-4, 5e-4), ["refuted", "refuted"])])
def test_claims_are_judged_by_the_whole_interval(fp8, int8, expected):
    assert verdicts(fp8, int8) == expected


def test_order_and_calibration_are_judged_by_intervals():
    def kls(guessed, static, token, difference):
        made = [told(fmt, "kl", v, 0.9 * v, 1.1 * v, "nat") for fmt, v in (
            ("int8/tensor, guessed range ±8", guessed), ("int8/tensor", static), ("int8/token", token))]
        made += [told("int8/tensor", name, difference, difference - 1e-4, difference + 1e-4, "nat")
                 for name in ("kl_difference", "nll_difference")]
        return " ".join(f.sentence for f in kv_quant.findings(table(made)))
    assert "set”: supported for static scales only" in kls(0.1, 2e-3, 6e-4, -3e-3)
    assert "worse than FP8”: refuted" in kls(0.1, 2e-3, 6e-4, -3e-3)
    assert "set”: supported." in kls(0.1, 2e-3, 4e-3, 3e-3) and "FP8”: supported" in kls(0.1, 2e-3, 4e-3, 3e-3)
    assert "set”: refuted" in kls(1e-4, 2e-3, 4e-3, 5e-5) and "FP8”: inconclusive" in kls(1e-4, 2e-3, 4e-3, 5e-5)


def test_context_and_layers_say_what_the_rows_show():
    made = [told("fp8_e4m3", "kl", v, 0.9 * v, 1.1 * v, "nat", scope=f"tokens 0 … {n}", kv_len=n) for v, n in
            ((1e-3, 512), (1e-3, 1024), (3e-3, 8192))]
    made += [told("int8/token", "kl", 1e-3, 9e-4, 2e-3, "nat", scope=f"tokens 0 … {n}", kv_len=n) for n in (512, 8192)]
    made += [told("int4", "kl", v, None, None, "nat", scope=s) for s, v in (("layer 0 K", 3e-3), ("layer 0 V", 1e-3))]
    found = {f.name: f.sentence for f in kv_quant.findings(table(made))}
    assert "fp8_e4m3 grows with context" in found["context:fp8_e4m3"]
    assert "shows no change" in found["context:int8/token"]
    assert "K makes 75 %" in found["sensitivity:int4"] and "layer 0 K with 75 %" in found["sensitivity:int4"]


def test_an_empty_table_says_so():
    assert kv_quant.findings(table([]))[0].kind == "missing"
    gone = [{"kv_format": "x", **asdict(missing("kl", "nat", "no model", source="kv_quant"))}]
    assert "no model" in kv_quant.findings(table(gone))[0].sentence
    assert {f.name for f in fields(ScoreCase)} >= {"model", "documents", "window", "count", "start", "calibration"}
