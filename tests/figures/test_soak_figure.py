"""The figure of soak, from made rows: which numbers lie where, however many cases and workers there were."""
import json
from dataclasses import asdict

import pytest

from kvlab.figures import figures, make
from kvlab.record.reading import Reading, missing, table


def rows(worker, n, *, gap=0.5, memory=lambda i: 100.0, files=lambda i: 7.0, at=1000.0):
    """A worker's n cases, answered every `gap` seconds from `at` on; files None: a system that doesn't tell."""
    for i in range(n):
        case = f"{worker}-{i}"
        held = missing("worker_files", "count", "no /proc", source="/proc/self/fd") if files is None else \
            Reading("worker_files", files(i), "count", "measured")
        for reading in (Reading("finished_s", at + gap * i, "s", "measured", hardware="A CPU"), held,
                        Reading("worker_memory", memory(i), "B", "measured")):
            yield dict(run_id="20261129T181422Z-8a68e5", study="soak", device="cpu", worker=worker, replica=0,
                       comparison_id=case, case_id=case, **asdict(reading))


def legend(figure):
    return [text.get_text() for one in figure.legends for text in one.get_texts()]


def test_answers_over_time_and_what_was_held_in_units_of_the_second_tenth():
    made = table([*rows("", 100, memory=lambda i: 50.0 if i < 20 else 75.0)])
    figure = make("soak", made.iloc[::-1])                      # committed in any order
    answered, held = figure.axes
    even, line = answered.lines
    assert list(line.get_xdata()) == [0.5 * i for i in range(100)] and list(line.get_ydata()) == list(range(1, 101))
    assert list(even.get_xdata()) == [0, 49.5] and list(even.get_ydata()) == [1, 100]
    memory, files = held.lines
    assert list(memory.get_ydata()) == [1] * 20 + [1.5] * 80 and set(files.get_ydata()) == {1}
    assert memory.get_xdata()[19] == 0.2 and held.get_ylim()[1] > 1.5 and held.get_ylim()[0] <= 0.9
    assert legend(figure) == ["this machine (100 cases)", "memory", "open files", "an even pace"]
    assert "A CPU" in figure.get_supxlabel() and "measured" in figure.get_supxlabel()


def test_a_long_run_is_thinned_and_no_peak_is_lost():
    made = table([*rows("", 3000, gap=0.001, memory=lambda i: 900.0 if i == 1234 else 100.0)])
    chosen = figures["soak"].select(made)
    ends = chosen[chosen["metric"] == "finished_s"]
    answered = [json.loads(case)["answered"] for case in ends["case"]]
    assert answered == sorted(answered) and answered[0] == 1 and answered[-1] == 3000 and len(answered) == 201
    assert (chosen["metric"] == "worker_memory").sum() == 200 and set(chosen["case_id"]) <= set(made["case_id"])
    memory = make("soak", made).axes[1].lines[0]
    assert max(memory.get_ydata()) == 9 and memory.get_xdata()[memory.get_ydata().argmax()] == 1235 / 3000


def test_a_line_for_each_worker_on_its_own_clock_and_too_many_are_counted():
    two = make("soak", table([*rows("a/0", 40), *rows("b/0", 20, at=9e6, gap=1.0)]))
    lines = [line for line in two.axes[0].lines if line.get_linestyle() == "-"]
    assert [(line.get_xdata()[-1], line.get_ydata()[-1]) for line in lines] == [(19.5, 40), (19, 20)]
    assert len({line.get_color() for line in lines}) == 2
    assert legend(two)[:2] == ["a/0 (40 cases)", "b/0 (20 cases)"]
    many = make("soak", table([row for i in range(12) for row in rows(f"n{i:02}", 10)]))
    assert legend(many)[0] == "12 workers, a line each (120 cases)" and len(many.axes[0].lines) == 24


def test_what_a_system_does_not_tell_and_a_run_too_short_for_tenths_are_drawn_without():
    figure = make("soak", table([*rows("", 100, files=None)]))
    assert len(figure.axes[1].lines) == 1 and "/proc/self/fd gave nothing: no /proc" in figure.get_supxlabel()
    short = make("soak", table([*rows("", 3)]))
    assert len(short.axes[0].lines) == 2 and not short.axes[1].lines
    for given in (table([]), table([*rows("", 1)])):
        with pytest.raises(ValueError, match="figure soak needs finished_s.*kvlab run soak"):
            make("soak", given)
