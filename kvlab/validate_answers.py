"""What a validation of a GPU's counters settles, question by question, from its rows and its steps."""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import fmean

from kvlab.record.counters import source_name
from kvlab.units import display

TRUSTED = 0.05                  # of the longest window's mean: within it a shorter window is trusted
FROM_MEMORY = 0.5               # of a buffer's bytes: below it a buffer that is read again and again lies in the L2


@dataclass(frozen=True)
class Verdict:
    """One question: what was found, in words and as numbers; or why it stays open."""
    question: str
    answered: bool
    words: str
    numbers: dict = field(default_factory=dict)

    def __str__(self):
        return f"{'answered' if self.answered else 'not answered'}: {self.words}"


def verdicts(rows: list[dict], steps: dict[str, dict]) -> list[Verdict]:
    """The answers of all questions. rows: of the result table; steps: what each step of the validation left."""
    return [_kappa(rows, steps), _permissions(rows, steps), _l2(steps), _shortest(steps), _to_model(rows),
            _gpm_to_ncu(rows), _repeated(rows)]


def summary(rows: list[dict]) -> list[dict]:
    """One line per case: bytes of a call by ncu and by GPM, against the model and each other; the GPU as GPM saw it."""
    named = {row["case_id"]: case_name(row) for row in rows if row["variant"]}
    lines = []
    for case_id, name in named.items():
        def value(source, metric, case_id=case_id):
            return next((r["value"] for r in rows if r["case_id"] == case_id and source_name(r["source"]) == source
                         and r["metric"] == metric), None)
        ncu, gpm = value("ncu", "hbm_bytes"), value("gpm", "hbm_bytes")
        lines.append({"case": name, "ncu": display(ncu, "B"), "GPM": display(gpm, "B"),
                      "ncu ÷ model": value("ncu", "traffic_to_model"),
                      "GPM ÷ model": value("gpm", "traffic_to_model"),
                      "GPM ÷ ncu": gpm / ncu if gpm and ncu else None,
                      **{f"GPM {what}": value("gpm", metric) for what, metric in (
                          ("SM", "sm_utilization"), ("DRAM", "dram_utilization"), ("tensor", "tensor_utilization"))}})
    return lines


def shortest(means: dict[float, float]) -> float | None:
    """Shortest window (s) whose mean, and that of every longer one, is within 5 % of the longest one's; None: none."""
    longest, found = max(means), None
    for seconds in sorted(means, reverse=True):
        if abs(means[seconds] - means[longest]) > TRUSTED * abs(means[longest]):
            break
        found = seconds
    return None if found == longest else found


def _kappa(rows, steps) -> Verdict:
    row = next((r for r in rows if r["metric"] == "gpm_kappa"), None)
    if row is None or row["value"] is None:
        return _open("κ of GPM", row["note"] if row else _why(steps, "kappa"))
    return Verdict("κ of GPM", True, f"{row['value']:.4f} ({row['note']})", dict(kappa=row["value"], low=row["low"],
                                                                              high=row["high"]))


def _permissions(rows, steps) -> Verdict:
    about = steps.get("environment", {})
    if "root" not in about:
        return _open("who may count", _why(steps, "environment"))
    may, said = {}, []
    for name, metric, step in (("gpm", "sm_utilization", "kappa"), ("ncu", "hbm_bytes", "ncu copy")):
        may[name] = any(True for _ in _of(rows, name, metric))
        said.append(f"{name} counts" if may[name] else
                    f"{name} does not ({steps.get(step, {}).get('error') or _absent(rows, name, metric)})")
    words = (f"{'root' if about['root'] else 'not root'}, counters for administrators only: {about['admin_only']}; "
             + ", ".join(said))
    return Verdict("who may count", True, words, may)


