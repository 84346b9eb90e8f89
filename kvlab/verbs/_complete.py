"""Names that the shell completes. Folders are listed, not imported: a completion must not wait for torch."""
from __future__ import annotations

from collections.abc import Callable, Iterable


def _folder(what: str, package: str) -> Callable[[], Iterable[str]]:
    from kvlab.registry import Registry
    return Registry(what, package).names


def _formats() -> list[str]:
    from kvlab.kv.formats import format_names
    return format_names() + format_names(sizes_only=True)


def _models() -> Iterable[str]:
    from kvlab.catalog.models import aliases, models
    return (*models(), *aliases())


def _gpus() -> Iterable[str]:
    """Without spaces, which a shell would part them at: `gpu` reads letters and digits alone too."""
    from kvlab.catalog.gpus import gpus
    return (name.replace(" ", "-") for name in gpus() if "(" not in name)


def _claims() -> Iterable[str]:
    from kvlab.claims import claims
    return ("show", *claims())


def _lists() -> Iterable[str]:
    from kvlab.listing import LISTS
    return LISTS


def _workloads() -> Iterable[str]:
    from kvlab.catalog import rows
    return dict.fromkeys(row["workload"] for row in rows("workloads.csv"))


NAMES: dict[str, Callable[[], Iterable[str]]] = {
    "studies": _folder("study", "kvlab.studies"), "figures": _folder("figure", "kvlab.figures"),
    "variants": _folder("variant", "kvlab.attention"), "probes": _folder("probe", "kvlab.probes"),
    "formats": _formats, "models": _models, "gpus": _gpus, "claims": _claims, "lists": _lists, "workloads": _workloads,
}


def names(what: str) -> Callable[[str], list[str]]:
    """What completes a name of that list, or the last one of several with commas between."""
    def completed(incomplete: str) -> list[str]:
        before, comma, begun = incomplete.rpartition(",")
        return [before + comma + name for name in NAMES[what]() if name.startswith(begun)]
    return completed


def words(*allowed: str) -> Callable[[str], list[str]]:
    """What completes one of these words, or the last one of several with commas between."""
    def completed(incomplete: str) -> list[str]:
        before, comma, begun = incomplete.rpartition(",")
        return [before + comma + word for word in allowed if word.startswith(begun)]
    return completed
