"""What `kvlab ls` lists: one function per list, yielding dictionaries with a `name`."""
from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path


def models() -> Iterator[dict]:
    """Models of the catalogue."""
    from kvlab.catalog.models import aliases
    from kvlab.catalog.models import models as all_of
    others: dict[str, list[str]] = {}
    for alias, name in aliases().items():
        others.setdefault(name, []).append(alias)
    for spec in all_of().values():
        yield dict(name=spec.name, aliases=others.get(spec.name, []), attention=spec.attention_type,
                   layers=spec.num_layers, q_heads=spec.num_q_heads,
                   kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, context=spec.context, params=spec.params,
                   approximate=spec.approximate, source=spec.source)


def gpus() -> Iterator[dict]:
    """Accelerators and CPUs of the catalogue; rates in flop/s, bandwidth in B/s."""
    from kvlab.catalog.gpus import gpus as all_of
    for spec in all_of().values():
        yield dict(name=spec.name, memory_bytes=spec.memory_bytes, bandwidth=spec.bandwidth, **{
            f"{k}_flops": v for k, v in spec.flops.items()}, fp8=spec.fp8_support, source=spec.source)


def variants() -> Iterator[dict]:
    """Attention variants, and why they cannot run here."""
    from kvlab.attention import VariantRef, trial
    from kvlab.attention import variants as registry
    from kvlab.shapes import AttentionShape, Workload
    workload = Workload.decode(AttentionShape(8, 2, 64), kv_len=64)
    for name in registry:
        yield dict(name=name, cannot_run_here=trial(VariantRef(name), workload).why_not() or "",
                   about=_first_line(registry[name]))


def formats() -> Iterator[dict]:
    """KV formats with what an element takes, scales included, at head_dim 128 and 4,096 tokens."""
    from kvlab.kv.formats import format_names, kv_format
    from kvlab.shapes import AttentionShape
    shape = AttentionShape(1, 1, 128)
    for name in format_names() + format_names(sizes_only=True):
        fmt = kv_format(name)
        about = [side.about for side in (fmt.k, fmt.v)]
        yield dict(name=name, bits_per_element=fmt.nbytes(4096, shape) * 8 / (2 * 4096 * 128),
                   about=(about[0] if about[0] == about[1] else f"K {about[0]}; V {about[1]}"))


def probes() -> Iterator[dict]:
    """Probes with their metrics, and why they cannot run here."""
    from kvlab.attention import VariantRef, trial
    from kvlab.probes import probes as registry
    from kvlab.shapes import AttentionShape, Workload
    workload = Workload.decode(AttentionShape(8, 2, 64), kv_len=64)
    for name in registry:
        why = registry[name]().why_not(trial(VariantRef("naive"), workload))
        yield dict(name=name, cannot_run_here=why or "", metrics=list(registry[name].metrics),
                   runs="on request" if getattr(registry[name], "on_request", False) else "",
                   about=_first_line(registry[name]))


def studies() -> Iterator[dict]:
    """Studies with their sizes."""
    from kvlab.studies._run import studies as registry
    for name in registry:
        yield dict(name=name, sizes=list(registry[name].SIZES), about=_first_line(registry[name]))


def figures() -> Iterator[dict]:
    """Figures with the study whose rows they draw."""
    from kvlab.figures import figures as registry
    for name in registry:
        yield dict(name=name, study=registry[name].STUDY or "", about=_first_line(registry[name]))


def texts() -> Iterator[dict]:
    """Texts that models are scored on, all of them offline, and why they cannot be had here."""
    from kvlab.accuracy.texts import texts as all_of
    for source in all_of():
        yield dict(name=source.name, cannot_run_here=source.why_not or "", about=source.about)


def metrics() -> Iterator[dict]:
    """Metrics of all probes and studies with their units."""
    from kvlab.probes import probes as registry
    from kvlab.studies._run import studies as all_studies
    for name in registry:
        for metric, unit in registry[name].metrics.items():
            yield dict(name=metric, unit=unit, origin=f"probe {name}")
    for name in all_studies:
        for metric, unit in getattr(all_studies[name], "METRICS", {}).items():
            yield dict(name=metric, unit=unit, origin=f"study {name}")


def engines() -> Iterator[dict]:
    """Serving engines and what they do with their KV cache, one answer a line; empty = no source at hand."""
    from kvlab.catalog.engines import engines as all_of
    for found in all_of().values():
        for aspect, cell in found.cells.items():
            yield dict(name=found.name, aspect=aspect, what=cell.what, version=cell.version, source=cell.source)


def runs(out: Path | str = "profiles") -> Iterator[dict]:
    """The runs of a folder, the newest first, and why one cannot be read."""
    from kvlab.record.held import held_by
    from kvlab.record.query import opened
    from kvlab.record.store import read_workers
    if not Path(out).is_dir() and not any(sign in str(out) for sign in (":", "*")):
        raise ValueError(f"there is no folder {out} with runs here; `kvlab run memory_wall` makes one, --out names "
                         "another")
    with opened((out,)) as store:
        counts = store.counts()
        bad = {str(one.path): one.why for one in store.bad}
        known = {run["path"]: run for run in store.runs.values()}
    for path in sorted({*bad, *known}, key=lambda path: Path(path).name, reverse=True):
        run = known.get(path, {})
        comparisons, readings, failed = counts.get(run.get("run_id"), (None,) * 3 if path in bad else (0,) * 3)
        try:
            owner, workers = held_by(Path(path)), len(read_workers(Path(path)))
        except (ValueError, OSError):                       # damage beside the readings, which do without
            owner, workers = None, 0
        name = run.get("run_id") or Path(path).name
        planned = run.get("cases")
        state = ("damaged" if path in bad else f"being written by {owner}" if owner else
                 f"{comparisons:,} of {planned:,} cases" if planned and comparisons < planned else run["state"])
        created = run.get("created_utc", "")                # 2026-01-02 03:04:05
        yield dict(name=name[-6:], run_id=name, study=run.get("study", Path(path).parent.name),
                   size=run.get("size", ""), device=run.get("device", ""), created_utc=created and f"{created}Z",
                   when=created[:16], comparisons=comparisons, readings=readings, failed=failed, state=state,
                   workers=workers or None, engine=run.get("engine", ""), machine=_machine(run), path=path,
                   problem=bad.get(path, ""))


def _machine(run: dict) -> str:
    """What the run was made on, short: its GPUs where it used them, else its CPU."""
    cpu = re.sub(r"\((R|TM)\)| CPU\b| Processor\b| @.*", "", run.get("cpu", "")).strip()
    return run.get("gpus") if run.get("device", "").startswith("cuda") and run.get("gpus") else \
        f"{cpu}, {run['cores']} cores" if cpu and run.get("cores") else cpu


def brief(rows: list[dict]) -> list[dict]:
    """Of runs what a line of the terminal has room for; of other lists all."""
    if not rows or "when" not in rows[0]:
        return rows
    left_out = {"run_id", "created_utc", "path", "problem"}
    if all(row["engine"] in ("local", "") for row in rows):
        left_out.add("engine")
    return [{name: value for name, value in row.items() if name not in left_out} for row in rows]


def _first_line(thing) -> str:
    return (thing.__doc__ or "").strip().split("\n")[0]


LISTS = {f.__name__: f for f in (models, gpus, variants, formats, probes, studies, figures, metrics, texts,
                                   engines, runs)}