def _l2(steps) -> Verdict:
    found = steps.get("L2", {}).get("from_memory")
    if not found:
        return _open("size of the L2", _why(steps, "L2"))
    torch_says = steps["L2"]["torch_bytes"]
    inside = [int(n) for n, share in found.items() if share < FROM_MEMORY]
    outside = [int(n) for n, share in found.items() if share >= FROM_MEMORY and int(n) > max(inside, default=0)]
    words = "even the smallest buffer comes from memory"
    if inside:
        words = (f"of a buffer of {display(max(inside), 'B')}, read again and again, {found[str(max(inside))]:.0%} "
                 "come from memory")
    if outside:
        words += f", of one of {display(min(outside), 'B')} {found[str(min(outside))]:.0%}"
    return Verdict("size of the L2", True, f"{words}; torch says {display(torch_says, 'B')}",
                   dict(torch_bytes=torch_says, held_bytes=max(inside, default=0)))


def _shortest(steps) -> Verdict:
    question, sweep = "shortest trusted window of GPM", steps.get("window sweep", {}).get("dram_utilization")
    if not sweep:
        return _open(question, _why(steps, "window sweep"))
    means = {float(seconds): fmean(told) for seconds, told in sweep.items()}
    found = shortest(means)
    if found is None:
        return _open(question, f"no window shorter than {max(means):g} s is within {TRUSTED:.0%} of it")
    return Verdict(question, True, f"{1e3 * found:g} ms: it and every longer one are within {TRUSTED:.0%} of "
                   f"{max(means):g} s", dict(seconds=found))


def _to_model(rows) -> Verdict:
    return _ratios("ncu ÷ model", {name: row["value"] for name, row in _of(rows, "ncu", "traffic_to_model")},
                   _absent(rows, "ncu", "traffic_to_model"))


def _gpm_to_ncu(rows) -> Verdict:
    ncu, both = dict(_of(rows, "ncu", "hbm_bytes")), dict(_of(rows, "gpm", "hbm_bytes"))
    why = _absent(rows, "gpm", "hbm_bytes") if not both else _absent(rows, "ncu", "hbm_bytes")
    ratios = {name: row["value"] / ncu[name]["value"] for name, row in both.items() if name in ncu}
    return _ratios("GPM ÷ ncu", ratios, why)


def _repeated(rows) -> Verdict:
    """Read amplification where a source tells reads apart, of all traffic where only GPM counted."""
    question = "naive_repeat moves the bytes of MHA"
    for source, metric in (("ncu", "read_amplification"), ("gpm", "traffic_amplification")):
        found = {name: row["value"] for name, row in _of(rows, source, metric) if row["variant"] == "naive_repeat"}
        if found:
            said = _ratios(question, found, "")
            return Verdict(question, True, f"{metric} by {source}: {said.words}", found)
    return _open(question, _absent(rows, "ncu", "read_amplification"))


def _of(rows, source: str, metric: str) -> Iterator[tuple[str, dict]]:
    """(name of the case, row) of a source's metric, where it has a value and was counted."""
    for row in rows:
        if source_name(row["source"]) == source and row["metric"] == metric and row["kind"] == "measured":
            yield case_name(row), row


def case_name(row: dict) -> str:
    """The case of a row in a few words."""
    if not row.get("phase"):
        return row["variant"]
    return f"{row['variant']} {row['phase']} {row['num_q_heads']}:{row['num_kv_heads']}"


def _ratios(question, found: dict[str, float], why: str) -> Verdict:
    if not found:
        return _open(question, why)
    return Verdict(question, True, ", ".join(f"{name} {value:.3g}" for name, value in found.items()), found)


def _absent(rows: Iterable[dict], source: str, metric: str) -> str:
    """Why no case has that number."""
    why = {r["note"] for r in rows
           if source_name(r["source"]) == source and r["metric"] == metric and r["value"] is None}
    return "; ".join(sorted(why)[:2]) or f"{source} was not run: the time was up, or its steps broke"


def _why(steps, name) -> str:
    return steps.get(name, {}).get("error") or f"the step {name} told nothing"


def _open(question, why) -> Verdict:
    return Verdict(question, False, why)
