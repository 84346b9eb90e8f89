"""A table of servers' start-up logs against the model of their caches: one verdict per line, each with its arithmetic.

Verdicts: agreed (what is printed follows from what is printed beside it: integers exactly, the rest within its printed
rounding), explained (it follows once a rule with a visible condition applies; the note says which), unexplained (no
rule accounts for it), unmatched (nothing to compare: one quantity alone, or a model that is not named or catalogued).

Read: model, arch, gpu, n_gpus, tp, gpu_memory_utilization, kv_cache_gib, block_size, max_model_len, dtype, kv_dtype,
swap_gib, engine_version.
Compared: kv_tokens, gpu_blocks, cpu_blocks, max_concurrency, and the pool where tokens are what it follows from. No
other column is looked at, ids and notes included. A line with several comparable quantities gets one result: `what`
names the strongest that was compared, or the one that did not fit, and the note the others.
"""
from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from kvlab.serving._log_case import VERDICTS, Case, Finding, read
from kvlab.serving._log_llama import check_llama
from kvlab.serving._log_pools import check_pool
from kvlab.serving._log_rules import beyond_memory, rounded_figures, settings, sharp, unequal_ranks
from kvlab.serving._log_vllm import Fit, baselines, fit, model_of
from kvlab.shapes import ModelSpec

MOST_BYTES, MOST_ROWS, MOST_COLUMNS = 32 * 2**20, 100_000, 1000
_STRENGTH = ("cpu_blocks", "gpu_blocks", "kv_tokens", "max_concurrency")


def check(table: str | Path | Iterable[Mapping], spec: ModelSpec | None = None) -> list[dict]:
    """One result {id, verdict, what, logged, predicted, note} per line of a CSV file, a DataFrame or rows.

    spec: the model of all lines, whatever they call it. Numbers are None where nothing was compared. ValueError for a
    file that is too large, no text or without any of the columns; OSError where it cannot be read.
    """
    results = []
    for at, row in enumerate(_rows(table), start=1):
        if at > MOST_ROWS:
            raise ValueError(f"the table has more than {MOST_ROWS:,} lines; split it")
        found = judge(row, spec)
        name = row.get("id")
        results.append({"id": str(at if name is None or name != name or name == "" else name), "verdict": found.verdict,
                        "what": found.what, "logged": found.logged, "predicted": found.predicted, "note": found.note})
    return results


def summary(results: Iterable[Mapping]) -> dict[str, int]:
    """How many lines got each verdict, in the order agreed, explained, unexplained, unmatched."""
    given = [result["verdict"] for result in results]
    return {verdict: given.count(verdict) for verdict in VERDICTS}


def judge(row: Mapping, spec: ModelSpec | None = None) -> Finding:
    """The finding about one line; spec: its model, where that is known better than by its name."""
    case = read(row)
    if spec is not None:
        case = replace(case, spec=spec, why_not="")
    if case.spec is None:
        return Finding("unmatched", note=case.why_not + _arithmetic_alone(case))
    try:
        if case.engine.name == "llamacpp":
            found = check_llama(case)
        elif case.engine.name in ("sglang", "trtllm", "lmdeploy", "transformers"):
            found = check_pool(case)
        else:
            found = _vllm(case)
    except (ValueError, KeyError) as error:                 # a tp that no head count allows, a format that does not fit
        return Finding("unmatched", note=f"{case.spec.name} cannot be so stored: {error.args[0]}")
    return replace(found, note="; ".join(filter(None, (found.note, case.why_not))))


def _vllm(case: Case) -> Finding:
    bases = list(baselines(case))
    if not bases:
        return Finding("unmatched", note=f"the KV format {case.kv_dtype!r:.60} is not known here")
    first = fit(case, bases[0])
    compared = len(first.predicted)
    if not compared:
        printed = [column for column in first.spans] + (["kv_tokens"] if case.tokens and not first.spans else [])
        return Finding("unmatched", note=f"only {' and '.join(printed) or 'nothing'} printed: there is nothing to "
                       "compare with, and the pool does not follow without activations and other memory")
    for rules in (0, 1, 2):
        for setting in settings(case, bases, rules):
            found = fit(case, setting)
            if not found.failing and (rules == 0 or sharp(case, setting)):
                return beyond_memory(case, found) or _meets(case, found)
    fits = [fit(case, setting) for setting in bases]
    for last in (unequal_ranks, rounded_figures):
        for found in fits:
            if explained := last(case, found):
                return explained
    if not sharp(case, bases[0]) and (alone := _tokens_by_length(case)):
        return alone
    closest = min(fits, key=lambda found: len(found.failing))
    what = closest.failing[0]
    return Finding("unexplained", what, _logged(case, what), closest.predicted[what],
                   f"{_arithmetic(case, closest)}; no rule accounts for {what}"
                   + (f" ({case.spec.approximate})" if case.spec and case.spec.approximate else ""))


