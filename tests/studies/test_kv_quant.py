"""The study's cases, its rows on a tiny made-up model, and findings that are true of tables whose truth is known."""
import json
from dataclasses import asdict, fields

import pandas as pd
import pytest
import torch

from kvlab.accuracy import scoring
from kvlab.attention import Comparison
from kvlab.kv.formats import kv_format
from kvlab.model.config import DecoderConfig
from kvlab.model.decoder import Decoder
from kvlab.probes._base import Watch
from kvlab.record.quality import comparable
from kvlab.record.reading import Reading, missing, schema, table
from kvlab.studies import _kv_quant_rows as rows
from kvlab.studies import _kv_quant_scores as scores
from kvlab.studies import _models, kv_quant
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
    monkeypatch.setattr(_models, "load_decoder", load)
    for module in (rows, scores):
        monkeypatch.setattr(module, "text", made.__getitem__)
    _models.forget()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    _models.forget()


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
    assert [one.label for one in scored if one.calibration.startswith("range")] == [
        f"int8/tensor, guessed range ±{limit}" for limit in (8, 16, 32)]
    assert {one.label: one.against for one in scored if one.against} == {
        "int8/tensor": ("fp8_e4m3/tensor", "fp8_e4m3"), "int8/token": ("fp8_e4m3/token", "fp8_e4m3"),
        "int8/head": ("fp8_e4m3",), "int8/channel": ("fp8_e4m3",)}
    assert all(one.calibration not in one.documents for one in scored)
    decode = [one for one in every if isinstance(one, Comparison)]
    timed = [t.kv_format for one in decode for t in one.trials]
    assert sorted(timed) == sorted({one.kv_format for one in scored})
    for one in decode:
        assert one.workload.shape == kv_quant.MODEL_SHAPE
        assert max(one.cache_bytes().values()) <= 2 * min(one.cache_bytes().values())
    assert {one.window for one in every if isinstance(one, ContextCase)} == {8192}
    mix, = (one for one in every if isinstance(one, MixCase))
    sensed = [one for one in every if isinstance(one, SensitivityCase)]
    assert {one.kv_format for one in sensed} == set(kv_quant.MIXED) and mix.against == (mix.kv_format,)
    shared = [scores.sensing(mix, name) for name in mix.candidates]
    assert [scores.plain(one, one.kv_format) for one in sensed] == shared
    assert all(one.start == mix.start + mix.window for one in sensed)


def test_large_scores_more_texts_and_still_ranks_all_on_the_same():
    every = list(kv_quant.cases("large"))
    scored = [one for one in every if isinstance(one, ScoreCase)]
    mix, = (one for one in every if isinstance(one, MixCase))
    for one in scored:
        assert (one.common or one.documents) == mix.documents and set(mix.documents) <= set(one.documents)
        assert (one.count, one.window, one.start) == ((None if one.common else 1), mix.window, mix.start)
    assert any(one.common for one in scored) and any(not one.common for one in scored)


def test_a_scored_format_has_quality_test_bytes_and_difference(tmp_path):
    one, stages = case(against=("fp8_e4m3/token", "fp8_e4m3")), []
    found = table(kv_quant.run(one, artifacts=tmp_path, watch=Watch(at=lambda where, stage: stages.append(stage))))
    schema().validate(found)
    whole = found[found["scope"] == "texts"]
    assert set(whole["metric"]) == set(rows.METRICS) and (whole["metric"].value_counts() == 1).all()
    assert set(found["case_id"][found["scope"] == "texts"]) == {one.comparison_id}
    kl = value(whole, "kl")
    assert kl["n"] == 192 and kl["low"] < kl["value"] < kl["high"] and "bootstrap" in kl["method"]
    for said in ("rounded through the storage format", "fp32", "sha256"):
        assert said in kl["note"]
    for other in one.against:
        apart = value(found, "kl_difference", scope=f"minus {other}")
        assert apart["high"] < 0 and apart["value"] == pytest.approx(
            kl["value"] - scores.frame(case(fmt=other), print)["kl"].mean())
        assert value(found, "nll_difference", scope=f"minus {other}")["n"] == 190
    assert value(whole, "kv_bytes_per_token")["value"] == 2 * 2 * 2 * (32 + 4)
    wide, narrow = value(whole, "perplexity_delta"), value(whole, "perplexity_delta_90")
    assert wide["value"] == narrow["value"] and wide["low"] < narrow["low"] and "margin 0.1 %" in narrow["note"]
    assert len(found[found["scope"] == "document"]) == 2 and {"file:a", "file:b"} < set(found["data"])
    kept, = (tmp_path / "samples").glob("*.parquet")
    assert pd.read_parquet(kept)["kl"].mean() == pytest.approx(kl["value"])
    assert any(stage.startswith("fp32 cache") and "layer 1" in stage for stage in stages)
    assert any(not stage.startswith("fp32 cache") and "layer 1" in stage for stage in stages)


