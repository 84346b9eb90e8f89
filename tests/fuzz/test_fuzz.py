"""Some hundred hostile inputs for each parser; `make fuzz` takes a hundred thousand. fuzz_guard says what must hold."""
import os
import re
import signal
import time
from random import Random

import pytest
from fuzz_cli import CLI_TARGETS
from fuzz_engine import Inputs, Tally, by_hypothesis
from fuzz_guard import judge
from fuzz_hostile import large
from fuzz_targets import Target, targets, warm
from hypothesis import given, settings
from hypothesis import strategies as st

TARGETS = targets()
COUNT = 150


@pytest.mark.parametrize("name", TARGETS)
def test_hostile_inputs_are_accepted_or_refused_in_a_sentence(name, tmp_path_factory):
    target, folder = TARGETS[name], tmp_path_factory.mktemp("in")
    warm(target, folder)
    assert all(judge(target, data, folder).found == "" for data in Inputs(target).unchanged())
    tried = []

    @settings(max_examples=COUNT, database=None)
    @given(Inputs(target).strategy())
    def holds(data):
        outcome = judge(target, data, folder, memory=len(tried) % 50 == 0)
        tried.append(outcome.accepted)
        assert not outcome.found, f"{outcome.where}: {outcome.found}"
    holds()
    assert len(tried) >= COUNT // 2


@pytest.mark.parametrize("name", ["config", "trace", "trace_gz", "requests", "log_table", "startup_log", "lint_yaml"])
def test_patterns_that_cost_most_for_their_length(name, tmp_path_factory):
    target, folder = TARGETS[name], tmp_path_factory.mktemp("large")
    warm(target, folder)
    for data in large(target.seeds()[:1], target.wrap, 2**16):
        outcome = judge(target, data, folder)
        assert not outcome.found, f"{data[:20]!r}: {outcome.found}"


def bad(read, errors=(ValueError, KeyError, OSError)):
    return Target("bad", "a", read, lambda: [b"a"], errors=errors)


def raises(error):
    def read(path):
        raise error
    return read


def reads(path):
    (path.parent.parent / "other").read_bytes()


def writes(path):
    (path.parent.parent / "other").write_text("")


def starts(path):
    os.system("true")


def hangs(path):
    began = time.process_time()
    while time.process_time() - began < 20:
        try:
            time.process_time()
        except Exception:
            pass


@pytest.mark.parametrize("read, found", [
    (raises(TypeError("x")), "raises TypeError"), (lambda path: int("x"), "nobody raised on purpose"),
    (lambda path: {}["a"], "nobody raised on purpose"), (raises(ValueError("")), "without a word"),
    (raises(ValueError("a" * 2000)), "says 2,000 characters"), (lambda path: Random().choice([]), "raises IndexError"),
    (reads, "outside of its folder"), (writes, "opens .*other.* to write, outside"), (starts, "os.system"),
    (hangs, "takes more than 1 s"), (lambda path: bytearray(2**25), "holds 33,")])
def test_the_guard_finds_what_must_not_be(read, found, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (tmp_path / "other").write_text("secret")
    outcome = judge(bad(read), b"x" * 10, folder, memory=found.startswith("holds"))
    assert re.search(found, outcome.found), outcome.found
    assert (tmp_path / "other").read_text() == "secret" and signal.getitimer(signal.ITIMER_PROF)[0] == 0
    assert judge(bad(lambda path: path.read_bytes()), b"x", folder).accepted


def test_a_tally_keeps_the_shortest_input_of_each_finding_and_adds_up(tmp_path):
    tally = Tally("bad")
    by_hypothesis(bad(lambda path: int(path.read_text("latin1"))), 60, 1, tmp_path, tally)
    assert tally.inputs == 60 and len(tally.findings) == 1
    (found, data, count), = tally.findings.values()
    assert "nobody raised on purpose" in found and count > 30
    tally.save(tmp_path / "tally.json")
    again = Tally.load(tmp_path / "tally.json")
    again.add_all(tally)
    assert again.inputs == 120 and list(again.findings.values())[0][1:] == [data, 2 * count]


def test_the_command_line_is_parsed_and_never_run(tmp_path):
    ran = []
    parse = CLI_TARGETS[0]
    (tmp_path / "arguments").write_bytes(b"check\nsdpa")
    parse.read(tmp_path / "arguments")
    assert not ran
    for wrong in (b"--install-completion", b"size\n--download"):
        (tmp_path / "arguments").write_bytes(wrong)
        try:
            parse.read(tmp_path / "arguments")
        except parse.errors:
            pass


@given(st.binary(max_size=200), st.integers(0, 2**32))
def test_any_bytes_can_be_changed_and_wrapped(body, number):
    for name in ("gguf", "safetensors", "trace_gz", "journal", "config"):
        inputs, chance = Inputs(TARGETS[name]), Random(number)
        assert isinstance(inputs.whole(chance, inputs.body(chance, body)), bytes)
