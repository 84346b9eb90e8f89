"""Numbers behind the claims on Flash Attention: operations by case, score matrices, bytes behind a simulated cache."""
import json

import pandas as pd
import pytest

from kvlab.claims import flash
from kvlab.claims._results import Results
from kvlab.lang import Text
from kvlab.record.reading import COLUMNS

ABOUT = Text("a", "甲")


class Given(Results):
    """Results of one table, whatever study is asked for."""

    def __init__(self, rows):
        super().__init__()
        self.table = pd.DataFrame(rows).reindex(columns=list(COLUMNS))

    def rows(self, study):
        return self.table


def flops(case, variant, phase, done, needed):
    row = dict(run_id="r", case_id=case, variant=variant, phase=phase, kind="modelled", unit="flop", hardware="cpu")
    return [row | dict(metric="executed_flops", value=done), row | dict(metric="useful_flops", value=needed)]


def test_the_least_work_of_all_cases_counts_and_others_rows_do_not():
    results = Given([*flops("a", "flash", "prefill", 9.0, 8.0), *flops("b", "flash", "prefill", 6.0, 5.0),
                     *flops("c", "flash", "decode", 1.0, 8.0), *flops("d", "naive", "prefill", 2.0, 8.0)])
    found = flash._executed(results, "kernels", "flash", ABOUT, "flash", "prefill")
    assert found.value == pytest.approx(9 / 8) and found.n == 2 and found.kind == "modelled"
    assert flash._executed(results, "kernels", "paged", ABOUT, "paged", "decode").kind == "missing"


def test_scores_of_a_decode_step_grow_with_n_and_those_of_a_prompt_with_its_square():
    found = {one.name: one for one in flash._memory(Results())}
    assert found["decode"].value == 2**20 / 2**24 and found["prefill"].value == 2**32 / 2**24
    assert flash._score_bytes(64, 8192, 8192) == 4 * flash._score_bytes(64, 4096, 4096)


def counted(case, variant, phase, cache, moved, amplification=None):
    shape = {"case": json.dumps({"v": variant, "phase": phase}), "variant": variant, "phase": phase, "replica": 0,
             "case_id": f"{case}-{cache}", "source": "callgrind", "run_id": "r", "hardware": "cpu", "q_len": 8,
             "kv_len": 64, "group_ratio": 1, "head_dim": 16, "kind": "simulated"}
    metrics = {"hbm_bytes": moved, "last_level_bytes": cache, "traffic_to_model": 1.0,
               "read_amplification": amplification}
    return [shape | dict(metric=metric, value=value) for metric, value in metrics.items() if value is not None]


def test_bytes_are_compared_behind_the_same_cache():
    rows = []
    for cache, whole, tiled in ((64, 900.0, 100.0), (128, 400.0, 100.0), (256, 150.0, 100.0)):
        rows += counted("n", "c_naive", "prefill", cache, whole)
        rows += counted("f", "c_flash(q_tile=16)", "prefill", cache, tiled)
        rows += counted("d", "naive", "decode", cache, 1000.0, 1 + cache / 1000)
    found = {one.name: one for one in flash._traffic(Given(rows))}
    assert (found["least"].value, found["most"].value, found["least"].n) == (1.5, 9.0, 3)
    assert found["decode"].value == pytest.approx(1.256)
    nothing = list(flash._traffic(Given(counted("d", "naive", "decode", 64, 1000.0))))
    assert [one.kind for one in nothing] == ["missing"] * 3
