"""From what a person gives for a model to its ModelSpec: a file, a folder, a catalogue id, an id in the local cache."""
from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from kvlab.catalog._files import CONFIG_LIMIT
from kvlab.catalog.config import read_config
from kvlab.catalog.gguf_file import read_gguf
from kvlab.catalog.models import model as catalogued
from kvlab.catalog.safetensors_file import INDEX, Weights, has_weights, read_weights, stated_bytes
from kvlab.hushed import hushed
from kvlab.shapes import ModelSpec

GIVE = ("a name from `kvlab ls models`, a config.json or a folder with one, a .gguf file, or the id of a model in the "
        "local Hugging Face cache")


def model(text: str, *, download: bool = False) -> ModelSpec:
    """The model that a text stands for: an existing path, else a catalogue name, else an id in the local hub cache.

    Path: a config.json, a folder with one (safetensors beside it give the parameters), a .gguf file.
    download: fetch the config.json of an id that neither the catalogue nor the cache has, and nothing else.
    Refuses an unknown name with KeyError, a near match and what may be given; what a file does not say with ValueError.
    """
    if not text.strip():
        raise ValueError(f"no model is given; give {GIVE}")
    path = Path(os.path.expanduser(text))
    if os.path.lexists(path):
        return _of_path(path)
    try:
        return catalogued(text)
    except KeyError as unknown:
        if _is_path(text):
            raise ValueError(f"{text} does not exist; give {GIVE}") from None
        if "could be any of" in str(unknown) or text.count("/") != 1:
            raise KeyError(f"{unknown.args[0]}. What may be given: {GIVE}") from None
        return _of_hub(text, download, str(unknown.args[0]))


def _is_path(text: str) -> bool:
    return text.startswith((".", "/", "~", "\\")) or text.endswith((".json", ".gguf", ".safetensors")) or (
        text.count("/") > 1 or "\\" in text)


def _of_path(path: Path) -> ModelSpec:
    if path.is_dir():
        if not os.path.lexists(path / "config.json"):
            files = sorted(path.glob("*.gguf"))
            if len(files) == 1:
                return read_gguf(files[0])
            raise ValueError(f"{path} has no config.json, which says how the layers cache; give {GIVE}")
        return _with_weights(read_config(path / "config.json"), path)
    if path.suffix.lower() == ".gguf":
        return read_gguf(path)
    if path.name.endswith((".safetensors", ".safetensors.index.json")):
        return _of_safetensors(path)
    return _with_weights(read_config(path), path.parent if path.name == "config.json" else None)


def _of_safetensors(path: Path) -> ModelSpec:
    if re.search(r"-\d+-of-\d+\.safetensors$", path.name):
        path = path.parent / INDEX
    weights, config = read_weights(path), path.parent / "config.json"
    if not os.path.lexists(config):
        params = "an unknown number of" if weights.params is None else f"{weights.params:,}"
        raise ValueError(f"{path} holds {params} parameters in {weights.nbytes or 0:,} bytes, and does not say how the "
                         "layers cache: config.json is missing beside it; give a folder that has both")
    return _weighed(read_config(config), weights, path.name)


def _weighed(spec: ModelSpec, weights: Weights, where: str) -> ModelSpec:
    if weights.nbytes is None:
        return replace(spec, assumed=(*spec.assumed, f"parameters and weights unknown: {where} holds no tensors"))
    return replace(spec, params=weights.params, weight_bytes=weights.nbytes, source=f"{spec.source}; weights: {where}")


def _with_weights(spec: ModelSpec, folder: Path | None) -> ModelSpec:
    """The spec with the parameters and stored bytes of the safetensors in the folder, if there are any."""
    if folder is None:
        return spec
    if not has_weights(folder):
        lone = any(folder.glob("*.safetensors"))
        why = "the safetensors beside it are not counted: an index of shards is missing"
        return replace(spec, assumed=(*spec.assumed, why)) if lone else spec
    try:
        weights = read_weights(folder)
    except ValueError as error:                 # an unfinished download: the layers are known all the same
        if stated := stated_bytes(folder):
            return replace(spec, weight_bytes=stated, assumed=(*spec.assumed, "the weights' bytes are those that the "
                                                               f"index of shards states ({error})"))
        return replace(spec, assumed=(*spec.assumed, f"the weights beside it are not counted: {error}"))
    return _weighed(spec, weights, "safetensors headers beside it")


def in_hub_cache(name: str, unknown: str) -> Path | None:
    """The config.json of a hub id in the local cache (HF_HUB_CACHE, HF_HOME); None where it is not there.

    KeyError, beginning with `unknown`, where the package that knows the cache is not installed.
    """
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        raise KeyError(f"{unknown}. The local Hugging Face cache was not looked at: it needs the package "
                       "huggingface-hub (pip install 'kvlab[models]')") from None
    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:                      # of a text that cannot be an id
        raise KeyError(f"{unknown}. No id of the Hugging Face hub is spelled like that either. "
                       f"What may be given: {GIVE}") from None
    return Path(found) if isinstance(found, str) else None


def _of_hub(name: str, download: bool, unknown: str) -> ModelSpec:
    """A model by its hub id, from the local cache; with download, config.json is fetched."""
    found = in_hub_cache(name, unknown)
    if found is None:
        if not download:
            raise KeyError(f"{unknown}. It is not in the local Hugging Face cache either; --download fetches its "
                           f"config.json. What may be given: {GIVE}")
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
        try:
            stated = get_hf_file_metadata(hf_hub_url(name, "config.json")).size or 0
            if stated > CONFIG_LIMIT:               # anybody may upload one: said before it is on the disk
                raise ValueError(f"the hub states {stated:,} bytes, and kvlab reads {CONFIG_LIMIT:,} of one")
            found = Path(hf_hub_download(name, "config.json"))
        except Exception as error:          # of the hub's and of its HTTP library's types, none of which is a base here
            first = hushed((str(error).strip() or repr(error)).splitlines()[0])[:200]      # it may quote the address
            raise OSError(f"the config.json of {name!r} could not be fetched ({first}); give {GIVE}") from None
    spec = _with_weights(read_config(found), found.parent)
    return replace(spec, name=name, source=f"{name} in the local Hugging Face cache, {spec.source.partition(', ')[2]}")