def _meets(case: Case, found: Fit) -> Finding:
    what = next(column for column in _STRENGTH if column in found.predicted)
    others = [column for column in found.predicted if column != what]
    alone = "gpu_blocks tested only against the GPU's memory: nothing printed follows from them" if (
        set(found.spans) == {"gpu_blocks"}) else ""
    note = "; ".join(filter(None, (*found.setting.because, _arithmetic(case, found),
                                   f"also {', '.join(others)}" if others else "", alone)))
    return Finding("explained" if found.setting.because else "agreed", what, _logged(case, what),
                   found.predicted[what], note)


def _tokens_by_length(case: Case) -> Finding | None:
    """Tokens ÷ length = concurrency, which newer versions print of any model: their own arithmetic, and no more."""
    if case.tokens is None or case.concurrency is None or not case.max_len:
        return None
    predicted = case.tokens.value / case.max_len
    if abs(predicted - case.concurrency.value) > case.concurrency.half + 1 / case.max_len:
        return None
    return Finding("agreed", "max_concurrency", case.concurrency.value, round(predicted, 2),
                   "tokens ÷ length, as this version computes its tokens; without a pool the blocks are not tested")


def _arithmetic(case: Case, found: Fit) -> str:
    model, setting = model_of(case.spec, found.setting), found.setting
    parts = [f"block of {model.block_size:,} tokens = {model.block_bytes:,} B"]
    if len(model.groups) > 1:
        parts.append(f"{len(model.groups)} groups of {model.groups[0].layers} layers")
    if case.concurrency or len(model.groups) > 1:
        parts.append(f"{model.blocks_per_request():,} blocks per {setting.max_len:,} tokens"
                     + ("" if case.max_len else " (the model's maximum: no length is printed)"))
    if "kv_tokens" in found.predicted and setting.wording != "blocks" and len(model.groups) > 1:
        parts.append("tokens = " + ("blocks ÷ groups x block" if setting.wording == "grouped" else
                                    "concurrency x length"))
    if case.windows and setting.groups and len(model.groups) > 1:
        parts.append(f"{model.in_flight:,} tokens in flight")
    if setting.pp > 1:
        parts.append(f"{setting.pp} pipeline stages")
    return ", ".join(parts)


def _arithmetic_alone(case: Case) -> str:
    """What of a line holds without a model, so that the reader need not compute it."""
    if case.blocks and case.concurrency and case.max_len:
        tokens = case.blocks * (case.block_size.value if case.block_size else 16)
        if abs(tokens / case.max_len - case.concurrency.value) <= case.concurrency.half:
            return "; its own arithmetic holds for full attention: blocks x block size ÷ length = the concurrency"
    return ""


def _logged(case: Case, column: str) -> float | int | None:
    if column in ("cpu_blocks", "gpu_blocks"):
        return case.cpu_blocks if column == "cpu_blocks" else case.blocks
    value = case.tokens if column == "kv_tokens" else case.concurrency
    if value is None:
        return None
    return int(value.value) if column == "kv_tokens" else value.value


def _reader(file) -> csv.DictReader:
    """Columns by their names in lower case, parted by the commonest of comma, semicolon and tab in the first line."""
    first = file.readline()
    file.seek(0)
    delimiter = max(",;\t", key=first.count)
    if first.count(delimiter) > MOST_COLUMNS:
        raise csv.Error(f"its first line has more than {MOST_COLUMNS:,} columns")
    reader = csv.DictReader(file, delimiter=delimiter)
    reader.fieldnames = [name.strip().lower() for name in reader.fieldnames or ()]
    return reader


def _rows(table: str | Path | Iterable[Mapping]) -> Iterator[Mapping]:
    if hasattr(table, "to_dict"):                           # a DataFrame
        yield from table.to_dict("records")
        return
    if not isinstance(table, (str, Path)):
        yield from table
        return
    path = Path(table)
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path} is larger than {MOST_BYTES // 2**20} MiB; a table of logs is not")
    with open(path, encoding="utf-8-sig", newline="") as file:
        try:
            reader = _reader(file)
            names = set(reader.fieldnames or ())
            if not names & {"kv_tokens", "gpu_blocks", "cpu_blocks", "max_concurrency", "kv_cache_gib"}:
                raise ValueError(f"{path} has none of the columns kv_tokens, gpu_blocks, cpu_blocks, max_concurrency "
                                 "and kv_cache_gib; it is no table of server logs")
            yield from reader
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{path} is no CSV file in UTF-8: {error}") from None
