"""Which names of a file no engine has: environment variables, flags, keyword arguments and metrics against tables.

`lint(path)` reads a file (Python, notebook, Markdown or plain text, shell, Dockerfile, YAML, JSON) or a folder and
judges each name against data/engine_names, in the release that the file's container images are tagged with, else in
the newest. Verdicts: `ok`; `unknown` with the nearest name; `renamed` or `removed`
with the release; `wrong form` (a metric written without its colon, or without what scraping adds); `deprecated`
(still read); `not judged` where nothing tells whose name it is or the file itself gives it a meaning. A file is never
run, imported or fetched from.
"""
from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from kvlab.serving import names
from kvlab.serving._lint_files import broken_json, files, mentions, text_of
from kvlab.serving._lint_hints import meant
from kvlab.serving._lint_mention import Mention
from kvlab.serving._lint_metrics import stands_in
from kvlab.serving._lint_shell import releases
from kvlab.serving.names import Name, Table

FAILING = ("unknown", "renamed", "removed", "wrong form")
VERDICTS = ("ok", *FAILING, "deprecated", "not judged")
WORDS = {"env": "environment variable", "flag": "flag", "kwarg": "keyword argument", "metric": "metric"}
MAX_TEXT = 160


@dataclass(frozen=True, slots=True)
class Finding:
    """One name that is not plainly right. line: in the file, from 1. says: what is wrong; todo: what to do next."""
    file: str
    line: int
    kind: str
    name: str
    engine: str
    version: str
    verdict: str
    says: str
    todo: str
    source: str
    text: str


@dataclass(slots=True)
class Report:
    """What a run found. counts: names by verdict, `ok` included. skipped: what could not be read, one sentence each."""
    findings: list[Finding] = field(default_factory=list)
    counts: Counter = field(default_factory=Counter)
    files: int = 0
    skipped: list[str] = field(default_factory=list)

    @property
    def failing(self) -> list[Finding]:
        """The findings that mean something does not exist."""
        return [finding for finding in self.findings if finding.verdict in FAILING]


def lint(paths: Iterable[Path | str], engine: str | None = None, version: str | None = None) -> Report:
    """Judge every name in the files and folders.

    engine: whose names they are where the file does not tell. version: the release of that engine to judge against,
    by default those of the file's images, else the table's newest. KeyError for an engine without a table, ValueError
    for a version outside it; a file that cannot be read, or not as what it is called, is a sentence in `skipped`.
    """
    if version and not engine:
        raise ValueError("--version needs --engine: say whose version it is")
    fixed = {engine: (names.table(engine).checked(version),)} if engine and version else {}
    if engine:
        names.table(engine)
    report = Report()
    for place in paths:
        try:
            for path in files(Path(place)):
                try:
                    text = text_of(path)
                    found = mentions(path, text)
                except ValueError as error:
                    report.skipped.append(str(error))
                    continue
                report.files += 1
                if (found or path == Path(place)) and (broken := broken_json(path, text)):
                    report.skipped.append(broken)
                _judge_file(report, str(path), text, found, engine, _tagged(text) | fixed)
        except ValueError as error:
            report.skipped.append(str(error))
    return report


def _judge_file(report: Report, file: str, text: str, found: list[Mention], engine: str | None,
                against: dict[str, tuple[str, ...]]) -> None:
    rows = text.split("\n")
    guess = engine or _file_engine(text)
    for mention in found:
        whose = mention.engine or guess
        newest = names.tables()[whose].newest if whose in names.tables() else ""
        judged = [(_judge(mention, whose, version, rows), version) for version in against.get(whose, (newest,))]
        (verdict, says, todo, source), version = min(judged, key=lambda one: one[0][0] in FAILING)
        report.counts[verdict] += 1
        if verdict != "ok":
            row = rows[mention.line - 1].strip() if mention.line <= len(rows) else ""
            report.findings.append(Finding(file, mention.line, mention.kind, mention.name, whose, version, verdict,
                                           says, todo, source, row[:MAX_TEXT]))


