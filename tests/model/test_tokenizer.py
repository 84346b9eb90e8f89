"""Tokenizers from a vocabulary and from a file, against transformers' own with the same vocabulary."""
import json
import re
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch

from kvlab.model import tokenizer as tokens
from kvlab.model.tokenizer import CONTROL, NORMAL, USER_DEFINED, byte_level, encode, shared_run

tokenizers = pytest.importorskip("tokenizers", reason="the package that cuts text")
AWKWARD = ("Ünïcödé 漢字 🙂 1234  567 \t\t x\n\n\n  y <|im_start|>user\nhi<|im_end|> ²½ Ⅷ don't DON'T we'll\r\n a  3 "
           "naïve_(x)«mot»\x00\u200b end  ")
PROSE = "\n".join(topics.values())[:200_000]
LETTERS = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def small(pre="smollm", merges=("l o", "Ġ lo"), more=(), kinds=None):
    """Bytes, two merges, and one token of each special kind."""
    words = [*LETTERS, "lo", "Ġlo", "<|end|>", "<tool>", *more]
    kinds = kinds or [*[NORMAL] * (len(LETTERS) + 2), CONTROL, USER_DEFINED, *[NORMAL] * len(more)]
    return byte_level(words, list(merges), kinds, pre, "small.gguf")


@pytest.fixture(scope="module")
def vocabulary():
    """The real vocabulary of 49,152 tokens, whatever way of splitting is tried with it."""
    pytest.importorskip("gguf", reason="reads the vocabulary")
    from kvlab.model._gguf_weights import GgufModel
    from kvlab.model.load import _smollm2
    try:
        return GgufModel(_smollm2()).vocabulary
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def theirs(vocabulary):
    """transformers' tokenizer for a GGUF with this vocabulary and another way of splitting."""
    module = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping",
                                 reason="this transformers reads no vocabularies of GGUF files")

    def made(pre):
        about = dict(tokens=vocabulary.tokens, merges=vocabulary.merges, token_type=vocabulary.kinds,
                     tokenizer_type="gpt2", pre_tokenizer_type=pre)
        return module.convert_gguf_tokenizer("llama", about)[0]
    return made


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2"])
def test_ids_are_transformers_for_over_30_000_tokens(vocabulary, theirs, pre):
    ours = byte_level(vocabulary.tokens, vocabulary.merges, vocabulary.kinds, pre, "x")
    ids = encode(ours, PROSE + AWKWARD).tolist()
    assert len(ids) > 30_000
    assert ids == theirs(pre).encode(PROSE + AWKWARD, add_special_tokens=False).ids


def test_smollms_ids_are_transformers_where_no_digit_follows_two_blanks(vocabulary, theirs):
    """transformers 5 splits as GPT-2 there, the published tokenizer takes all numerals out first: what stands before
    them may be cut elsewhere."""
    ours = byte_level(vocabulary.tokens, vocabulary.merges, vocabulary.kinds, "smollm", "x")
    text = re.sub(r"\s+(?=\d)", " ", PROSE + AWKWARD.replace("²½ Ⅷ", ""))
    ids = encode(ours, text).tolist()
    assert len(ids) > 30_000
    assert ids == theirs("smollm").encode(text, add_special_tokens=False).ids
    words = [vocabulary.tokens[i] for i in encode(ours, "a   12").tolist()]
    assert words == ["a", "ĠĠĠ", "1", "2"]


def test_qwens_normal_form_is_transformers(vocabulary):
    transformers = pytest.importorskip("transformers", reason="the reference")
    pairs = [tuple(merge.split(" ")) for merge in vocabulary.merges]
    reference = transformers.Qwen2Tokenizer(vocab={t: i for i, t in enumerate(vocabulary.tokens)}, merges=pairs)
    ours = byte_level(vocabulary.tokens, vocabulary.merges, [NORMAL] * 49152, "qwen2", "x")
    for text in (AWKWARD, "e\u0301a"):
        assert ours.encode(text).ids == reference(text, add_special_tokens=False)["input_ids"]
    with pytest.raises(ValueError, match="from character 4 on it has 'éa' for 'e\u0301a'.*normal form C"):
        encode(ours, "abc e\u0301a")


