"""What a validation of a GPU's counters settles, question by question, from its rows and its steps."""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import fmean, median

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
    found = []
    for question, answer in (
            ("κ of GPM", _kappa), ("who may count", _permissions), ("size of the L2", _l2),
            ("shortest trusted window of GPM", _shortest), ("granularity of the energy counter", _granularity),
            ("ncu ÷ model", _to_model), ("GPM ÷ ncu", _gpm_to_ncu),
            ("naive_repeat moves the bytes of MHA", _repeated)):
        try:
            found.append(answer(question, rows, steps))
        except Exception as error:                           # a row or a step that is odd costs one answer
            found.append(_open(question, f"what was found cannot be read: {type(error).__name__}: {error}"))
    return found


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


def shortest(means: dict[float, float | None]) -> float | None:
    """Shortest window (s) whose mean, and that of every longer one, is within 5 % of the longest one's; None: none.

    A window whose mean is None had no number at least once: it and all shorter ones are not trusted.
    """
    longest, found = max(means), None
    for seconds in sorted(means, reverse=True):
        if means[seconds] is None or abs(means[seconds] - means[longest]) > TRUSTED * abs(means[longest]):
            break
        found = seconds
    return None if found == longest else found


def changes(samples: list[tuple[float, float]]) -> dict:
    """How often a polled value changed, and by how much: medians. samples: (s, value) in the order of time."""
    at = [i for i in range(1, len(samples)) if samples[i][1] != samples[i - 1][1]]
    every = [samples[j][0] - samples[i][0] for i, j in zip(at, at[1:])]
    steps = [samples[i][1] - samples[i - 1][1] for i in at]
    return dict(reads=len(samples), changes=len(at), every_s=median(every) if every else None,
                step=median(map(abs, steps)) if steps else None,
                seconds=samples[-1][0] - samples[0][0] if samples else 0.0)


def _kappa(question, rows, steps) -> Verdict:
    row = next((r for r in rows if r["metric"] == "gpm_kappa"), None)
    if row is None or row["value"] is None:
        return _open(question, row["note"] if row else _why(steps, "kappa"))
    return Verdict(question, True, f"{row['value']:.4f} ({row['note']})", dict(kappa=row["value"], low=row["low"],
                                                                              high=row["high"]))


def _permissions(question, rows, steps) -> Verdict:
    about = steps.get("environment", {})
    if "root" not in about:
        return _open(question, _why(steps, "environment"))
    may, said = {}, []
    for name, metric, step in (("gpm", "sm_utilization", "kappa"), ("ncu", "hbm_bytes", "ncu copy")):
        may[name] = any(True for _ in _of(rows, name, metric))
        said.append(f"{name} counts" if may[name] else
                    f"{name} does not ({steps.get(step, {}).get('error') or _absent(rows, name, metric)})")
    words = (f"{'root' if about['root'] else 'not root'}, counters for administrators only: {about['admin_only']}; "
             + ", ".join(said))
    return Verdict(question, True, words, may)


def _l2(question, rows, steps) -> Verdict:
    found = steps.get("L2", {}).get("from_memory")
    if not found:
        return _open(question, _why(steps, "L2"))
    torch_says = steps["L2"]["torch_bytes"]
    inside = [int(n) for n, share in found.items() if share < FROM_MEMORY]
    outside = [int(n) for n, share in found.items() if share >= FROM_MEMORY and int(n) > max(inside, default=0)]
    words = "even the smallest buffer comes from memory"
    if inside:
        words = (f"of a buffer of {display(max(inside), 'B')}, read again and again, {found[str(max(inside))]:.0%} "
                 "come from memory")
    if outside:
        words += f", of one of {display(min(outside), 'B')} {found[str(min(outside))]:.0%}"
    return Verdict(question, True, f"{words}; torch says {display(torch_says, 'B')}",
                   dict(torch_bytes=torch_says, held_bytes=max(inside, default=0)))


def _shortest(question, rows, steps) -> Verdict:
    sweep = steps.get("window sweep", {}).get("dram_utilization")
    if not sweep:
        return _open(question, _why(steps, "window sweep"))
    why = {float(seconds): one for seconds, told in sweep.items() for one in told if isinstance(one, str)}
    means = {float(s): None if float(s) in why else fmean(told) for s, told in sweep.items()}
    lacking = f"; no number at {', '.join(f'{1e3 * s:g} ms ({why[s]})' for s in sorted(why))}" if why else ""
    found = shortest(means)
    if found is None:
        return _open(question, f"no window shorter than {max(means):g} s is within {TRUSTED:.0%} of it{lacking}")
    return Verdict(question, True, f"{1e3 * found:g} ms: out of idleness it and every longer one are within "
                   f"{TRUSTED:.0%} of {max(means):g} s{lacking}", dict(seconds=found))


def _granularity(question, rows, steps) -> Verdict:
    seen = steps.get("sensors", {}).get("energy")
    if not seen or "refused" in seen:
        return _open(question, seen["refused"] if seen else _why(steps, "sensors"))
    if seen["every_s"] is None:
        return _open(question, f"it changed {seen['changes']} times in {seen['seconds']:.2g} s under load")
    power = steps["sensors"].get("power", {})
    beside = f"; instant power every {1e3 * power['every_s']:.3g} ms" if power.get("every_s") else ""
    return Verdict(question, True, f"it changes every {1e3 * seen['every_s']:.3g} ms, by {seen['step'] / 1e3:.3g} J "
                   f"(read {seen['reads']:,} times in {seen['seconds']:.2g} s){beside}",
                   dict(seconds=seen["every_s"], joules=seen["step"] / 1e3, power_s=power.get("every_s")))


def _to_model(question, rows, steps) -> Verdict:
    return _ratios(question, {name: row["value"] for name, row in _of(rows, "ncu", "traffic_to_model")},
                   _absent(rows, "ncu", "traffic_to_model"))


def _gpm_to_ncu(question, rows, steps) -> Verdict:
    ncu, both = dict(_of(rows, "ncu", "hbm_bytes")), dict(_of(rows, "gpm", "hbm_bytes"))
    why = _absent(rows, "gpm", "hbm_bytes") if not both else _absent(rows, "ncu", "hbm_bytes")
    ratios = {name: row["value"] / ncu[name]["value"] for name, row in both.items() if name in ncu}
    return _ratios(question, ratios, why)


def _repeated(question, rows, steps) -> Verdict:
    """Read amplification where a source tells reads apart, of all traffic where only GPM counted."""
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
