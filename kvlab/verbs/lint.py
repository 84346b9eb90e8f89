"""kvlab lint: which environment variables, flags, keyword arguments and metrics of a file no engine has."""
from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from kvlab.verbs._complete import words
from kvlab.verbs._help import verb

HELP = verb("kvlab lint Dockerfile serve.py deploy/", "kvlab lint values.yaml --engine vllm --version 0.11.0")
ENGINES = ("vllm", "sglang", "llama.cpp", "tgi", "triton", "tensorrt_llm")
MOST = 8                             # names that one line lists


def command(files: Annotated[list[str], typer.Argument(help="Files or folders: Python, notebooks, Markdown or plain "
                                                       "text, shell, Dockerfiles, YAML, JSON.")],
            engine: Annotated[str | None, typer.Option(autocompletion=words(*ENGINES), help="Whose names they are "
                                                       "where a file does not tell: vllm, sglang, llama.cpp, tgi, "
                                                       "triton, tensorrt_llm.")] = None,
            version: Annotated[str | None, typer.Option(help="The release of that engine to judge against; default: "
                                                        "the newest its table has.")] = None,
            as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False) -> int:
    """Find variables, flags, arguments and metrics in files that no serving engine has."""
    from kvlab.serving.lint import VERDICTS, lint
    from kvlab.show import printable
    report = lint(files, engine, version)
    if as_json:
        print(json.dumps(dict(files=report.files, counts={verdict: report.counts[verdict] for verdict in VERDICTS},
                              findings=[asdict(finding) for finding in report.findings], skipped=report.skipped),
                         indent=2, ensure_ascii=False))
    else:
        for found in report.findings:
            if found.verdict != "not judged":
                print(printable(f"{found.file}:{found.line}: {found.verdict}: {found.says}"))
                print(printable(f"    {found.text}"))
                print(printable(f"    {found.todo} [{found.source}]"))
        untold = {found.says: None for found in report.findings if found.verdict == "not judged" and " itself " not in
                  found.says}
        for says in untold:
            which = {found.name: None for found in report.findings if found.says == says}
            print(printable(f"not judged: {', '.join([*which][:MOST])}{', …' * (len(which) > MOST)}: {says}"))
        counts = ", ".join(f"{report.counts[verdict]} {verdict}" for verdict in VERDICTS if report.counts[verdict])
        print(f"{report.files} file{'s' * (report.files != 1)}: {counts or 'no name of an engine'}")
    for sentence in report.skipped:
        print(printable(f"kvlab: {sentence}"), file=sys.stderr)
    return 1 if report.failing else 2 if report.skipped else 0
