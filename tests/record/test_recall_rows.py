"""Rows of trained recall models are sorted into tasks and grids, and judged at the longest trained length."""
import json

import pytest

from kvlab.record.reading import Reading, table
from kvlab.record.recall import MATCHED, TASK, TWO_TOKEN, main_cells, recall_rows, trained_length


def rows(task="pair", keys=256, data=None, kv_format="fp32", metric="recall", lengths=(8, 64, 128), pairs=(8, 64)):
    case = json.dumps(dict(task=task, num_keys=keys, pairs=pairs))
    from dataclasses import asdict
    return [dict(run_id="r", case_id=f"{keys}{n}", data=data or f"recall:{task}", kv_format=kv_format, kv_len=n,
                 case=case, **asdict(Reading(metric, 0.5, "ratio", "measured"))) for n in lengths]


def test_one_task_with_one_format_and_only_its_scores():
    every = table(rows() + rows("two_token") + rows(data=TASK + MATCHED) + rows(kv_format="int4/token")
                  + rows(metric="parameters"))
    assert len(recall_rows(every)) == 3 and set(recall_rows(every)["pairs"]) == {8, 64, 128}
    assert set(recall_rows(every, TWO_TOKEN)["pairs"]) == {4, 32, 64}
    assert len(recall_rows(every, TASK + MATCHED)) == len(recall_rows(every, kv_format="int4/token")) == 3
    assert recall_rows(every, "recall:nothing").empty


def test_the_grid_is_the_smallest_set_of_keys():
    every = recall_rows(table(rows() + rows(keys=16384)))
    assert set(main_cells(every)["num_keys"]) == {256} and main_cells(every.iloc[:0]).empty


@pytest.mark.parametrize("given, length", [
    (dict(), 64), (dict(lengths=(8, 128)), 8), (dict(lengths=(128, 256)), 128),
    (dict(task="two_token", lengths=(64, 128, 256)), 128)])
def test_the_longest_length_that_was_trained_and_evaluated(given, length):
    assert trained_length(recall_rows(table(rows(**given)), f"recall:{given.get('task', 'pair')}")) == length
    assert trained_length(recall_rows(table([]))) is None
