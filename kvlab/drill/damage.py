"""Files of a run are damaged: flipped bits, cuts, swapped and doubled parts, zeroed pages, lost and repeated lines."""
from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from kvlab.drill._base import Broken, Chain, Place
from kvlab.record.environment import Manifest
from kvlab.record.held import read_owner
from kvlab.record.store import RunStore, read_table, read_workers

TIMES = 20
COPIES = 15                     # of a run, each damaged otherwise, before one is gone on with
CASES = 40
JOURNAL, PARQUET = "readings.jsonl", "readings.parquet"
FILES = (JOURNAL,) * 6 + (PARQUET,) * 3 + ("manifest.json", "workers.json", "owner.json")
PLACES = {"gpu0": {"cpu": "a", "memory_bytes": 2**36}, "gpu1": {"cpu": "b", "memory_bytes": 2**37}}


def strike(place: Place) -> None:
    """Damage copies of a run: each file gives its own content or one sentence, and a run can be completed."""
    rng = place.rng
    whole = place.chain(place.tinies(CASES))
    whole.complete()
    for worker, machine in PLACES.items():
        RunStore.open(whole.path).met(worker, machine)
    cut = place.chain(place.tinies(CASES))                  # killed before it was closed
    victim = cut.start()
    victim.wait_told(CASES // 2)
    victim.kill()
    cut.check(victim)
    while place.next():
        for _ in range(COPIES):
            _read(place, rng.choice((whole, cut)), rng)
        _gone_on_with(place, whole, rng)


def _read(place: Place, chain: Chain, rng: random.Random) -> None:
    run = place.new_folder() / chain.path.name
    shutil.copytree(chain.path, run)
    name = _damaged(run, rng)
    place.tally.hit += 1
    truth = _rows(RunStore.open(chain.path).rows())
    what = f"a damaged {name}"
    problems: list[str] = []
    if store := _or_sentence(partial(RunStore.open, run), what):
        problems = store.problems
        if store.manifest != Manifest.read(chain.path):
            place.tally.wrong.append(f"{what} is read as another one")
        _judged(place, _rows(store.rows()), truth, bool(problems), what)
    for path in (run, run / JOURNAL, run / PARQUET):
        if path.exists() and (table := _or_sentence(partial(read_table, path), what)) is not None:
            _judged(place, _rows(table.to_dict("records")), truth, bool(problems), what)
    if _or_sentence(partial(read_workers, run), what) not in (None, read_workers(chain.path)):
        place.tally.wrong.append(f"{what} is read as another one")
    read_owner(run)
    shutil.rmtree(run.parent)


def _gone_on_with(place: Place, whole: Chain, rng: random.Random) -> None:
    chain = place.chain(list(whole.cases.values()))
    run = chain.out / "soak" / whole.path.name
    shutil.copytree(whole.path, run)
    name = _damaged(run, rng)
    if (store := _or_sentence(partial(RunStore.open, run), f"a damaged {name}")) is None:
        shutil.copy(whole.path / name, run)                 # refused: whoever has another copy of it can go on
    chain.told = set((store or RunStore.open(run)).committed)
    chain.complete()


def _damaged(run: Path, rng: random.Random) -> str:
    name = rng.choice([name for name in FILES if (run / name).exists()])
    data = (run / name).read_bytes()
    (run / name).write_bytes(rng.choice(DAMAGES)(data, rng))
    return name


def _or_sentence(read: Callable, what: str):
    try:
        return read()
    except (ValueError, KeyError, OSError) as error:
        sentence = str(error.args[0]) if isinstance(error, KeyError) else str(error)
        if "\n" in sentence or not sentence:
            raise Broken(f"{what} gives no sentence but {sentence!r}") from error
        return None


def _rows(rows: Iterable[dict]) -> dict[str, list[dict]]:
    """The rows by case, without what is blank."""
    found: dict[str, list[dict]] = {}
    for row in rows:
        found.setdefault(row["comparison_id"], []).append(
            {name: value for name, value in row.items() if value == value and value not in (None, "")
             and str(value) != "<NA>"})
    return found


def _judged(place: Place, rows: dict[str, list[dict]], truth: dict, said: bool, what: str) -> None:
    place.tally.lost += 0 if said else len(set(truth) - set(rows))
    for name, own in rows.items():
        if own != truth.get(name):
            if len(own) == 2 * len(truth.get(name, ())):
                place.tally.doubled += 1
            else:
                place.tally.half += 1
            place.tally.wrong.append(f"{what} is read as if it were right, with other rows of {name}")


def _flip(data: bytes, rng: random.Random) -> bytes:
    flipped = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[:rng.randrange(len(data))]


def _hole(data: bytes, rng: random.Random) -> bytes:
    at, end = sorted(rng.randrange(len(data)) for _ in range(2))
    return data[:at] + data[end:]


def _doubled(data: bytes, rng: random.Random) -> bytes:
    at, end = sorted(rng.randrange(len(data)) for _ in range(2))
    return data[:end] + data[at:]


def _zeroed(data: bytes, rng: random.Random) -> bytes:
    size = rng.choice((16, 512, 4096))
    at = rng.randrange(len(data)) // size * size
    return data[:at] + bytes(len(data[at:at + size])) + data[at + size:]


def _swapped(data: bytes, rng: random.Random) -> bytes:
    size = rng.choice((64, 512, 4096))
    blocks = [data[at:at + size] for at in range(0, len(data), size)]
    one, other = (rng.randrange(len(blocks)) for _ in range(2))
    blocks[one], blocks[other] = blocks[other], blocks[one]
    return b"".join(blocks)


def _lines_about(data: bytes, rng: random.Random) -> bytes:
    """Lines swapped, lost, doubled, or written over others."""
    lines = data.splitlines(keepends=True)
    for _ in range(rng.choice((1, 2, 8))):
        one = rng.randrange(len(lines))
        other = min(len(lines) - 1, max(0, one + rng.randrange(-4, 5)))
        match rng.randrange(4):
            case 0:
                lines[one], lines[other] = lines[other], lines[one]
            case 1:
                lines[one] = lines[other]
            case 2:
                lines.insert(one, lines[other])
            case _ if len(lines) > 1:
                del lines[one]
    return b"".join(lines)


DAMAGES = (_flip, _flip, _cut, _hole, _doubled, _zeroed, _swapped, _lines_about, _lines_about)
