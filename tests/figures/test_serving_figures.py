"""The figures of batching, monitoring and capacity, from made rows: which numbers lie where, and what is refused."""
import made_serving as made
import numpy as np
import pytest

from kvlab.figures import make
from kvlab.figures.gantt import LOOKS
from kvlab.record.reading import table


def markers(ax):
    """(x, y) of every marker of an axis."""
    return {(round(float(x), 4), round(float(y), 4)) for line in ax.lines if line.get_marker() not in ("None", "_", "|")
            for x, y in zip(line.get_xdata(), line.get_ydata())}


def legend(figure):
    return [text.get_text() for one in figure.legends for text in one.get_texts()]


def ticks(axis):
    return [text.get_text() for text in axis.get_ticklabels()]


def bars(ax):
    """(x from, x to, y in the middle) of every bar of broken_barh."""
    return [(path.vertices[:, 0].min(), path.vertices[:, 0].max(), path.vertices[:4, 1].mean())
            for made_of in ax.collections for path in made_of.get_paths()]


@pytest.fixture(scope="module")
def batching():
    return made.batching()


NEEDED = {"batching": ("static", "ttft_mean_s"), "batching_policies": ("starvation", "ttft_long_max_s"),
          "batching_limits": ("max_num_seqs", "preemption_ratio"), "gantt": ("gantt_blocks", "blocks_used"),
          "monitoring": ("strip", "firing"), "capacity": ("budget", "safety_factor")}


@pytest.mark.parametrize("name", NEEDED)
def test_a_run_without_the_rows_is_refused_with_what_to_run(name):
    question, metric = NEEDED[name]
    whole = dict(monitoring=made.monitoring, capacity=made.capacity).get(name, made.batching)()
    study = name if name in ("monitoring", "capacity") else "batching"
    lacking = whole[~(whole["case"].str.contains(f'"question": "{question}"') & (whole["metric"] == metric))]
    with pytest.raises(ValueError, match=rf"figure {name} needs {metric} .*'{question}'.*kvlab run {study}"):
        make(name, lacking)
    with pytest.raises(ValueError, match="needs"):
        make(name, table([]))


@pytest.mark.parametrize("name", ["batching", "batching_policies", "batching_limits", "gantt"])
def test_it_is_said_that_the_numbers_are_simulated(batching, name):
    footer = " ".join(make(name, batching).get_supxlabel().split())
    assert "hollow: simulated" in footer and "simulated RTX 4090" in footer


def test_static_and_continuous_over_the_rate(batching):
    figure = make("batching", batching)
    rate, first, used = figure.axes
    assert markers(rate) == {(0.25, 100), (1.5, 600), (0.25, 50), (1.5, 300)}
    assert markers(first) == {(0.25, 0.2), (1.5, 0.2), (0.25, 9), (1.5, 9)} and first.get_yscale() == "log"
    assert {y for _, y in markers(used)} == {0.5, 0.7}
    assert legend(figure) == ["continuous", "static"]


def test_policies_lie_at_their_ratios_by_workload_and_the_starving_at_their_seconds(batching):
    figure = make("batching_policies", batching)
    ratio, wait = figure.axes
    assert ticks(ratio.yaxis) == ["short first", "shortest prefill", "short first"], "fcfs is the line at 1"
    assert markers(ratio) == {(0.7, 0), (1.0, 0), (1.1, 0), (0.3, 1), (2.4, 1), (1.1, 1), (0.87, 2), (0.99, 2),
                              (1.1, 2)}
    assert [text.get_text() for text in ratio.texts] == ["azure_2023_conv", "sharegpt_300"]
    assert ticks(wait.yaxis) == ["fcfs", "short first", "short first, aging 10 s"]
    assert {(20.0, 0), (50.0, 1), (25.0, 2)} <= markers(wait)
    assert ratio.get_ylim()[0] > ratio.get_ylim()[1], "the first policy stands on top"
    assert len(legend(figure)) == 5


def test_a_wild_interval_does_not_press_the_points_together():
    rows = table([*made.policy("short first", 0.7, 1.0, ends=lambda v: (1e-6, 1e6)), *made.starvation()])
    low, high = make("batching_policies", rows).axes[0].get_xlim()
    assert low >= 0.08 and high <= 12


def test_limits_over_the_budget_over_max_num_seqs_and_by_lever(batching):
    figure = make("batching_limits", batching)
    budget, seqs, lever, preempted, lever_preempted = figure.axes
    assert {(512, 60), (65536, 300), (512, 30), (65536, 30)} == markers(budget)
    assert (0.8, 680) in markers(seqs) and (1.0, 0.12) in markers(preempted)
    assert ticks(lever.xaxis) == ["as it is", "25 % more blocks", "max_model_len 2,048"]
    assert markers(lever) == {(0, 700), (1, 750), (2, 830)}
    assert markers(lever_preempted) == {(0, 0.13), (1, 0.1), (2, 0.03)}


def test_spans_and_blocks_of_each_policy(batching):
    figure = make("gantt", batching)
    fcfs, short, blocks, _ = figure.axes
    assert sorted(bars(fcfs)) == [(0, 2, 0), (1, 3, 1), (2, 5, 0), (3, 6, 1)]
    assert fcfs.get_title(loc="left") == "fcfs\n2 preemptions" and short.get_title(loc="left").endswith("0 preemptions")
    assert fcfs.get_ylim()[0] > fcfs.get_ylim()[1], "who arrives first stands on top"
    heights = np.concatenate([path.vertices[:, 1] for one in blocks.collections for path in one.get_paths()])
    assert heights.max() == 9 and [line.get_ydata()[0] for line in blocks.lines] == [10]
    assert legend(figure) == list(LOOKS)


def test_the_incident_its_curves_and_when_each_alarm_was_on():
    figure = make("monitoring", made.monitoring())
    requests, usage, alarms, evicted = figure.axes
    assert [line.get_ydata().max() for line in requests.lines] == [20, 50]
    assert usage.lines[0].get_ydata().max() == 0.97
    assert np.nanmax(evicted.lines[0].get_ydata()) == 10, "blocks per second: 3,000 in 300 s"
    assert ticks(alarms.yaxis) == ["evictions > 0", "KV usage"], "from below"
    on = [bar for bar in bars(alarms) if bar[2] > 0.5]
    np.testing.assert_allclose(on, [(15, 20, 1)])
    assert len(bars(alarms)) == 9 and "burst" in legend(figure)
    burst = requests.patches[0].get_extents().transformed(requests.transData.inverted())
    assert (burst.x0, burst.x1) == pytest.approx((15, 18))


def test_logs_pools_and_factors():
    figure = make("capacity", made.capacity())
    logs, pools, factors = figure.axes
    assert {y for _, y in markers(logs)} == {1.0, 1.1, 2.0} and len(markers(logs)) == 4
    assert markers(pools) == {(5.0, 5.24), (6.0, 6.48), (7.0, 7.0)}, "a pool below 0 has no place on a log axis"
    assert markers(factors) == {(1.29, 0), (1.4, 1), (1.8, 2)} and ticks(factors.yaxis) == ["three", "two", "one"]
    assert "4 logs" in logs.get_xlabel() and "from a log" in legend(figure)
