"""Text to token ids and back: tokenizers from a tokenizer.json or from a GGUF's vocabulary, by the package tokenizers.

Only ways to split text that were compared with transformers' own are built from a GGUF; others are refused.
"""
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvlab.catalog._facts import plain
from kvlab.catalog._files import INDEX_LIMIT, bytes_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# How text is split before merging, by tokenizer.ggml.pre. Source: the public tokenizer.json of GPT-2, SmolLM2, Llama 3
# and Qwen2. A pattern of None is GPT-2's, which ByteLevel has built in.
_LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
           r"|\s+(?!\S)|\s+")
SPLITS = {"gpt-2": None, "smollm": None, "llama-bpe": _LLAMA3, "qwen2": _LLAMA3.replace("{1,3}", "")}
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4         # kinds of token that GGUF distinguishes


def encode(tokenizer: Tokenizer | None, text: str) -> torch.Tensor:
    """The token ids of a text, [T] int64, without the special tokens that some tokenizers put around it.

    ValueError: no tokenizer, an empty text, or one that the tokenizer does not give back as it was, whose ids would
    stand for another text; the first place that differs is named.
    """
    if tokenizer is None:
        raise ValueError("this model has no tokenizer: none lay beside its weights, or it was loaded without; give "
                         "token ids instead of text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text holds half a surrogate pair at character {error.start}, which is no text; read the "
                         "file as UTF-8") from None
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    back = tokenizer.decode(ids, skip_special_tokens=False)
    if back != text:
        at = next((i for i, (a, b) in enumerate(zip(text, back)) if a != b), min(len(text), len(back)))
        raise ValueError(f"the tokenizer does not give the text back: from character {at} on it has "
                         f"{back[at:at + 20]!r} for {text[at:at + 20]!r}; another tokenizer, or a text in Unicode's "
                         "normal form C, may do")
    if not ids:
        raise ValueError("the text is empty; it needs at least one token")
    return torch.tensor(ids)


def shared_run(ids_T: torch.Tensor, other_T: torch.Tensor, length: int) -> bool:
    """Whether two texts, token ids in one dimension, have `length` tokens in a row in common, wherever they stand."""
    if min(len(ids_T), len(other_T)) < length:
        return False
    runs, others = (map(tuple, x.unfold(0, length, 1).tolist()) for x in (ids_T, other_T))
    return not set(runs).isdisjoint(others)


def from_file(path: Path) -> Tokenizer:
    """The tokenizer in a tokenizer.json. It neither cuts nor pads, whatever the file asks for.

    ValueError where the file is not one, or for want of the package tokenizers.
    """
    library = _library()
    data = bytes_of(path, "a tokenizer.json", INDEX_LIMIT)
    try:
        tokenizer = library.Tokenizer.from_buffer(data)
    except Exception as error:                  # the library raises plain Exception
        raise ValueError(f"{path} is not a tokenizer.json ({plain(str(error))})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def byte_level(tokens: list[str], merges: list[str], kinds: list[int], pre: str, where: str) -> Tokenizer:
    """Byte-level BPE from a vocabulary in the order of its ids, as GGUF files hold it.

    kinds: per token NORMAL, CONTROL, USER_DEFINED or another; the two latter are found in a text before it is split.
    pre: one of SPLITS. where: names the file in sentences. ValueError: another pre, tokens that come twice, a merge of
    what is no token.
    """
    library = _library()
    if pre not in SPLITS:
        raise ValueError(f"{where}: it splits text as {plain(pre) or 'not stated'!r} (tokenizer.ggml.pre), which kvlab "
                         f"has not compared with the original; supported: {', '.join(SPLITS)}; "
                         "load(…, tokenizer=False) loads the weights alone")
    vocab = {token: number for number, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if len(vocab) != len(tokens) or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"{where}: its vocabulary has a token twice, or a merge of other than two tokens")
    try:
        model = library.models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe")
    except Exception as error:
        raise ValueError(f"{where}: its merges do not fit its vocabulary ({plain(str(error))})") from error
    tokenizer = library.Tokenizer(model)
    if pre == "qwen2":
        tokenizer.normalizer = library.normalizers.NFC()
    tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence(_splitters(library, pre))
    tokenizer.decoder = library.decoders.ByteLevel()
    tokenizer.add_special_tokens([library.AddedToken(token, special=True, normalized=False)
                                  for token, kind in zip(tokens, kinds) if kind == CONTROL])
    tokenizer.add_tokens([library.AddedToken(token, special=False, normalized=False)
                          for token, kind in zip(tokens, kinds) if kind == USER_DEFINED])
    return tokenizer


def _splitters(library, pre: str) -> list:
    byte_level = library.pre_tokenizers.ByteLevel
    if SPLITS[pre] is not None:
        split = library.pre_tokenizers.Split(library.Regex(SPLITS[pre]), behavior="isolated")
        return [split, byte_level(add_prefix_space=False, use_regex=False)]
    digits = [library.pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    return [*digits, byte_level(add_prefix_space=False, use_regex=True)]


def _library():
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.normalizers
        import tokenizers.pre_tokenizers
    except ImportError:
        raise ValueError("text is cut into tokens by the package tokenizers, which is not installed; "
                         "pip install 'kvlab[models]'") from None
    return tokenizers
