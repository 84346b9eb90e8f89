"""From the model named in a server's log to its layers: catalogue ids, aliases, quantised forks, short forms.

A name is matched, never derived: where it names no catalogued model, or could be models that cache differently, there
is none, and the caller says so. Bytes per token are not looked at.
"""
from __future__ import annotations

import re
from functools import cache

from kvlab.catalog.models import aliases, models
from kvlab.shapes import ModelSpec

# Words of a name that change the weights' storage or their training, not how the model caches.
_QUALIFIER = re.compile(
    r"gguf|gptq|awq|exl[23]|bnb|hqq|autoround|auto|round|int[48]|fp(4|8|16|32)|f16|bf16|nvfp4|mxfp[48]|nf4|\d+bit|"
    r"w\d+a\d+|quanti[zs]ed.*|i?q\d(_?[a-z0-9])*|ud|imatrix|i1|xl|dynamic|block|instruct|chat|it|hf|"
    r"base|pt|original|class|model|mtp|resharded|sym|g\d+|bits?|compressed|tensors|marlin|thinking|noreasoning|"
    r"abliterated|uncensored|dequantised|dequantized|total|swa|pool|layers|latest|draft|eagle3?|speculative|qat")
_SIZE_LEFT = re.compile(r"(-?(a\d+(\.\d+)?b|\d+(\.\d+)?b|\d+e|\d{4}|v?\d+(\.\d+)?))+")
_SIZED = re.compile(r"\d+(\.\d+)?[bm](?![a-z])")
_LONGEST = 12                   # words of a base that another name holds; in the catalogue 6 at most
_NO_NAME = re.compile(r"not (in|stated|given|named)|unnamed|unknown|\bname\b", re.I)


def _tokens(name: str) -> list[str]:
    """The name's words in lower case without owner and qualifiers: "TheBloke/Llama-2-7B-GPTQ" -> llama, 2, 7b."""
    last = name.strip().rstrip("/").rpartition("/")[2].rpartition("--")[2].lower()
    last = re.sub(r"\.(gguf|safetensors|bin)$", "", last)
    words = [word for word in re.split(r"[-_\s+,:;()~]+", last) if word]
    kept, n = [], 0
    while n < len(words):
        if re.fullmatch(r"i?q\d", words[n]):                # q4_k_m, iq4_xs: the letters behind belong to it
            n += 1
            while n < len(words) and re.fullmatch(r"k|m|s|l|xs|xxs|xl|nl|\d", words[n]):
                n += 1
            continue
        if not _QUALIFIER.fullmatch(words[n].partition(".w")[0] if words[n].startswith("quant") else words[n]):
            kept.append(words[n])
        n += 1
    if len(kept) > 1 and kept[0] in ("meta", "nvidia", "unsloth", "openai", "ibm"):
        kept = kept[1:]
    return kept


def _key(words: list[str]) -> str:
    """One word for names that differ in where the dashes are: "llama3-8b", "Llama-3-8B". Digits stay apart."""
    joined = ""
    for word in words:
        apart = joined[-1:].isdigit() and word[:1].isdigit()
        joined += ("-" if apart else "") + word
    return joined


@cache
def _index() -> dict[str, list[ModelSpec]]:
    every = models()
    index: dict[str, list[ModelSpec]] = {}
    for name, target in [*((name, name) for name in every), *aliases().items()]:
        plain = {_key(_tokens(name)), _key(re.split(r"[-_\s]+", name.rpartition("/")[2].lower()))}
        for key in plain | {key.replace(".", "-") for key in plain}:        # "llama-3-1-70b" is meant as 3.1
            found = index.setdefault(key, [])
            if every[target] not in found:
                found.append(every[target])
    return index


def _one(specs: list[ModelSpec]) -> ModelSpec | None:
    """The spec if all of them cache alike."""
    return specs[0] if specs and all(spec.layers == specs[0].layers for spec in specs) else None


def _match(name: str) -> ModelSpec | None:
    words, index = _tokens(name), _index()
    if len(words) > 1 and _key(words) not in index and re.fullmatch(r"\d{4}", words[-1]):
        words = words[:-1]                                  # a date: "DeepSeek-V4-Flash-0731"
    key = _key(words)
    if not key:
        return None
    if key in index:
        return _one(index[key])
    # The active experts or a date are left out: "qwen3-235b" is Qwen3-235B-A22B-Instruct-2507, if nothing else is.
    longer = [spec for known, specs in index.items() if known.startswith(key) and _SIZE_LEFT.fullmatch(known[len(key):])
              for spec in specs] if _SIZED.search(key) else []
    if longer:
        return _one(longer)
    # A fine-tune that names its base in full, size included: "Hermes-3-Llama-3.1-8B". The longest name counts.
    for length in range(min(len(words) - 1, _LONGEST), 0, -1):
        inside = {_key(words[at:at + length]) for at in range(len(words) - length + 1)}
        specs = [spec for part in sorted(inside) if _SIZED.search(part) and not _SIZED.fullmatch(part)
                 for spec in index.get(part, [])]
        if specs:
            return _one(specs)
    return None


def find_model(model: str, arch: str) -> tuple[ModelSpec | None, str]:
    """The catalogue's model of a table's `model` and `arch` cells, and why there is none or what the match rests on.

    Words in parentheses are remarks, unless nothing else names a model and they do not say that the name is missing.
    """
    bare = re.sub(r"\([^)]*\)", " ", model).strip()
    for name in (bare, bare.split(" + ")[0], bare.split("/")[0]):      # "DeepSeek-V3/R1 class": alternatives
        if name and not _NO_NAME.search(name) and (spec := _match(name)):
            return spec, ""
    bare_arch = re.sub(r"\([^)]*\)", " ", arch).strip()
    if bare_arch and (spec := _match(bare_arch)):
        return spec, "" if bare else f"named by its architecture only ({bare_arch})"
    for inside in re.findall(r"\(([^)]*)\)", model):
        if not _NO_NAME.search(inside) and "infer" not in inside.lower() and (spec := _match(inside)):
            return spec, f"its base is named in parentheses ({inside})"
    if not bare and not bare_arch:
        return None, "the model is not named, and is never guessed from bytes per token"
    return None, (f"no catalogued architecture is called {bare or bare_arch!r:.80}; add a row to data/models.csv, or "
                  "an alias")
