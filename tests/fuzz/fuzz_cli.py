"""The command line as a target, through kvlab's own `main`: every verb parsed and none run; the cheap ones run."""
from __future__ import annotations

import contextlib
import functools
import io
import re
import shlex
import sys
from pathlib import Path
from unittest.mock import patch

from fuzz_targets import Target

RUN = {"size", "plan"}
HEAVY = {"variants", "probes", "studies", "figures", "metrics", "texts"}        # lists that import torch
MOST = 1100                     # characters of what is said of wrong use


class Refused(ValueError):
    """Exit code 2, and what was said."""


@functools.cache
def _command_line(run: bool):
    """kvlab's command line; without `run` its verbs do nothing."""
    import typer

    from kvlab.cli import app
    group = typer.main.get_command(app)
    for command in group.commands.values() if not run else ():
        command.callback = lambda **values: None
    return group


def _arguments(path: Path) -> list[str]:
    """One argument a line; none that would fetch something or install a completion, or names a file elsewhere.

    What a user names is read, wherever it is: a model's file may be anywhere.
    """
    text = path.read_bytes().replace(b"\0", b"").decode("utf-8", "surrogateescape")
    left_out = re.compile(r"--(download|install|show-comp)|(.*=)?[/~]|(.*[/\\])?\.\.([/\\]|$)", re.S)
    return [one for one in text.split("\n") if not left_out.match(one)]


def _main(given: list[str], run: bool) -> None:
    """kvlab's `main`: it ends with 0, 1 or 2 (Refused), and with 2 it has said one printable line, not too long."""
    from kvlab import cli
    code, out, err = None, io.StringIO(), io.StringIO()
    with (patch.object(sys, "argv", ["kvlab", *given]), contextlib.redirect_stdout(out),
          contextlib.redirect_stderr(err),
          patch.object(cli, "app", functools.partial(_command_line(run), prog_name="kvlab"))):
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
    assert code in (None, 0, 1, 2), f"ends with {code!r}"
    shown = out.getvalue() + err.getvalue()
    steers = any(ord(c) < 32 and c not in "\n\t" or 0x7f <= ord(c) < 0xa0 for c in shown)
    assert not steers, f"steers a terminal: {shown!r:.99}"
    if code == 2:
        *warnings, said = err.getvalue().removesuffix("\n").split("\n")
        assert said.startswith("kvlab: ") and all(one.startswith("kvlab: warning: ") for one in warnings), (
            f"says no single line: {err.getvalue()!r:.200}")
        assert len(said) <= MOST, f"says {len(said):,} characters: {said:.200}"
        raise Refused(said[:900])


def _parsed(path: Path) -> None:
    _main(_arguments(path), run=False)


def _run(path: Path) -> None:
    """A verb of RUN or a cheap list, with whatever arguments."""
    given = _arguments(path)
    if given[:1] == ["ls"] and not HEAVY & set(given) or given[:1] and given[0] in RUN:
        _main(given, run=True)


def _lines(*commands: str) -> list[bytes]:
    return ["\n".join(shlex.split(command)).encode() for command in commands]


def _all() -> list[bytes]:
    """The examples of every verb's help."""
    examples = [example for command in _command_line(run=False).commands.values() for example in command.EXAMPLES]
    return _lines(*(example.removeprefix("kvlab ") for example in examples), "--help", "size --help", "--version")


def _cheap() -> list[bytes]:
    return _lines(
        "size Qwen/Qwen2-72B --kv-len 32768 --batch 16 --tp 8", "size meta-llama/Llama-3.1-8B --kv-len 131072 --json",
        "size deepseek-ai/DeepSeek-V3 --kv-len 4096 --kv-format fp8_e4m3", "ls models", "ls gpus --json", "ls formats",
        "plan Qwen/Qwen2-72B --gpu H200 --gpus 4 --max-len 8192 --tp 4 --util 0.9", "ls engines",
        "size no/such --kv-len 1", "plan meta-llama/Llama-3.1-8B --need 64 --max-len 8192 --kv-format fp8_e4m3",
        "plan openai/gpt-oss-20b --gpu H200 --longest --need 4 --weights-gib 14 --graphs-gib 0",
        "plan google/gemma-3-27b-it --gpu L4 --gpus 8 --pool-gib 4 --block-size 16 --prefix-share 0.5 --json",
        "plan meta-llama/Llama-2-7b-hf --gpu H200 --blocks 1000 --max-num-seqs 8 --max-batched-tokens 2048")


# a word is an object of Python's before kvlab sees it, and a system passes some 2 MiB of them at most
CLI_TARGETS = (Target("cli", "arguments", _parsed, _all, errors=(Refused,), ratio=50),
               Target("verbs", "arguments", _run, _cheap, errors=(Refused,)))
