"""Formats are ranked on the same tokens, and the front holds what nothing beats."""
import pandas as pd

from kvlab.record.quality import COMMON, TEXTS, comparable, front


def test_a_format_that_was_given_more_text_is_ranked_by_the_common_windows():
    rows = pd.DataFrame([("a", TEXTS, 1.0), ("a", COMMON, 2.0), ("b", TEXTS, 3.0), ("b", "document", 4.0)],
                        columns=["kv_format", "scope", "value"])
    assert comparable(rows)["value"].tolist() == [2.0, 3.0]
    assert comparable(rows[rows["scope"] == "document"]).empty


def test_the_front_holds_no_point_that_one_as_small_beats():
    points = pd.DataFrame([(4, 0.2), (7, 0.01), (7, 0.02), (8, 0.01), (9, 0.05), (11, 0.001)], columns=["size", "kl"])
    assert front(points, "size", "kl").to_numpy().tolist() == [[4, 0.2], [7, 0.01], [11, 0.001]]
    assert front(points[:0], "size", "kl").empty