def test_bytes_are_those_of_a_cache_of_the_scored_window():
    found = table(kv_quant.run(case(fmt="kivi4/g32/r32", documents=("file:a",))))
    size = value(found, "kv_bytes_per_token")
    assert size["value"] == sum(kv_format("kivi4/g32/r32").nbytes(96, CONFIG.shape(i)) for i in (0, 1)) / 96
    assert size["method"] == "formula:nbytes(96) ÷ 96"


def test_a_case_of_more_text_says_what_the_common_windows_give():
    more = table(kv_quant.run(case(count=3, common=("file:b",))))
    alone = table(kv_quant.run(case(documents=("file:b",))))
    both = [value(part, "kl", scope=scope) for part, scope in ((more, "texts: common windows"), (alone, "texts"))]
    assert both[0]["value"] == both[1]["value"] and both[0]["n"] == 96 and both[0]["data"] == "file:b"
    assert value(more, "kl", scope="texts")["n"] == 3 * 2 * 96
    ranked = comparable(pd.concat([more, table(kv_quant.run(case(fmt="bf16", documents=("file:b",))))]))
    assert set(ranked["data"]) == {"file:b"} and set(ranked["kv_format"]) == {"int8/token", "bf16"}
    line, = kv_quant.per_format(more).to_dict("records")
    assert line["kl"] == both[0]["value"]



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


def test_a_mix_is_chosen_behind_what_it_is_scored_on_and_held_against_the_uniform_format(monkeypatch):
    chosen, uniform = [], "int8/token+int4/token/g32"
    seen = scores.sensitivity.sensitivity
    monkeypatch.setattr(scores.sensitivity, "sensitivity",
                        lambda decoder, windows, *rest, **more: chosen.extend(windows) or seen(decoder, windows, *rest,
                                                                                               **more))
    one = case(MixCase, uniform, sensed=64, against=(uniform,))
    found = table(kv_quant.run(one))
    for window in chosen:
        scored, = (w for w in scores.windows(one) if w.document == window.document)
        whole = scoring.encode(_models.decoder("tiny", "cpu"), scores.text(window.document))
        assert torch.equal(torch.cat([scored.ids_T, window.ids_T]), whole[300:300 + 96 + 64])
    apart = value(found, "kl_difference", scope=f"minus {uniform}")
    assert apart["value"] == pytest.approx(value(found, "kl", scope="texts")["value"]
                                           - scores.frame(case(fmt=uniform), print)["kl"].mean())
    monkeypatch.setattr(scores, "text", lambda name: "".join(chr(97 + i % 50) for i in range(2000)))
    _models.forget()
    refused = kv_quant.run(one)
    assert [row["status"] for row in refused] == ["failed"] and "what chooses the mix" in refused[0]["error"]


@pytest.mark.parametrize("error", [ValueError("no gguf; pip install gguf"), OSError("cannot read it; pip install")])
def test_a_package_that_is_not_there_is_missing_and_not_failed(monkeypatch, error):
    def load(name):
        raise error
    monkeypatch.setattr(_models, "load_decoder", load)
    found = table(kv_quant.run(case()))
    assert set(found["kind"]) == {"missing"} and found["note"].str.contains("pip install").all()


def test_an_import_that_kvlab_itself_broke_is_not_called_missing(monkeypatch):
    def load(name):
        raise ImportError("cannot import name 'load'")
    monkeypatch.setattr(_models, "load_decoder", load)
    with pytest.raises(ImportError):                # the worker makes it a failed row
        kv_quant.run(case())


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
    ((-9e-3, -2e-3), (-5e-4, 5e-4), ["supported", "refuted"]),                 # a gain is less than a loss of 0.1 %
    ((-9e-3, 9e-4), (-9e-3, -2e-3), ["supported", "refuted"])])
def test_claims_are_judged_by_the_whole_interval(fp8, int8, expected):
    assert verdicts(fp8, int8) == expected


def of_kl(**kls):
    return [told(fmt, "kl", v, 0.9 * v, 1.1 * v, "nat") for fmt, v in kls.items()]


def minus(fmt, other, value, half=1e-4):
    return told(fmt, "kl_difference", value, value - half, value + half, "nat", scope=f"minus {other}")


def found_in(made):
    return {f.name: f for f in kv_quant.findings(table(made))}


def test_int8_is_held_against_the_fp8_of_its_grain():
    made = [minus("int8/tensor", "fp8_e4m3", -3e-3), minus("int8/tensor", "fp8_e4m3/tensor", 2e-3),
            minus("int8/head", "fp8_e4m3", -3e-3), minus("int8/token", "fp8_e4m3/token", 5e-5)]
    said = {name: f.sentence for name, f in found_in(made).items()}
    assert "supported for int8/tensor: KL differs by +0.002" in said["int8_worse_than_fp8:int8/tensor"]
    assert "fp8_e4m3/tensor (scales alike); -0.003" in said["int8_worse_than_fp8:int8/tensor"]
    assert "refuted for int8/head" in said["int8_worse_than_fp8:int8/head"]
    assert "inconclusive for int8/token" in said["int8_worse_than_fp8:int8/token"]


