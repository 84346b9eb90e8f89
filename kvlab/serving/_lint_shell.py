"""Command lines that start an engine, wherever a text holds them, and the flags they are given.

A flag is taken only from a command whose engine is known: `vllm serve`, `python -m sglang.launch_server`,
`text-generation-launcher`, `llama-server`, or what follows an engine's container image. All else that looks like a
flag belongs to somebody else.
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

from kvlab.serving._lint_mention import Mention

MAX_COMMANDS = 1000                                          # of one line: each is looked at with all that is before it
SERVE, BENCH, ANY = ("serve",), ("serve", "bench"), ("serve", "bench", "other", "diffusion")
START = r"(?<![\w./-])"
COMMANDS = [                                                 # (pattern, engine, scopes of its flags)
    (START + r"vllm\s+serve\b", "vllm", SERVE),
    (START + r"vllm\s+bench\b", "vllm", BENCH),
    (START + r"vllm\s+(?:chat|complete|run-batch|launch)\b(?=\s+-)", "vllm", ANY),
    (r"-m\s+vllm\.entrypoints\.(?:openai\.)?api_server\b", "vllm", SERVE),
    (r"-m\s+vllm\.entrypoints\.[\w.]+", "vllm", ANY),
    (r"-m\s+sglang\.launch_server\b", "sglang", ANY),
    (START + r"sglang\s+serve\b", "sglang", ANY),
    (START + r"text-generation-launcher\b", "tgi", SERVE),
    (START + r"trtllm-serve\b", "tensorrt_llm", SERVE),
    (r"(?<![\w-])llama-server(?:\.exe)?(?![\w-])", "llama.cpp", SERVE)]
IMAGES = [(r"(?:(?<![\w.-])|(?<=:-))(?:[\w.-]+/){0,6}vllm/vllm-(?:openai|cpu|tpu)[\w-]*(?:[:@][\w.:-]+)?", "vllm",
           SERVE),
          (r"(?<![\w.-])(?:ghcr\.io/)?huggingface/text-generation-inference(?:[:@][\w.:-]+)?", "tgi", SERVE),
          (r"(?<![\w.-])ghcr\.io/[\w-]+/llama\.cpp:server[\w.-]*", "llama.cpp", SERVE)]
COMMAND = re.compile("|".join(f"(?P<c{i}>{pattern})" for i, (pattern, _, _) in enumerate(COMMANDS + IMAGES)))
TAGGED = re.compile(r"(?:vllm/(?P<vllm>vllm-(?:openai|cpu|tpu)[\w-]*)|lmsysorg/(?P<sglang>sglang)|"
                    r"huggingface/(?P<tgi>text-generation-inference))\b[\"']?"
                    r"(?:(?::|\s+tag:\s*[\"']?)v?(?P<version>\d+\.\d+[\w.]*)?|(?=[\s@\"']|$))")
RUN = re.compile(r"\b(?:docker|podman|nerdctl|apptainer|singularity)\s+(?:container\s+)?run\b(?!.*\s--entrypoint[\s=])")
END = re.compile(r"\|\||&&|[|;`]|\s&(?=\s|$)|\s>{1,2}\s|\s2>|(?<=\s)#|(?<![\w=,{:\[-])\)|</|\s--\s|。|，")
FLAG = re.compile(r"(?<![^\s\"'(\[,])(--[A-Za-z][A-Za-z0-9_.-]*[A-Za-z0-9])(?=$|[=\s\"',.:)\]\\])")
NEXT_COMMAND = re.compile(r"(?<![\w./-])(?:curl|python3?|docker|git|pip|uv|sudo|export|helm|kubectl)\s")


def logical_lines(text: str, line: int) -> Iterator[tuple[int, str, list[int]]]:
    """Lines with what a trailing backslash continues joined on; with the line number of every character."""
    rows = text.split("\n")
    index = 0
    while index < len(rows):
        first, joined, numbers = index, "", []
        while True:
            row = rows[index]
            more = bool(re.search(r"\\\s*$", row)) and index + 1 < len(rows)
            row = re.sub(r"\\\s*$", " ", row) if more else row
            joined += row
            numbers += [line + index] * len(row)
            index += 1
            if not more:
                break
        yield line + first, joined, numbers + [line + index - 1]


def engine_of(match: re.Match) -> tuple[str, tuple[str, ...]]:
    """Engine and scopes of a match of COMMAND."""
    _, engine, scopes = (COMMANDS + IMAGES)[int(match.lastgroup[1:])]
    return engine, scopes


def releases(text: str) -> dict[str, list[str]]:
    """Of each engine the releases that the tags of its images in a text name; "" for `latest`, a digest or no tag."""
    found: dict[str, list[str]] = {}
    for match in TAGGED.finditer(text):
        engine = next(name for name in ("vllm", "sglang", "tgi") if match[name])
        version = re.match(r"\d+(\.\d+)*(\.?(post|rc)\d+)?", match["version"] or "")
        found.setdefault(engine, []).append(version[0] if version else "")
    return found


def _image(match: re.Match) -> bool:
    return int(match.lastgroup[1:]) >= len(COMMANDS)


def flags_of(text: str, engine: str, scopes: tuple[str, ...], line_of) -> list[Mention]:
    """The long flags of the rest of one command."""
    return [Mention("flag", match.group(1), line_of(match.start(1)), engine, scopes) for match in FLAG.finditer(text)]


def flags_before_end(text: str, whose: tuple[str, tuple[str, ...]], numbers: list[int], start: int = 0
                     ) -> list[Mention]:
    """The long flags of a command's rest up to where another command begins. numbers: each character's line, that of
    the first at `start`."""
    for limit in (END, NEXT_COMMAND):
        if cut := limit.search(text):
            text = text[:cut.start()]
    return flags_of(text, *whose, line_of=lambda at: numbers[start + at])


def commands(text: str, line: int | list[int]) -> list[Mention]:
    """Flags of every engine command in a text. line: of its first row, or of each character of a text in one row."""
    found = []
    for _, joined, numbers in [(0, text, line)] if isinstance(line, list) else logical_lines(text, line):
        matches = list(islice(COMMAND.finditer(joined), MAX_COMMANDS))
        for index, match in enumerate(matches):
            start, stop = match.end(), matches[index + 1].start() if index + 1 < len(matches) else len(joined)
            rest = joined[start:stop]
            if _image(match) and not (RUN.search(joined[:match.start()]) and re.match(r"[\"']?\s+-", rest)):
                continue                                     # pulled, built or given a command of its own
            if (quote := joined[match.start() - 1:match.start()]) in ("'", '"') and quote in rest:
                rest = rest[:rest.index(quote)]
            found += flags_before_end(rest, engine_of(match), numbers, start)
    return found


def arguments(words: list[tuple[str, int]]) -> list[Mention]:
    """Flags of a command given as a list of words, each with its line: subprocess.run(["vllm", "serve", …])."""
    joined = " ".join(word for word, _ in words)
    match = COMMAND.search(joined)
    if not match or (_image(match) and not RUN.search(joined[:match.start()])):
        return []
    engine, scopes = engine_of(match)
    found, at = [], 0
    for word, line in words:
        flag = FLAG.match(word)
        if at >= match.start() and flag:
            found.append(Mention("flag", flag.group(1), line, engine, scopes))
        at += len(word) + 1
    return found


def dockerfile(text: str) -> list[Mention]:
    """Flags in the JSON forms of ENTRYPOINT and CMD; whose: the command in them, else the image they are FROM."""
    found, base, entry = [], None, ""
    for _, joined, numbers in logical_lines(text, 1):
        instruction = re.match(r"\s*(FROM|ENTRYPOINT|CMD)\s", joined, re.I)
        match = COMMAND.search(joined)
        if not instruction:
            continue
        if instruction[1].upper() == "FROM":
            base, entry = engine_of(match) if match else None, ""
        elif not match and (words := re.sub(r"[\s\"',\[\]]+", " ", joined)) and "[" in joined:
            match = COMMAND.search(f"{entry} {words}")
            whose = engine_of(match) if match else base if not entry else None
            found += flags_of(joined, *whose, line_of=numbers.__getitem__) if whose else []
            entry = words if instruction[1].upper() == "ENTRYPOINT" else entry
    return found
