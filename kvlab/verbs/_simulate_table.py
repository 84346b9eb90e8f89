"""What `kvlab simulate` prints for people: nothing that --json does not give too."""
from __future__ import annotations

from kvlab.show import printable
from kvlab.show_serving import table_of
from kvlab.units import display

_MEASURES = (("ttft", "TTFT"), ("tpot", "TPOT"), ("e2e", "end to end"))


def _seconds(value: float | None) -> str:
    return "–" if value is None else display(value, "s")


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:+.1f} %"


def _step_time(time: dict, in_full: bool) -> str:
    """One line on where the step time comes from, or all that is known of it."""
    return f"step time, {time['kind']}: {time['source'] if in_full else time['device'] + ', ' + time['brief']}"


def print_simulation(summary: dict, about: dict, first_rejected: str, in_full: bool = False) -> None:
    """The summary of a simulation: times, counts, and what it rests on; in_full: with the sources' whole text."""
    time, blocks = about["step_time"], about["blocks"]
    print(printable(f"{about['model']} on {about['replicas']} × {about['tp']} {time['device']}, {blocks['value']:,} "
                    f"blocks a replica ({blocks['kind']}); requests: {about['requests']}; all times simulated"))
    if "find_rate" in about:
        found = about["find_rate"]
        said = " and ".join(f"{name.removesuffix('_s').replace('_', ' ')} < {_seconds(limit)}"
                            for name, limit in found["limits"].items())
        print(f"highest rate with {said}: {found['rate']:.4g} requests/s (simulated; {found['above']:.4g} is too many; "
              f"{found['simulations']} simulations of the same requests); at that rate:")
    names = (("queue", "queue"), *_MEASURES)
    table_of({"": "left", "mean": "right", "p50": "right", "p90": "right", "p99": "right"},
             [(title, *(_seconds(summary[f"{name}_{s}_s"]) for s in ("mean", "p50", "p90", "p99")))
              for name, title in names])
    ratio, hits = summary["preemption_ratio"], summary["hit_rate"]
    finished = summary["requests"] - summary["rejected"]
    print(f"{finished:,} finished in {_seconds(summary['makespan_s'])}, {summary['steps']:,} steps"
          + (f"; {summary['requests_per_s']:.3g} requests/s, {summary['tokens_per_s']:,.0f} generated tokens/s"
             if summary["requests_per_s"] else ""))
    print(f"{summary['preemptions']:,} preemptions"
          + (f" ({100 * ratio:.1f} % of finished)" if ratio is not None else "")
          + (f"; prefix hits {100 * hits:.1f} % of prompt tokens" if hits is not None else ""))
    if summary["rejected"]:
        print(printable(f"{summary['rejected']:,} rejected, the first: {first_rejected}"))
    if about["left_out"]:
        print(printable(about["left_out"]))
    print(printable(_step_time(time, in_full) + ("; in-sample: those runs served this model" if time["in_sample"]
                                                 else "; not in-sample")))
    print(printable(f"blocks: {blocks['source']}"))
    for path in about["written"]:
        print(printable(f"wrote {path}"))


def print_replay(found, in_full: bool = False) -> None:
    """A replayed run: real, simulated, error; then what was used; in_full: with the sources' whole text."""
    print(printable(f"{found.run}: {found.requests:,} requests compared; error = simulated ÷ real − 1"))
    rows = [("makespan", *_row(found, "makespan"))]
    rows += [(f"{title} {s}", *_row(found, f"{name}_{s}")) for name, title in _MEASURES
             for s in ("mean", "p50", "p90", "p99")]
    table_of({"": "left", "real": "right", "simulated": "right", "error": "right"}, rows)
    for name, value in found.series_mae.items():
        unit = " points" if name == "kv_cache_pct" else " requests"
        said = value if isinstance(value, str) else f"mean absolute error {value:.2f}{unit}"
        print(f"time series, {name}: {said}")
    blocks, time = found.blocks, found.step_time
    print(printable(f"blocks of a replica: {blocks['value']:,} ({blocks['source']})"
                    + (f"; kvlab plan: {blocks['modelled']:,} ({_percent(blocks['modelled_error'])})"
                       if blocks["modelled_error"] is not None else "")))
    print(printable(_step_time(time, in_full)))
    if time["in_sample"]:
        print(printable(f"in-sample: {time['in_sample']}"))
    used = {name: fact for name, fact in found.scheduler.items() if name != "blocks"}
    print(printable("; ".join(f"{name} {fact['value']} ({fact['source']})" for name, fact in used.items())))
    for why, count in found.left_out.items():
        print(printable(f"left out: {count:,} {why}"))
    for note in found.notes:
        print(printable(f"note: {note}"))


def _row(found, name: str) -> tuple[str, str, str]:
    return _seconds(found.real[name]), _seconds(found.simulated[name]), _percent(found.errors[name])


def print_explanation(parts: dict) -> None:
    """Each of block count and step time swapped for the true one, and what is left."""
    names = ("makespan", "ttft_mean", "ttft_p99", "tpot_mean", "e2e_mean", "e2e_p99")
    table_of({"blocks": "left", "step time": "left", **dict.fromkeys(names, "right")},
             [(f"{row['blocks']} {row['num_blocks']:,}", f"{row['step_time']} × {row['scale']:.3f}",
               *(_percent(row["errors"][name]) for name in names)) for row in parts["rows"]])
    table_of({"of the error": "left", **dict.fromkeys(names, "right")},
             [({"blocks": "block count", "step_time": "step time", "scheduler": "scheduler, the rest"}[part],
               *(_percent(errors[name]) if errors else "–" for name in names))
              for part, errors in parts["split"].items()])
    if parts["missing"]:
        print(printable(f"block count: {parts['missing']}"))
