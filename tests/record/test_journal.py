"""A journal cut or changed anywhere gives its undamaged comparisons exactly, and nothing else."""
import io
import json
import zlib
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.record.journal import _COMMIT, _line, encode, read
from kvlab.record.reading import Reading, complete, missing


def rows_of(name):
    """A comparison's rows with a number, text that is not ASCII, and a missing reading."""
    readings = [Reading("latency_s", 1.5, "s", "measured", n=30, note="µs"), missing("power", "W", "no sensor")]
    return [{"comparison_id": name, "case_id": f"{name}-{i}", "kv_len": 4096, **asdict(reading)}
            for i, reading in enumerate(readings)]


def replay(data):
    """The committed comparisons with their rows, and what was dropped."""
    problems = []
    committed = list(read(io.BytesIO(data), problems))
    assert all(line in data for one in committed for line in one.lines)
    return {one.comparison_id: list(one.rows) for one in committed}, problems


@pytest.fixture(scope="module")
def journal():
    """A small journal of three comparisons: its bytes, its rows by comparison, and the end of each."""
    groups = {name: [complete(row) for row in rows_of(name)] for name in ("c1", "c2", "c3")}
    parts = [encode(name, rows) for name, rows in groups.items()]
    ends = [sum(map(len, parts[:i + 1])) for i in range(3)]
    assert replay(b"".join(parts)) == (groups, [])
    return b"".join(parts), groups, ends


def test_a_journal_cut_at_any_byte_keeps_exactly_its_committed_prefix(journal):
    data, groups, ends = journal
    for cut in range(len(data)):
        committed, problems = replay(data[:cut])
        whole = sum(end <= cut for end in ends)
        assert committed == dict(list(groups.items())[:whole])
        assert len(problems) == (cut not in (0, *ends)), cut


@pytest.mark.parametrize("change", [lambda byte: byte ^ 1, lambda byte: byte ^ 0x80, lambda byte: ord("\n"),
                                    lambda byte: ord("0")], ids=["bit", "high bit", "newline", "digit"])
def test_a_changed_byte_costs_its_own_comparison_and_no_other(journal, change):
    data, groups, ends = journal
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] = change(data[position])
        if damaged == data:
            continue
        hit = next(i for i, end in enumerate(ends) if position < end)
        lost = {f"c{hit + 1}"}
        if position + 1 == ends[hit] and hit < 2:                        # the line break between two comparisons
            lost.add(f"c{hit + 2}")
        committed, problems = replay(bytes(damaged))
        assert committed == {name: rows for name, rows in groups.items() if name not in lost}, position
        assert problems and all("\n" not in problem for problem in problems)
        assert any(name in problem for name in lost for problem in problems)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_damage_never_invents_changes_or_doubles_a_comparison(journal, data):
    original, groups, _ = journal
    a, b = sorted(data.draw(st.integers(0, len(original))) for _ in range(2))
    middle = data.draw(st.sampled_from([b"", original[a:b] * 2, original[:b], b"\n", b"\xff" * (b - a)]) |
                       st.binary(max_size=20))
    committed, _ = replay(original[:a] + middle + original[b:])
    assert all(groups[name] == rows for name, rows in committed.items())


@pytest.mark.parametrize(("start", "body"), [
    (b"row", b"{not json"), (b"row", b"[]"), (b"row", b"1"), (b"row", b'{"kv_len":"many"}'), (b"row", b'{"new":1}'),
    (b"row", b"[" * 100_000), (b"commit", b"{}"), (b"commit", b"null"),
    (b"commit", b'{"comparison_id":["c"],"count":0}'), (b"commit", b'{"comparison_id":"c","count":"0"}')])
def test_a_line_with_a_right_checksum_that_kvlab_did_not_write_is_damage(start, body):
    line = b'{"%s":%s,"crc":"%08x"}\n' % (start, body, zlib.crc32(body))
    committed, problems = replay(line)
    assert committed == {} and "line 1 is damaged" in problems[0]


def test_a_comparison_committed_twice_counts_once(journal):
    data, groups, ends = journal
    committed, problems = replay(data + data[:ends[0]])
    assert committed == groups
    assert problems == ["readings.jsonl line 12: comparison 'c1' is committed a second time; the first is kept"]


def test_a_problem_lists_a_few_lines_and_comparisons_however_many_there_are(journal):
    data, _, ends = journal
    _, problems = replay(b"x\n" * 1000 + data[:ends[0]])
    assert problems == ["readings.jsonl: line 1, 2, 3, 4, 5 and 995 more is damaged (checksum does not agree), so the "
                        "comparison there counts as not committed and is measured again on --resume"]


def test_a_line_lost_doubled_or_moved_inside_a_comparison_costs_that_comparison(journal):
    data, groups, ends = journal
    lines = data.splitlines(keepends=True)                               # two rows and a commit each
    others = {name: rows for name, rows in groups.items() if name != "c2"}
    for changed in ([3, 3, 5], [4, 4, 5], [4, 3, 5], [3, 5], [4, 5], [3, 3, 4, 5]):
        committed, problems = replay(b"".join(lines[i] for i in (0, 1, 2, *changed, 6, 7, 8)))
        assert committed == others and len(problems) == 1 and "'c2'" in problems[0]


def test_a_journal_of_the_first_kvlab_has_no_checksum_of_rows_in_its_commits(journal):
    data, groups, _ = journal
    old = b"".join(_line(_COMMIT, {"comparison_id": json.loads(line)["commit"]["comparison_id"], "count": 2})
                   if line.startswith(_COMMIT) else line for line in data.splitlines(keepends=True))
    assert old != data and replay(old) == (groups, [])
