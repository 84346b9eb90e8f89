"""One HTML page about a run: what was run, what it found, its figures, every case, and everything that is missing.

The page needs nothing beside it and runs no script. Whatever comes from a run is text in it, never markup.
"""
from __future__ import annotations

import base64
import json
import math
import os
import shlex
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from kvlab.record._places import is_url
from kvlab.record.environment import Manifest
from kvlab.record.export import atomic_write
from kvlab.record.query import gpus
from kvlab.record.reading import CONTEXT
from kvlab.record.remote import fetched
from kvlab.record.store import read_table, read_workers
from kvlab.record.wide import wide
from kvlab.units import display

if TYPE_CHECKING:
    import pandas as pd

KINDS = {
    "measured": "a clock, a counter or a sensor gave it on the hardware named",
    "simulated": "a simulator that moves every block or request gave it",
    "modelled": "computed from a formula, or from measured numbers and a formula; never stronger than its inputs",
    "quoted": "somebody else states it; the source says who",
    "missing": "it could not be had, and the reason is given; never 0",
}
_IDS = {"run_id", "comparison_id", "case_id", "study", "case"}            # context that no reader needs in a table
_COLUMNS = 6                                                              # metrics side by side: what a page holds
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: white; max-width: 74rem; margin: 2rem auto;
  padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; } h2 { margin-top: 2.2rem; border-bottom: 1px solid #ddd; }
.question { font-size: 1.15rem; } figure { margin: 1.5rem 0; break-inside: avoid; }
figure img { max-width: 52rem; width: 100%; } figcaption { max-width: 52rem; color: #444; }
table { border-collapse: collapse; font-size: 12px; margin: .6rem 0 1.4rem; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .5rem; border-bottom: 1px solid #e5e5e5; text-align: left; vertical-align: top; }
thead th { background: #f4f4f4; } td.number { text-align: right; }
td, th { overflow-wrap: anywhere; } .wide td, thead th { overflow-wrap: normal; }
small { color: #555; display: block; font-weight: normal; }
.wide { overflow-x: auto; } .wide td { white-space: nowrap; } .wide td.name { white-space: normal; min-width: 6rem; }
.kind { font-size: 10px; font-weight: normal; padding: 0 .25rem; border-radius: 3px; color: #1a1a1a; }
.measured { background: #cfe8d8; } .simulated { background: #d5e3f5; } .modelled { background: #fdebc8; }
.quoted { background: #e8dcf0; } .missing { background: #eee; }
@media print { @page { size: landscape; margin: 12mm; } body { font-size: 11px; margin: 0; max-width: none; }
  table { font-size: 8px; } .wide { overflow: visible; } th, td { padding: .1rem .3rem; }
  thead { display: table-header-group; } tr { break-inside: avoid; }
  .kind { font-size: 6px; print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""


def write_report(run: Path | str, out: Path | str | None = None) -> Path:
    """Write the report of a run directory and return its path.

    run: may be its URL. out: the file, or an existing folder for a report.html; default report.html in the run, and
    where that cannot be written to or is at a URL, <run id>.html here. Refused: a path that is no run directory
    (StoreError; ValueError for a file), results of another schema version (ValueError).
    """
    far = is_url(run)
    run = fetched(run) if is_url(run) else Path(run)
    if run.is_file():
        raise ValueError(f"{run} is a file, and a report is about a run directory (with its manifest.json); give that")
    manifest, table = Manifest.read(run), read_table(run)
    if out is None:
        out = f"{run.name}.html" if far or not os.access(run, os.W_OK) else run
    out = Path(out)
    path = out / "report.html" if out.is_dir() else out
    atomic_write(path, _page(manifest, table, run).encode("utf-8", "replace"))
    return path


def _page(manifest: Manifest, table: pd.DataFrame, run: Path) -> str:
    study = _study(manifest.study)
    title = f"{manifest.study}, run {manifest.run_id}"
    question = (study.__doc__ or "").strip().split("\n")[0] if study else ""
    body = [f"<h1>{escape(title)}</h1>", f'<p class="question">{escape(question)}</p>', *_run_facts(manifest, table),
            *_workers(run, table), *_findings(study, table), *_figures(manifest.study, table), *_cases(table),
            *_absent(table), "<h2>The machine and its software</h2>", _facts(manifest.environment), *_kinds()]
    return "\n".join([
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        'style-src \'unsafe-inline\'">',                                  # nothing is loaded or run, whatever is in it
        '<meta name="viewport" content="width=device-width">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>", *body, "</body></html>\n"])


def _study(name: str) -> ModuleType | None:
    from kvlab.studies._run import studies
    return studies[name] if name in studies.names() else None


def _run_facts(manifest: Manifest, table: pd.DataFrame) -> Iterator[str]:
    variants = ", ".join(v.ref + (f" (SHA-256 {v.sha256[:12]})" if v.sha256 else "") for v in manifest.variants)
    facts = {"date": manifest.created_utc, "command": shlex.join(manifest.argv), "size": manifest.size,
             "device": manifest.device, "engine": manifest.options.get("engine", ""),
             "hardware": _listed(table["hardware"].replace("none", "")),
             "variants": variants, "models": ", ".join(manifest.models), "seeds": ", ".join(map(str, manifest.seeds))}
    yield "<h2>What was run</h2>"
    yield _facts(facts)


def _facts(facts: dict) -> str:
    lines = [f"<tr><th>{escape(name.replace('_', ' '))}</th><td>"
             f"{escape(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))}</td></tr>"
             for name, value in facts.items() if value not in ("", None, [], {})]
    return f"<table>{''.join(lines)}</table>"


def _findings(study: ModuleType | None, table: pd.DataFrame) -> Iterator[str]:
    if not hasattr(study, "findings"):
        return
    yield "<h2>Findings</h2>"
    try:
        found = study.findings(table)
    except Exception as error:                                            # a report of half a run is worth having
        yield f"<p>The findings could not be computed: {escape(_words(error))}</p>"
        return
    yield f"<ul>{''.join(f'<li>{escape(one.sentence)} {_badge(one.kind)}</li>' for one in found)}</ul>"


def _figures(study: str, table: pd.DataFrame) -> Iterator[str]:
    from kvlab.figures import figures, make
    from kvlab.figures._style import image
    names = sorted((name for name in figures if figures[name].STUDY == study), key=lambda name: name != study)
    if names:
        yield "<h2>Figures</h2>"
    for name in names:
        first, _, rest = (figures[name].__doc__ or "").strip().partition("\n")
        caption = f"<figcaption><b>{escape(name)}.</b> {escape(first)} {escape(rest)}</figcaption>"
        try:
            png = base64.b64encode(image(make(name, table), "png")).decode()
        except Exception as error:                                        # said in its place; the rest is drawn
            yield f"<figure><p>Not drawn: {escape(_words(error))}</p>{caption}</figure>"
            continue
        yield f'<figure><img alt="{escape(first)}" src="data:image/png;base64,{png}">{caption}</figure>'


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def _cases(table: pd.DataFrame) -> Iterator[str]:
    """One table per phase and block of metrics, measured ones first; what is the same in every line stands above."""
    units = dict(zip(table["metric"], table["unit"]))
    yield "<h2>Every case</h2>"
    for phase, rows in table[table["value"].notna()].groupby("phase", sort=False):
        for whole, part in rows.groupby(rows["variant"] == "", sort=True):
            lines = wide(part)
            varying = [c for c in CONTEXT if c not in _IDS and c in lines and lines[c].nunique(dropna=False) > 1]
            same = [f"{c} {lines[c].iloc[0]}" for c in CONTEXT if c not in (*_IDS, *varying, "variant", "phase")
                    and _text(lines[c].iloc[0])]
            if "variant" not in varying and not whole:
                varying.insert(0, "variant")
            about = f"{phase or 'other'}, {'whole comparisons' if whole else 'calls'}"
            yield f"<h3>{escape(about)}</h3><p>{escape(' · '.join(same))}</p>"
            slots = sorted((c for c in lines if c not in CONTEXT and not c.endswith(("_kind", "_low", "_high"))),
                           key=lambda c: not (part[part["metric"] == c]["kind"] == "measured").any())
            for start in range(0, len(slots), _COLUMNS):
                yield _table(lines, varying, slots[start:start + _COLUMNS], units)


def _table(lines: pd.DataFrame, context: list[str], slots: list[str], units: dict[str, str]) -> str:
    """Lines of `wide` in some context columns and metrics; a kind that a whole column shares stands in its head."""
    lines = lines[lines[slots].notna().any(axis=1)]
    metrics = {slot: max((name for name in units if slot.startswith(name)), key=len) for slot in slots}
    shared = {slot: _kinds_of(lines, slot, metrics[slot]) for slot in slots}
    head = [f"<th>{_name(column)}</th>" for column in context] + [
        f"<th>{_name(slot)} {_badge(*kinds) if len(kinds) == 1 else ''}</th>" for slot, kinds in shared.items()]
    body = []
    for line in lines.to_dict("records"):
        cells = [f'<td class="{"name" if c in ("variant", "model") else ""}">{escape(_text(line[c]))}</td>'
                 for c in context]
        cells += [_cell(line, slot, units[metrics[slot]], badge=len(shared[slot]) > 1) for slot in slots]
        body.append(f"<tr>{''.join(cells)}</tr>")
    return (f'<div class="wide"><table><thead><tr>{"".join(head)}</tr></thead><tbody>{"".join(body)}</tbody></table>'
            '</div>')


def _name(column: str) -> str:
    return escape(column).replace("_", "_<wbr>")


def _text(value) -> str:
    import pandas as pd
    return "" if pd.isna(value) else str(value)


def _kinds_of(lines: pd.DataFrame, slot: str, metric: str) -> set[str]:
    """The kinds in one column; a second kind of a metric has it in its name (see wide)."""
    if f"{slot}_kind" in lines:
        return set(lines[f"{slot}_kind"][lines[slot].notna()])
    return {next(kind for kind in KINDS if f"_{kind}" in slot.removeprefix(metric))}


def _cell(line: dict, slot: str, unit: str, badge: bool) -> str:
    """A number with its interval, and its kind where the column has several."""
    value, low, high = (line.get(name, math.nan) for name in (slot, f"{slot}_low", f"{slot}_high"))
    if math.isnan(value):
        return "<td></td>"
    kind = f" {_badge(line[f'{slot}_kind'])}" if badge else ""
    interval = "" if math.isnan(low) or math.isnan(high) else (
        f"<small>[{escape(_number(low, unit))}, {escape(_number(high, unit))}]</small>")
    return f'<td class="number">{escape(_number(value, unit))}{kind}{interval}</td>'


def _number(value: float, unit: str) -> str:
    return f"{value:,.0f}" if unit == "count" else display(value, unit)


def _badge(kind: str) -> str:
    return f'<span class="kind {escape(kind)}">{escape(kind)}</span>'


def _absent(table: pd.DataFrame) -> Iterator[str]:
    """Readings without a value, grouped by what happened and why."""
    absent = table[table["kind"] == "missing"]
    yield "<h2>What is missing, and why</h2>"
    if absent.empty:
        yield "<p>Nothing: every reading has a value.</p>"
        return
    absent = absent.assign(what=absent["status"].replace("ok", "missing"), why=absent["error"].where(
        absent["error"] != "", absent["note"]))
    lines = []
    for (what, why), rows in absent.groupby(["what", "why"], sort=False):
        cells = (what, why, _listed(rows["source"]), _listed(rows["metric"]), _listed(rows["variant"]),
                 str(rows["case_id"].nunique()))
        lines.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    heads = "".join(f"<th>{head}</th>" for head in ("what", "why", "sources", "metrics", "variants", "cases"))
    yield f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _listed(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(value for value in values if value))


def _workers(run: Path, table: pd.DataFrame) -> Iterator[str]:
    """Of a run on a cluster, which worker gave how many cases, and on what."""
    try:
        workers = read_workers(run)
    except (ValueError, OSError) as error:                                # the readings do without
        yield f"<p>{escape(str(error))}</p>"
        return
    if not workers:
        return
    cases = table.groupby("worker")["comparison_id"].nunique()
    heads = "".join(f"<th>{head}</th>" for head in ("worker", "cases", "GPUs", "CPU", "cores", "torch", "Python"))
    lines = []
    for name, found in sorted(workers.items()):
        about = (str(found.get(key) or "") for key in ("cpu", "logical_cores", "torch", "python"))
        cells = (name, f"{cases.get(name, 0):,}", gpus(found), *about)
        lines.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    yield f"<h2>The workers</h2><table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _kinds() -> Iterator[str]:
    yield "<h2>Kinds of numbers</h2>"
    yield "<table>" + "".join(f"<tr><td>{_badge(kind)}</td><td>{escape(meaning)}</td></tr>"
                              for kind, meaning in KINDS.items()) + "</table>"
