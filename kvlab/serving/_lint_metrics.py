"""Metric names in a text: `vllm:…` anywhere, and names without the colon where they can only be metrics.

An underscore name (`vllm_num_requests_running`) is also what a variable looks like. It is taken for a metric where it
is one but for the colon, where PromQL selects it, where it stands in a list with such names, or where the line speaks
of metrics and the name begins as metrics do; and then everywhere in the file.
"""
from __future__ import annotations

import re
from functools import cache

from kvlab.serving import names
from kvlab.serving._lint_mention import Mention

COLON = re.compile(r"(?<![A-Za-z0-9_:/.-])(vllm|sglang|llamacpp):(?!metric_name|v\d)([a-z][a-z0-9]*(?:_[a-z0-9]+)+)"
                   r"(?![A-Za-z0-9_*:]|\.[*+])")
SCORE = re.compile(r"(?<![A-Za-z0-9_:/.$-])"
                   r"(vllm|sglang|llamacpp|tgi|trtllm|nv_inference|nv_trt_llm|nv_gpu|nv_cpu|nv_cache)"
                   r"_([a-z][a-z0-9]*(?:_[a-z0-9]+)*)(?![A-Za-z0-9_*:(./=-]|\s*=[^=~])")
ENGINES = {"llamacpp": "llama.cpp", "trtllm": "tensorrt_llm", "vllm": "vllm", "sglang": "sglang", "tgi": "tgi"}
PROMQL = re.compile(r"\b(?:rate|irate|increase|histogram_quantile|sum|avg|max|min|delta|deriv|label_values|absent|"
                    r"(?:avg|max|min|sum)_over_time)\s*(?:by\s*\([^)]*\)\s*)?\(|\[\d+[smhd]\]|\[\$__|[\"']?\bexpr[\"']?\s*:")
SPEAKS = re.compile(r"metric|prometheus|grafana|alert|指标|监控|告警|驱逐", re.I)
EXPR = re.compile(r"[\"']?\bexpr[\"']?\s*:")
NEXT_KEY = re.compile(r"\s*$|\s*(?:- +)?[\"']?[A-Za-z_][\w.-]*[\"']?\s*:(?:\s|$)")
MAX_EXPRESSION = 50                                          # lines, each way
MAX_PROSE = 2000                                             # characters of a line that can be a sentence
RECORD = re.compile(r"^[ \t]*(?:-[ \t]*)?record:\s*[\"']?([A-Za-z_:][\w:]*)", re.M)


def metrics(text: str, line: int, promql_file: bool = False) -> list[Mention]:
    """Metric names with the line each stands on. promql_file: rules or a dashboard, where `expr` may span lines."""
    own = set(RECORD.findall(text))
    rows = text.split("\n")
    selecting = [promql_file or bool(PROMQL.search(row)) for row in rows]
    found = [Mention("metric", m.group(), line + index, ENGINES[m[1]], promql=selecting[index], own=m.group() in own)
             for index, row in enumerate(rows) for m in COLON.finditer(row)]
    loose = [(index, m) for index, row in enumerate(rows) for m in SCORE.finditer(row)]
    judged = {m.group() for index, m in loose if _is_metric(rows[index], m, selecting[index] and not promql_file)}
    leading: dict[int, str] = {}
    for index, match in loose:
        if match.start() < 20 and index not in leading and _leads(rows[index], match.start()):
            leading[index] = match.group()
    for index, name in leading.items():
        if name not in judged and "_" in name.partition("_")[2] and _in_list(rows, index, leading, judged):
            judged.add(name)
    found += [Mention("metric", m.group(), line + index, ENGINES.get(m[1], "triton"),
                      promql=selecting[index], own=m.group() in own)
              for index, m in loose if m.group() in judged]
    return sorted(found, key=lambda mention: mention.line)


def stands_in(rows: list[str], mention: Mention, table: names.Table) -> bool:
    """Whether a former name stands behind an `or` beside its successor, for servers of either release."""
    row = names.metric(table.engine, mention.name)
    if row is None or not row.replaced_by or not mention.promql:
        return False
    first = last = mention.line - 1                          # the expression: from its `expr` to the next key
    while first > 0 and mention.line - first < MAX_EXPRESSION and not EXPR.search(rows[first]):
        first -= 1
    first = first if EXPR.search(rows[first]) else mention.line - 1
    while last + 1 < len(rows) and last - mention.line < MAX_EXPRESSION and not NEXT_KEY.match(rows[last + 1]):
        last += 1
    expression = "\n".join(rows[first:last + 1])
    successor = rf"(?<![\w:]){re.escape(row.replaced_by)}(?:_total|_bucket|_sum|_count)?(?!\w)"
    return bool(re.search(r"\bor\b", expression) and re.search(successor, expression))


def _is_metric(row: str, match: re.Match, selecting: bool) -> bool:
    engine, name = ENGINES.get(match[1], "triton"), match.group()
    if engine in ("tgi", "triton", "tensorrt_llm"):          # no colon in their names: a known one, or PromQL
        return names.metric(engine, name) is not None or _selected(row, match)
    if names.metric(engine, f"{match[1]}:{match[2]}"):
        return True
    words = match[2].split("_")
    return len(words) > 1 and words[0] in first_words(engine) and (
        _selected(row, match) or (len(words) > 2 and len(row) < MAX_PROSE
                                  and bool(SPEAKS.search(row.replace(name, "")))))


def _selected(row: str, match: re.Match) -> bool:
    """Whether PromQL selects this very name: labels, a range or a function around it."""
    before, after = row[max(0, match.start() - 40):match.start()], row[match.end():match.end() + 40]
    return bool(re.match(r"\{\w+\s*(=~|!=|!~|=)|\[\d+[smhd]\]|\[\$__", after)
                or re.search(r"(?:rate|increase|quantile|delta|sum|avg|max|min)\s*\($", before)
                or re.search(r"[\"']?\bexpr[\"']?\s*:\s*[|>]?\s*[\"']?$", before))


def _in_list(rows: list[str], index: int, leading: dict[int, str], judged: set[str]) -> bool:
    """Whether the name leads its line in a block of lines that a known metric leads too."""
    for step in (-1, 1):
        at = index + step
        while 0 <= at < len(rows) and rows[at].strip() and abs(at - index) < 50:
            if leading.get(at) in judged:
                return True
            at += step
    return False


def _leads(row: str, at: int) -> bool:
    return not re.sub(r"[\s\-*•|`\"'\d.]+", "", row[:at])


@cache
def first_words(engine: str) -> frozenset[str]:
    """What metric names of an engine begin with, old ones included."""
    return frozenset(re.split("[:_]", row.name)[1] for row in names.table(engine).names if row.kind == "metric")
