"""Text without what could be a secret: for what is stored or shown, such as a run's command line or an error."""
from __future__ import annotations

import os
import re
from collections.abc import Iterable

HIDDEN = "HIDDEN"                               # a word, so that a URL stays one for `portable`
# names of what is a secret; not "tokens" (a number of them), not "token_env" (the name of a variable)
_NAME = (r"(?:[\w.-]{0,40}[-_.])?(?:token|api[-_]?key|access[-_]?key|secret|password|passwd|pwd|authorization|signature"
         r"|sig)")
_LOOKS = (
    (re.compile(r"(?<=://)[^/\s?#'\"]*@"), f"{HIDDEN}@"),                             # user:password@host
    (re.compile(r"(?<![\w@/:.-])[\w.-]{1,80}:[^\s/@'\":]{1,200}@(?=[\w\[])"), f"{HIDDEN}@"),   # user:token@host:6379
    (re.compile(rf"(?i)((?:[?&;#]|(?<!-)--?){_NAME}=)[^&\s'\"#]+"), rf"\1{HIDDEN}"),        # ?token=…, --token=…
    (re.compile(rf"(?i)((?<!-)--{_NAME} )(?!-)\S+"), rf"\1{HIDDEN}"),
    (re.compile(r"(?i)\b((?:authorization|x-api-key)['\"]?\s*[:=]\s*['\"]?(?:(?:bearer|basic|token) )?|bearer )"
                r"[^\s'\",]+"), rf"\1{HIDDEN}"),
    (re.compile(r"\b(?:hf_|sk-|gh[opsu]_|github_pat_|glpat-|nvapi-)[A-Za-z0-9_-]{16,}"), HIDDEN),   # as given out
)
_OPTION = re.compile(rf"(?i)--?{_NAME}")
_VARIABLE = re.compile(r"(?i)(?:(?:^|_)(?:TOKEN|SECRET|PAT)|PASSWORD|PASSWD|(?:API|ACCESS|SECRET|PRIVATE)_?KEY)$")
SHORTEST = 8                    # characters of a variable's value that is looked for: shorter ones are words


def hushed(text: str) -> str:
    """The text with HIDDEN for credentials in URLs, tokens of queries, options, headers, and what looks like a token.

    The value of an environment variable named like a secret (HF_TOKEN, KVLAB_TOKEN, …) is hidden wherever it stands.
    """
    for name, value in os.environ.items():
        if len(value) >= SHORTEST and _VARIABLE.search(name):
            text = text.replace(value, HIDDEN)
    for look, instead in _LOOKS:
        text = look.sub(instead, text)
    return text


def hushed_words(words: Iterable[str]) -> list[str]:
    """A command's words, each hushed; what follows an option such as --token is hidden whole."""
    told: list[str] = []
    secret = False
    for word in words:
        told.append(HIDDEN if secret and not word.startswith("-") else hushed(word))
        secret = _OPTION.fullmatch(word) is not None
    return told