def _tagged(text: str) -> dict[str, tuple[str, ...]]:
    """Of each engine the releases to judge a file against: a name is right if one of its images has it.

    An image older or newer than the table is judged by the nearest release that was read; an older one also by itself,
    since it may have what was gone by then.
    """
    found: dict[str, dict[str, None]] = {}
    for engine, tags in releases(text).items():
        table = names.table(engine)
        first, last = names.key(table.releases[0]), names.key(table.newest)
        for tag in tags:
            asked = names.key(tag)
            inside = table.newest if not tag or asked > last else table.releases[0] if asked < first else tag
            found.setdefault(engine, {}).update(dict.fromkeys([inside, tag] if tag and asked < first else [inside]))
    return {engine: tuple(versions) for engine, versions in found.items()}


def _file_engine(text: str) -> str:
    """vLLM, if the file speaks of it and of no other engine whose classes have the same names."""
    return "vllm" if re.search(r"\bvllm\b", text, re.I) and not re.search(r"tensorrt[-_ ]?llm", text, re.I) else ""


def _judge(mention: Mention, engine: str, version: str, rows: list[str]) -> tuple[str, str, str, str]:
    """(verdict, what is wrong, what to do next, where the table has it from)."""
    if engine not in names.tables():
        return "not judged", "nothing in the file tells which engine this belongs to", "name it with --engine", ""
    table = names.table(engine)
    if not table.has(mention.kind):
        return "not judged", f"kvlab has no table of the {WORDS[mention.kind]}s of {engine}", "", ""
    judge = {"metric": _metric, "flag": _flag}.get(mention.kind, _exact)
    verdict, says, todo, source = judge(mention, table, version)
    if verdict == "renamed" and stands_in(rows, mention, table):
        return "ok", "", "", source
    heard = mention.kind == "env" and table.find("env", mention.name)   # what the engine had is not the file's own
    if mention.own and verdict in FAILING and not heard:
        return "not judged", f"the file itself gives {mention.name} its meaning", "", ""
    return verdict, says, todo, source


def _exact(mention: Mention, table: Table, version: str) -> tuple[str, str, str, str]:
    if mention.kind == "env" and mention.name.startswith("SGL_"):
        new = mention.name.replace("SGL_", "SGLANG_", 1)
        if any(row.exists(version) for row in table.find("env", new)):
            return "deprecated", "SGLang rewrites the prefix SGL_ to SGLANG_ for now", f"write {new}", table.engine
    return _row(mention, table, version, table.find(mention.kind, mention.name, mention.scopes))


def _flag(mention: Mention, table: Table, version: str) -> tuple[str, str, str, str]:
    """A flag as its engine's parser reads it: `_` for `-`, `--no-x`, a field after a dot, an unmistakable beginning."""
    name = mention.name
    if table.engine in ("vllm", "sglang"):
        name = name.split(".")[0]
    spellings = [name, name.replace("_", "-")] if table.engine == "vllm" else [name]
    if table.engine == "vllm":
        spellings += [s.replace("--no-", "--", 1) for s in spellings if s.startswith("--no-")]
    found: list[Name] = [row for s in spellings for row in table.find("flag", s, mention.scopes)]
    if not found and table.engine in ("vllm", "sglang"):
        begins = [known for known in table.known("flag", version, mention.scopes) if known.startswith(spellings[-1])]
        if len(begins) == 1:
            return "ok", "", "", ""
    if name in ("--help", "--version"):
        return "ok", "", "", ""
    return _row(mention, table, version, found)


