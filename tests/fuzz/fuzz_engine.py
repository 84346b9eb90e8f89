"""Inputs for a target, and what came of them: hypothesis, or atheris where it is installed, over the same property."""
from __future__ import annotations

import json
import os
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from random import Random

import fuzz_guard
from fuzz_guard import Outcome, judge, resident
from fuzz_hostile import MOST, changed, large, words
from fuzz_targets import Target, targets, warm
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

SAMPLE = 50                     # of so many inputs one has its memory measured
LED_TO = 2**12                  # bytes of the longest input that coverage leads to: longer ones say no more
BATCH = 5000                    # inputs of one run of hypothesis, which remembers them all
GROWTH = 2**30                  # bytes by which a process may grow over all its inputs: the engines keep some of them


@dataclass
class Tally:
    """What became of a target's inputs. findings: place and words -> [what is wrong, an input, how many such]."""
    target: str
    inputs: int = 0
    accepted: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0
    longest: bytes = b""
    ratio: float = 0.0                                      # of peak memory to input, of inputs of 64 KiB and more
    findings: dict[str, list] = field(default_factory=dict)

    def add(self, data: bytes, outcome: Outcome, size: int) -> None:
        self.inputs += 1
        self.accepted += outcome.accepted and not outcome.found
        if outcome.peak is None and len(data) <= MOST:
            if outcome.seconds > self.longest_s:
                self.longest_s, self.longest = outcome.seconds, data
        if outcome.peak is not None and size >= 2**16:
            self.ratio = max(self.ratio, outcome.peak / size)
        if outcome.found:
            key = f"{outcome.where} {re.sub('[^A-Za-z ]+', '', outcome.found.partition(':')[0])[:40]}"
            if key not in self.findings or len(data) < len(self.findings[key][1]):
                self.findings[key] = [outcome.found, data, self.findings.get(key, [0, 0, 0])[2]]
            self.findings[key][2] += 1

    def add_all(self, other: Tally) -> None:
        """What another process found of the same target."""
        self.inputs, self.accepted = self.inputs + other.inputs, self.accepted + other.accepted
        self.seconds, self.ratio = self.seconds + other.seconds, max(self.ratio, other.ratio)
        self.longest_s, self.longest = max((self.longest_s, self.longest), (other.longest_s, other.longest))
        for key, (found, data, count) in other.findings.items():
            mine = self.findings.setdefault(key, [found, data, 0])
            if len(data) < len(mine[1]):
                mine[:2] = found, data
            mine[2] += count

    def save(self, path: Path) -> None:
        plain = asdict(self) | {"longest": self.longest.hex(), "findings": {
            key: [found, data.hex(), count] for key, (found, data, count) in self.findings.items()}}
        path.write_text(json.dumps(plain))

    @classmethod
    def load(cls, path: Path) -> Tally:
        plain = json.loads(path.read_text())
        return cls(**plain | {"longest": bytes.fromhex(plain["longest"]), "findings": {
            key: [found, bytes.fromhex(data), count] for key, (found, data, count) in plain["findings"].items()}})


@dataclass
class Inputs:
    """A target's inputs: from a body and a source of chance to the bytes of its file."""
    target: Target

    @cached_property
    def seeds(self) -> list[bytes]:
        return self.target.seeds()

    @cached_property
    def known(self) -> list[bytes]:
        return words(self.seeds)

    def body(self, chance: Random, start: bytes | None = None) -> bytes:
        return changed(chance, chance.choice(self.seeds) if start is None else start, self.seeds, self.known)

    def whole(self, chance: Random, body: bytes) -> bytes:
        """The file of a body; of those that are wrapped some have bytes changed afterwards."""
        data = self.target.wrap(chance, body)
        return changed(chance, data, [data], self.known) if data != body and chance.random() < 0.25 else data

    def strategy(self) -> st.SearchStrategy[bytes]:
        """Mostly seeds changed, the rest built from nothing: JSON with the known names, lines of known words."""
        known = [one.decode("latin1") for one in self.known]
        names = st.sampled_from(known) | st.text(max_size=5)
        leaves = (st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
                  | st.sampled_from(known) | st.sampled_from((0, 1, 2, 64, 2**31, 2**63, 10**30)))
        tree = st.recursive(leaves, lambda inner: st.lists(inner, max_size=4)
                            | st.dictionaries(names, inner, max_size=5), max_leaves=8)
        marks = st.sampled_from(list("{}[]()<>=:;,.'\"`#$%&|\\/-+*~ \t\x00\x1b\u2028é当"))
        line = st.lists(st.sampled_from(known) | marks | st.integers().map(str), max_size=12).map("".join)
        lines = st.lists(line, max_size=8).map("\n".join)

        @st.composite
        def data(draw):
            chance = draw(st.randoms(use_true_random=True))     # a draw for every choice would take ten times as long
            if chance.random() < 0.93:
                return self.whole(chance, self.body(chance))
            text = json.dumps(draw(tree)) if chance.random() < 0.5 else draw(lines)
            return self.whole(chance, text.encode("utf-8", "replace")[:MOST])
        return data()

    def unchanged(self) -> Iterator[bytes]:
        for body in self.seeds:
            yield self.target.wrap(Random(1), body)

    def large(self) -> list[bytes]:
        return large(self.seeds, self.target.wrap)