@pytest.mark.parametrize("pre", tokens.SPLITS)
def test_any_text_comes_back(pre):
    cutter = small(pre)
    for text in (AWKWARD, PROSE[:20_000], "lo lo", "<|end|>", " ", "\n"):
        ids = encode(cutter, text)
        assert ids.dtype == torch.int64 and ids.dim() == 1
        assert cutter.decode(ids.tolist(), skip_special_tokens=False) == text


def test_merges_and_special_tokens_are_used():
    cutter = small()
    at = cutter.token_to_id
    expected = [at(token) for token in ("lo", "Ġlo", "<|end|>", "<tool>", "lo")]
    assert encode(cutter, "lo lo<|end|><tool>lo").tolist() == expected
    assert cutter.decode([at("lo"), at("<|end|>"), at("<tool>")], skip_special_tokens=True) == "lo<tool>"


@pytest.mark.parametrize("text, words", [("", "the text is empty"), ("a\ud800b", "surrogate pair at character 1")])
def test_no_text(text, words):
    with pytest.raises(ValueError, match=words):
        encode(small(), text)


def test_without_a_tokenizer():
    with pytest.raises(ValueError, match="has no tokenizer.*give token ids"):
        encode(None, "text")


def test_a_tokenizer_that_loses_text_is_refused_with_the_place():
    cutter = small()
    cutter.normalizer = tokenizers.normalizers.Lowercase()
    with pytest.raises(ValueError, match="from character 4 on it has 'xy' for 'Xy'"):
        encode(cutter, "abc Xy")
    cutter.normalizer = tokenizers.normalizers.Strip()
    with pytest.raises(ValueError, match="from character 3 on it has '' for '  '"):
        encode(cutter, "abc  ")


@pytest.mark.parametrize("changes, words", [
    (dict(pre="tekken"), "splits text as 'tekken'.*supported: gpt-2, smollm, llama-bpe, qwen2.*tokenizer=False"),
    (dict(pre=""), "not stated"),
    (dict(merges=["l o o"]), "a merge of other than two tokens"), (dict(merges=["lo"]), "a merge of other than"),
    (dict(merges=["l q"]), "do not fit its vocabulary"), (dict(more=["lo"]), "a token twice"),
])
def test_a_vocabulary_that_cannot_be_used(changes, words):
    with pytest.raises(ValueError, match="small.gguf: .*" + words):
        small(**changes)


def test_a_file_gives_the_same_tokenizer_and_its_cutting_is_switched_off(tmp_path):
    cutter = small()
    ids = encode(cutter, AWKWARD).tolist()
    cutter.enable_truncation(4)
    cutter.enable_padding(length=500)
    cutter.save(str(tmp_path / "tokenizer.json"))
    assert encode(tokens.from_file(tmp_path / "tokenizer.json"), AWKWARD).tolist() == ids


@pytest.mark.parametrize("content", ["", "{}", "[1]", json.dumps({"version": "1.0", "model": {"type": "BPE"}}), "\0"])
def test_a_file_that_is_no_tokenizer(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="tokenizer.json is not a tokenizer.json"):
        tokens.from_file(path)


def test_a_tokenizer_that_is_no_file(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        tokens.from_file(tmp_path / "none.json")
    with pytest.raises(ValueError, match="not a regular file"):
        tokens.from_file(Path(tmp_path))


def test_without_the_package(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"pip install 'kvlab\[models\]'"):
        tokens.from_file(tmp_path / "tokenizer.json")


def test_a_shared_run_is_found_wherever_it_stands():
    ids = torch.arange(100)
    other = torch.cat([torch.arange(200, 250), ids[40:72]])
    assert shared_run(ids, other, 32) and shared_run(other, ids, 32)
    assert not shared_run(ids, other, 33) and not shared_run(ids, other[:-1], 32)
    assert shared_run(ids, ids[99:], 1) and not shared_run(ids, ids[:0], 1)
    assert not shared_run(ids, ids.flip(0), 2), "the order counts"