@pytest.mark.parametrize("kls, against_fp8, verdict, fixed", [
    ((0.09, 0.014, 2.5e-3, 6e-4), -5e-3, "refuted", "needs it"),               # a scale per token beats the calibrated
    ((0.09, 0.014, 2.5e-3, 4e-3), -2e-3, "refuted", "needs it"),               # and so does what is no worse than FP8
    ((0.09, 0.014, 2.5e-3, 9e-3), 3e-3, "supported", "needs it"),
    ((0.09, 0.0026, 2.5e-3, 9e-3), 3e-3, "inconclusive", "may need it"),
    ((0.09, 0.002, 2.5e-3, 9e-3), 3e-3, "inconclusive", "does not need it")])
def test_int8_needs_calibration_only_where_every_way_without_is_worse(kls, against_fp8, verdict, fixed):
    names = "int8/tensor, guessed range ±8", "int8/tensor, guessed range ±16", "int8/tensor", "int8/token"
    made = [*of_kl(**dict(zip(names, kls))), minus("int8/token", "fp8_e4m3", against_fp8)]
    said = found_in(made)["int8_needs_calibration"].sentence
    assert f"set”: {verdict}:" in said and f"per tensor {fixed}" in said and "0.09 at ±8" in said


def test_top1_bytes_and_time_have_their_sentence():
    made = [told("fp8_e4m3", "top1_agreement", 0.955, 0.94, 0.97),
            told("int8/token", "top1_agreement", 0.984, 0.97, 1.0)]
    made += [told(fmt, "kv_bytes_per_token", size, None, None, "B", "modelled", kv_len=512)
             for fmt, size in (("bf16", 200), ("fp8_e4m3", 100), ("kivi4/g32/r32", 60))]
    made += [told(fmt, "latency_s", t, None, None, "s", scope="call", phase="decode", variant="sdpa", kv_len=2048,
                  format_path="decoded") for fmt, t in (("fp32", 1e-3), ("fp8_e4m3", 3e-3))]
    said = {name: f.sentence for name, f in found_in(made).items()}
    assert "int8/token 98.4 [97.0, 100.0], fp8_e4m3 95.5 [94.0, 97.0]" in said["top1"]
    assert "at 512 tokens: kivi4/g32/r32 30 %, fp8_e4m3 50 %" in said["bytes"]
    assert "at 2048 tokens, fp32 = 1 ms: fp8_e4m3 3 ×; the whole cache is decoded" in said["time:sdpa"]


def test_a_mix_says_whether_it_gains():
    def mixed(difference):
        name = "layers mixed, bytes of u"
        made = [told(name, "kl", 4e-3, 3e-3, 5e-3, "nat"), minus(name, "u", difference, 6e-4)]
        return found_in(made)["mix"].sentence
    assert "no gain shown" in mixed(-3e-4) and "a gain" in mixed(-1e-3) and "a loss" in mixed(1e-3)


def test_context_and_layers_say_what_the_rows_show():
    made = [told("fp8_e4m3", "kl", v, 0.9 * v, 1.1 * v, "nat", scope=f"tokens {n} … {2 * n - 1}", kv_len=2 * n)
            for v, n in ((1e-3, 512), (1e-3, 1024), (3e-3, 4096))]
    made += [told("int8/token", "kl", 1e-3, 9e-4, 2e-3, "nat", scope=f"tokens {n} … {2 * n - 1}", kv_len=2 * n)
             for n in (512, 4096)]
    made += [told("int4", "kl", v, None, None, "nat", scope=s, n=128, kv_len=64)
             for s, v in (("layer 0 K", 3e-3), ("layer 0 V", 1e-3))]
    found = {name: f.sentence for name, f in found_in(made).items()}
    assert "fp8_e4m3 is larger far into the context" in found["context:fp8_e4m3"]
    assert "at positions 4,096–8,191" in found["context:fp8_e4m3"]
    assert "shows no change" in found["context:int8/token"]
    assert "K makes 75 %" in found["sensitivity:int4"] and "layer 0 K with 75 %" in found["sensitivity:int4"]
    assert "(128 tokens in windows of 64)" in found["sensitivity:int4"]


def test_an_empty_table_says_so():
    assert kv_quant.findings(table([]))[0].kind == "missing"
    gone = [{"kv_format": "x", **asdict(missing("kl", "nat", "no model", source="kv_quant"))}]
    assert "no model" in kv_quant.findings(table(gone))[0].sentence
    assert {f.name for f in fields(ScoreCase)} >= {"model", "documents", "window", "count", "start", "calibration"}
