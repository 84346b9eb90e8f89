"""The documents as tests see them: pages, code blocks, commands with their options, links and headings."""
import re
import shlex
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / name for name in ("README.md", "README.zh-CN.md", "CONTRIBUTING.md", "CHANGELOG.md")]
               + [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "zh").glob("*.md"), ROOT / "profiles" / "README.md"])
LEADS = ("kvlab ", ".venv/bin/kvlab ", "python -m kvlab ")      # what a line with a command of kvlab's begins with


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text, language=""):
    """The fenced blocks of a language, without their fences."""
    return [code for lang, code in re.findall(r"^```(\w*)\n(.*?)^```", text, re.S | re.M) if lang == language]


def prose(text):
    """The text without its fenced blocks."""
    return re.sub(r"^```.*?^```\n?", "", text, flags=re.S | re.M)


def uncommented(code):
    """Code without the remarks behind it: two blanks or more, then a #."""
    return "\n".join(re.sub(r"\s{2,}# .*$", "", line).rstrip() for line in code.splitlines())


def arguments(line):
    """The arguments of a line with a command of kvlab's, verb first; None for every other line."""
    line = line.removeprefix("$ ")
    lead = next((lead for lead in LEADS if line.startswith(lead)), None)
    return lead and shlex.split(uncommented(line).removeprefix(lead))


def commands(text):
    """The arguments of every command of kvlab's in the fenced blocks."""
    return [given for code in blocks(text) for line in code.splitlines() if (given := arguments(line))]


def inline(text):
    """The verb and the options of every command of kvlab's that is named inside a sentence or a table."""
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(text))]
    return [(span.split()[1], options_in(span)) for span in spans if re.match(r"kvlab [a-z]", span)]


def options_in(text):
    return re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)


def printed(text):
    """(arguments, lines) of every block that shows what a command prints."""
    for code in blocks(text):
        first, *lines = code.rstrip().splitlines()
        if first.startswith("$ ") and (given := arguments(first)):
            yield given, lines


def links(text):
    """Targets of links and pictures, in order."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(text))


def headings(text):
    """(level, words) of every heading."""
    return [(len(marks), words) for marks, words in re.findall(r"^(#+) (.+)$", prose(text), re.M)]


def anchor(words):
    """A heading as the part of an address behind #, as forges make it."""
    return re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")


@cache
def verbs():
    """Every verb of the command line, as the parser that it is."""
    import typer

    from kvlab.cli import app
    return typer.main.get_command(app).commands


def options_of(verb):
    return {name for one in verbs()[verb].params for name in (*one.opts, *one.secondary_opts)} | {"--help"}


def parse(given):
    """The values that a command's options and arguments come to; raises where one is not there or of another type."""
    return verbs()[given[0]].make_context(given[0], list(given[1:])).params