def by_hypothesis(target: Target, count: int, first: int, folder: Path, tally: Tally) -> None:
    """`count` inputs in batches of different seeds, and before the first batch the unchanged and the large ones."""
    inputs = Inputs(target)

    def take(data: bytes, memory: bool) -> float:
        outcome = judge(target, data, folder, memory)
        tally.add(data, outcome, target.size(data) if memory else 0)
        return outcome.seconds
    if first == 0:
        for data in (*inputs.unchanged(), *inputs.large()):
            if take(data, False) < 1:                       # tracing memory takes several times as long
                take(data, True)
    strategy = inputs.strategy()
    for at in range(0, count, BATCH):
        @seed(first + at)
        @settings(max_examples=min(BATCH, count - at), phases=[Phase.generate], database=None, deadline=None,
                  derandomize=False, suppress_health_check=list(HealthCheck))
        @given(strategy)
        def batch(data):
            take(data, tally.inputs % SAMPLE == 0)
        batch()


def by_atheris(target: Target, count: int, first: int, folder: Path, tally: Tally, done: Callable[[], None]) -> None:
    """`count` inputs led by coverage of kvlab (imported with lines counted before); `done`, then the process ends."""
    import atheris
    inputs = Inputs(target)
    corpus = folder.parent / "corpus"
    corpus.mkdir(exist_ok=True)
    for number, body in enumerate(inputs.seeds):
        (corpus / str(number)).write_bytes(body)

    def take(body: bytes) -> None:
        data = inputs.whole(Random(zlib.crc32(body)), body)
        memory = tally.inputs % SAMPLE == 0
        tally.add(data, judge(target, data, folder, memory), target.size(data) if memory else 0)
        if tally.inputs >= count:
            done()
            os._exit(0)
    atheris.Setup([sys.argv[0], f"-seed={first + 1}", f"-max_len={LED_TO}", "-timeout=600", "-rss_limit_mb=0",
                   "-verbosity=0", "-print_final_stats=0", "-detect_leaks=0", str(corpus)], take,
                  custom_mutator=lambda body, most, chance: inputs.body(Random(chance), body)[:most])
    atheris.Fuzz()


def child(target: str, engine: str, count: int, first: int, place: Path) -> None:
    """One process' share: its tally goes to place/tally.json. Inputs stand in place/in, the current one too."""
    import resource

    folder = place / "in"
    folder.mkdir(parents=True, exist_ok=True)
    began, tally = time.perf_counter(), Tally(target)
    found = targets()[target]
    if engine == "atheris":
        import atheris
        fuzz_guard.LIMIT_S = 3.0                            # code that counts its lines is slower
        with atheris.instrument_imports(include=["kvlab"], enable_loader_override=False):
            warm(found, folder)                             # a target imports its parser when it first reads
    else:
        warm(found, folder)
    held = resident()
    soft = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + 4 * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (soft, resource.getrlimit(resource.RLIMIT_AS)[1]))

    def done() -> None:
        tally.seconds = time.perf_counter() - began
        if resident() - held > GROWTH:
            tally.findings["memory growth"] = [f"the process grew by {resident() - held:,} bytes", b"", 1]
        tally.save(place / "tally.json")
    if engine == "atheris":
        by_atheris(found, count, first, folder, tally, done)
    else:
        by_hypothesis(found, count, first, folder, tally)
        done()


