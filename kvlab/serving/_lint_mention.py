"""What a name linter has found in a file before any table is asked: one name, where, and whose it seems to be."""
from __future__ import annotations

import re
from dataclasses import dataclass, replace

ENV = re.compile(r"(?<![A-Za-z0-9_.=])(VLLM|SGLANG|SGL|LLAMA_ARG)_[A-Z0-9]+(?:_[A-Z0-9]+)*"
                 r"(?![A-Za-z0-9_*<{(]|-[A-Za-z])")
ENV_ENGINES = {"VLLM": "vllm", "SGLANG": "sglang", "SGL": "sglang", "LLAMA_ARG": "llama.cpp"}
CALLABLES = {"LLM": ("vllm", "LLM"), "EngineArgs": ("vllm", "EngineArgs"), "SamplingParams": ("vllm", "SamplingParams"),
             "AsyncEngineArgs": ("vllm", "AsyncEngineArgs"), "PoolingParams": ("vllm", "PoolingParams"),
             "AsyncLLM": ("vllm", "AsyncLLM"), "AsyncLLMEngine": ("vllm", "AsyncLLM"),
             "Engine": ("sglang", "Engine"), "ServerArgs": ("sglang", "Engine")}
STRAIGHT = str.maketrans({"“": '"', "”": '"', "„": '"', "«": '"', "»": '"', "‘": "'", "’": "'"})
DEFAULT = re.compile(r"\b([A-Z][A-Z0-9_]+)(?:=|:[ \t])[\"']?\$\{?\1\b")
WHERE = re.compile(r"_(URL|URI|BASE|ENDPOINT|HOST|ADDR|ADDRESS|SERVER|MODEL|MODELS|IMAGE|TAG|VERSION|COMMIT|NAME)$"
                   r"|^[A-Z]+_(TEST|CI)_")


@dataclass(frozen=True, slots=True)
class Mention:
    """One name in a file.

    engine: whose it is, "" where only the rest of the file can tell, "other" where it is none that has a table.
    scopes: of a keyword argument its callable, of a flag the subcommands it may belong to. own: the file itself gives
    the name a meaning (a variable it reads, a rule it records). promql: it stands where series are selected.
    """
    kind: str
    name: str
    line: int
    engine: str = ""
    scopes: tuple[str, ...] = ()
    own: bool = False
    promql: bool = False


def moved(mention: Mention, line: int) -> Mention:
    """The mention in a text whose first line is `line` of the file."""
    return replace(mention, line=line + mention.line - 1)


def environment(text: str, line: int) -> list[Mention]:
    """Variables with an engine's prefix anywhere in a text; what it refers to with `$` is its own.

    So is what names a place (VLLM_BASE_URL, VLLM_IMAGE) or a test's setting: clients and scripts call their own that.
    A variable's own default (VLLM_X=${VLLM_X:-1}) is no use of it: it goes on to the engine.
    """
    referred = set(re.findall(r"\$\{?([A-Z][A-Z0-9_]+)", DEFAULT.sub("", text)))
    found = []
    for number, row in enumerate(text.split("\n"), line):
        for match in ENV.finditer(row):
            before, after = row[max(0, match.start() - 40):match.start()], row[match.end():match.end() + 3]
            own = (match.group() in referred or bool(WHERE.search(match.group()) or re.search(r"(^|\s)ARG\s+$", before))
                   or (after == " = " and not row[:match.start()].strip()))
            found.append(Mention("env", match.group(), number, ENV_ENGINES[match.group(1)], own=own))
    return found
