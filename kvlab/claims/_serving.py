"""What the claims about serving share: rows of a study by question, names by release, cells of data/engines.csv."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvlab.claims._base import Evidence, Found, Verdict, absent, conditional, outdated, refuted, supported
from kvlab.claims._results import Results
from kvlab.lang import Text


def row(results: Results, study: str, question: str, metric: str, name: str, about: Text, *, unit: str = "",
        **where: object) -> Evidence:
    """The one reading of a metric among a study's rows that ask `question`, where its columns are as given."""
    from kvlab.record.asked import asked
    table = results.rows(study)
    if table is None:
        return results.lacking(study, name, about)
    found = asked(table[table["metric"] == metric], question)
    for column, value in where.items():
        found = found[found[column] == value] if column in found else found[:0]
    return results.reading(study, name, about, found, unit=unit)


def less(one: Evidence, other: Evidence) -> bool | None:
    """Whether one is below the other by their whole intervals: None where these overlap."""
    if other.value is None:
        raise ValueError(f"{other.name} is missing and nothing is compared with it; ask for it with found[...]")
    low, high = (other.value if end is None else end for end in (other.low, other.high))
    return True if one.below(low) else False if one.below(high) is False else None


def times(one: Evidence, digits: int = 2) -> str:
    """A ratio with its interval, as text."""
    text = f"{one.value:.{digits}f} ×"
    return text if one.low is None else f"{text} [{one.low:.{digits}f}, {one.high:.{digits}f}]"


def cell_has(engine: str, aspect: str, word: str, name: str, about: Text) -> Evidence:
    """Whether data/engines.csv says the word of an engine (1 or 0), quoted from the cell's source."""
    from kvlab.catalog.engines import engine as engine_named
    cell = engine_named(engine).cells[aspect]
    if not cell.what:
        return absent(name, about, f"data/engines.csv has no cell {aspect} of {engine}; find a source and fill it",
                      f"data/engines.csv 没有 {engine} 的 {aspect}；请找到来源后补上")
    return Evidence(name, about, float(word in cell.what), "yes/no", "quoted",
                    source=f"{cell.source} ({cell.version}, read {cell.read})")


def by_release(name: str, kind: str, wanted: Sequence[str], what: Text) -> Iterator[Evidence]:
    """How many of the wanted names vLLM's newest release has, and how many any release read ever had.

    kind: env, flag, kwarg or metric. The evidence is called <name>_now and <name>_ever; n = the names.
    """
    from kvlab.serving import names
    table = names.table("vllm")

    def had(one: str, release: str) -> bool:
        if kind == "metric":
            known = names.metric("vllm", one)
            return known is not None and known.exists(release)
        return any(row.exists(release) for row in table.find(kind, one))
    now = sum(had(one, table.newest) for one in wanted)
    ever = sum(any(had(one, release) for release in table.releases) for one in wanted)
    first, last, count = table.releases[0], table.newest, len(table.releases)
    source = f"data/engine_names/vllm.csv, read off {count} releases of vLLM from {first} to {last}"
    for end, value, en, zh in (("now", now, f"names that vLLM {last} has: {what.en}", f"vLLM {last} 有几个：{what.zh}"),
                               ("ever", ever, f"names that any of {count} releases ({first} … {last}) had: {what.en}",
                                f"{count} 个版本（{first} 至 {last}）中出现过几个：{what.zh}")):
        yield Evidence(f"{name}_{end}", Text(en, zh), float(value), "count", "quoted", n=len(wanted), source=source)


def name_judge(instead: Text, otherwise: Callable[[Found], Verdict] | None = None) -> Callable[[Found], Verdict]:
    """The verdict on a name: as it is written, with vLLM's colon, in an older release, or nowhere.

    instead: what to write. otherwise: the judge where the name is there as written; default: supported.
    """
    def judge(found: Found) -> Verdict:
        written = found["written_now"]
        if written.value >= written.n:
            return otherwise(found) if otherwise else supported("vLLM has the name as it is written",
                                                                "vLLM 有这个名字，写法一致")
        if found["written_ever"].value:
            return outdated(f"an older vLLM had the name, the newest does not; {instead.en}",
                            f"旧版 vLLM 有这个名字，最新版没有；{instead.zh}")
        if "colon_now" in found:
            colon, ever = found["colon_now"], found["colon_ever"]
            if colon.value:
                return conditional(
                    f"{colon.value:.0f} of {colon.n} are there, but with a colon: as written a query finds nothing; "
                    f"{instead.en}",
                    f"{colon.n} 个中有 {colon.value:.0f} 个存在，但前缀后是冒号：照原文写查不到数据；{instead.zh}")
            if ever.value:
                return outdated(
                    f"not even with the colon does the newest vLLM have it, an older one did; {instead.en}",
                    f"改成冒号后最新版 vLLM 也没有，旧版曾有；{instead.zh}")
        return refuted(f"no release of vLLM that was read has the name; {instead.en}",
                       f"查过的各版 vLLM 都没有这个名字；{instead.zh}")
    return judge