def _row(mention: Mention, table: Table, version: str, found: list[Name]) -> tuple[str, str, str, str]:
    """The verdict from the rows of a name: one that exists, one that is gone or to come, or none."""
    what = f"{WORDS[mention.kind]} {mention.name}"
    if mention.kind == "kwarg":
        what = f"keyword argument {mention.name} of {mention.scopes[0]}"
    there = [row for row in found if row.exists(version)]
    if there:
        row = there[0]
        if row.replaced_by or row.scope == "deprecated":
            return ("deprecated", f"{what} is deprecated in {table.engine} {version}", _instead(row), row.source)
        return "ok", "", "", row.source
    if found:
        return _gone(what, found[-1], table, version)
    near = (meant(table, mention.kind, mention.name, version, mention.scopes)
            or table.near(mention.kind, mention.name, version, mention.scopes))
    return ("unknown", f"{table.engine} {version} has no {what}{_covered(table)}",
            f"did you mean {'the flag ' * (mention.kind == 'env' and near.startswith('-'))}{near}?" if near else
            "take it out; nothing similar exists", table.source)


def _gone(what: str, row: Name, table: Table, version: str) -> tuple[str, str, str, str]:
    if row.until == names.NEVER:
        return "unknown", f"{table.engine} {version} has no {what}{_covered(table)}", _instead(row), table.source
    if row.until and names.key(row.until) < names.key(version):
        verdict = "renamed" if row.replaced_by and " " not in row.replaced_by else "removed"
        return verdict, f"{table.engine} {version} has no {what}: last in {row.until}", _instead(row), row.source
    return ("unknown", f"{table.engine} {version} has no {what} yet: it came with {row.since}",
            f"use {table.engine} {row.since} or later", row.source)


def _metric(mention: Mention, table: Table, version: str) -> tuple[str, str, str, str]:
    """A metric, with what scraping adds to its name (`_total`, `_bucket`, …) taken into account."""
    name, prefix = mention.name, ""
    if table.engine in ("vllm", "sglang", "llama.cpp") and ":" not in name:
        prefix, _, rest = name.partition("_")
        name = f"{prefix}:{rest}"
    row = names.metric(table.engine, name)
    what = f"metric {mention.name}"
    if row is None:
        near = table.near("metric", name, version) or _former(table, name)
        former = next(iter(table.find("metric", near)), None) if near else None
        if former is None or former.exists(version):
            return ("unknown", f"{table.engine} {version} has no {what}",
                    f"did you mean {near}?" if near else _no_metric(name, table), table.source)
        if former.until == names.NEVER:
            return ("unknown", f"{table.engine} {version} has no {what}, nor had any release", _instead(former),
                    former.source)
        verdict = "removed" if near.startswith(name) else "unknown"
        return (verdict, f"{table.engine} {version} has no {what}; the nearest, {near}, was last in {former.until}",
                _instead(former), former.source)
    if not row.exists(version):
        return _gone(what, row, table, version)
    if prefix:
        return ("wrong form", f"{table.engine} writes {what} with a colon", f"write {name}", row.source)
    if row.note == "exposed without _total" and name.endswith("_total"):
        return "wrong form", f"{table.engine} exposes {what} without _total", f"write {row.name}", row.source
    if mention.promql and row.type == "counter" and name == row.name and row.note != "exposed without _total":
        return ("wrong form", f"the counter {row.name} is scraped as {row.name}_total", f"write {row.name}_total",
                row.source)
    return "ok", "", "", row.source


def _former(table: Table, name: str) -> str:
    """A former metric of nearly that name, or one that begins with it."""
    former = [row.name for row in table.names if row.kind == "metric" and row.until]
    begins = [known for known in former if known.startswith(name)]

    return next(iter(begins or difflib.get_close_matches(name, former, 1, cutoff=0.8)), "")


def _no_metric(name: str, table: Table) -> str:
    """What to watch instead of a metric that never was; cache evictions are asked for most."""
    if "evict" in name and table.engine == "vllm":
        return ("a full prefix cache evicts all the time and that is no fault; what hurts is preemption: "
                "rate(vllm:num_preemptions_total[5m])")
    return "take it out; what a server has is what its /metrics lists"


def _covered(table: Table) -> str:
    return f", nor has any release read from {table.releases[0]} on" if len(table.releases) > 1 else ""


def _instead(row: Name) -> str:
    use = f"use {row.replaced_by}" if row.replaced_by else "take it out"
    return f"{use}: {row.note}" if row.note else use
