"""One line per case; kinds side by side; nothing silently dropped."""
from dataclasses import asdict

import pandas as pd

from kvlab.record.reading import CONTEXT, Reading, missing, table
from kvlab.record.wide import wide


def row(case_id, *reading, variant="sdpa", run_id="r", **fields):
    context = {name: fields.pop(name) for name in list(fields) if name in CONTEXT}
    reading = reading[0] if isinstance(reading[0], Reading) else Reading(*reading, **fields)
    return {"run_id": run_id, "comparison_id": "c", "case_id": case_id, "variant": variant, **context,
            **asdict(reading)}


def test_one_line_per_case_with_kinds_and_intervals():
    lines = wide(table([
        row("b", "latency_s", 0.25, "s", "measured", low=0.2, high=0.3, kv_len=4096),
        row("b", "ideal_bytes", 100, "B", "modelled", kv_len=4096),
        row("a", "latency_s", 0.5, "s", "measured", variant="naive", kv_len=8192),
    ]))
    assert list(lines.columns) == [*CONTEXT, "latency_s", "latency_s_kind", "latency_s_low", "latency_s_high",
                                   "ideal_bytes", "ideal_bytes_kind"]
    assert list(lines.case_id) == ["b", "a"] and list(lines.variant) == ["sdpa", "naive"]    # order of appearance
    assert list(lines.kv_len) == [4096, 8192] and str(lines.kv_len.dtype) == "Int64"
    assert list(lines.latency_s) == [0.25, 0.5] and list(lines.latency_s_kind) == ["measured", "measured"]
    assert lines.latency_s_low[0] == 0.2 and lines.latency_s_high[0] == 0.3 and pd.isna(lines.latency_s_low[1])
    assert lines.ideal_bytes[0] == 100 and pd.isna(lines.ideal_bytes[1]) and pd.isna(lines.ideal_bytes_kind[1])


def test_the_strongest_kind_takes_the_name_and_the_others_stand_beside_it():
    lines = wide(table([
        row("a", "hbm_bytes", 3, "B", "modelled", low=2, high=4), row("a", "hbm_bytes", 1, "B", "measured"),
        row("a", "hbm_bytes", 2, "B", "quoted"), row("b", "hbm_bytes", 5, "B", "modelled"),
    ])).set_index("case_id")
    assert (lines.hbm_bytes["a"], lines.hbm_bytes_kind["a"]) == (1, "measured")
    assert (lines.hbm_bytes_modelled["a"], lines.hbm_bytes_quoted["a"]) == (3, 2)
    assert (lines.hbm_bytes_modelled_low["a"], lines.hbm_bytes_modelled_high["a"]) == (2, 4)
    assert (lines.hbm_bytes["b"], lines.hbm_bytes_kind["b"]) == (5, "modelled")       # the strongest there is
    assert pd.isna(lines.hbm_bytes_modelled["b"])
    assert not {"hbm_bytes_modelled_kind", "hbm_bytes_low", "hbm_bytes_measured"} & set(lines.columns)


def test_rows_of_one_kind_are_numbered_the_stronger_method_first():
    lines = wide(table(row("a", "power", value, "W", "measured", method=method)
                       for value, method in [(1, "profiler:torch"), (2, "derived"), (3, "counter:x"), (4, "counter")]))
    numbered = lines[["power", "power_measured", "power_measured_2", "power_measured_3"]]
    assert numbered.values.tolist() == [[3, 4, 2, 1]]
    assert "power_source" not in lines


def test_several_sources_of_one_kind_are_named_and_the_row_says_where_its_number_is_from():
    def traffic(case_id, value, kind, method, source):
        return row(case_id, "hbm_bytes", value, "B", kind, method=method, source=source, low=value - 1, high=value + 1)
    lines = wide(table([
        traffic("a", 4, "modelled", "formula", "roofline"), traffic("a", 20, "measured", "derived", "gpm"),
        traffic("a", 10, "measured", "counter", "ncu"), traffic("a", 30, "simulated", "cache simulator", "callgrind"),
        traffic("b", 21, "measured", "derived", "gpm"), traffic("b", 5, "modelled", "formula", "roofline"),
        row("a", "latency_s", 1, "s", "measured", source="timer"),
    ])).set_index("case_id")
    a, b = lines.loc["a"], lines.loc["b"]
    assert (a.hbm_bytes, a.hbm_bytes_source, a.hbm_bytes_kind, a.hbm_bytes_low) == (10, "ncu", "measured", 9)
    assert (a.hbm_bytes_gpm, a.hbm_bytes_gpm_high, a.hbm_bytes_simulated, a.hbm_bytes_modelled) == (20, 21, 30, 4)
    assert (b.hbm_bytes, b.hbm_bytes_source, b.hbm_bytes_modelled) == (21, "gpm", 5) and pd.isna(b.hbm_bytes_gpm)
    assert "latency_s_source" not in lines and "hbm_bytes_measured" not in lines


def test_bytes_and_what_is_made_of_them_are_of_one_source_whichever_was_written_first():
    def traffic(value, method, source):
        return [row("a", "hbm_bytes", value, "B", "measured", method=method, source=source),
                *(row("a", metric, value, "ratio", "measured", method="derived", source=source)
                  for metric in ("traffic_amplification", "traffic_to_model"))]
    rows = [traffic(20, "derived", "gpm"), traffic(10, "counter", "ncu 2025.3"), traffic(30, "derived", "other")]
    for order in (rows, rows[::-1]):
        (line,) = wide(table(sum(order, []))).to_dict("records")
        for metric in ("hbm_bytes", "traffic_amplification", "traffic_to_model"):
            assert (line[metric], line[f"{metric}_source"]) == (10, "ncu 2025.3"), metric
        assert (line["traffic_to_model_gpm"], line["traffic_to_model_other"]) == (20, 30)


def test_a_missing_reading_shows_only_where_nothing_is_stronger():
    lines = wide(table([
        row("a", missing("power", "W", "no sensor")), row("a", "power", 7, "W", "modelled"),
        row("b", missing("power", "W", "no sensor")),
    ]))
    assert list(lines.power_kind) == ["modelled", "missing"]
    assert lines.power[0] == 7 and pd.isna(lines.power[1]) and "power_missing" not in lines


def test_a_row_about_the_comparison_is_a_line_of_its_own():
    lines = wide(table([
        row("a", "latency_s", 1, "s", "measured"),
        row("c", "read_ceiling", 9, "B/s", "measured", variant="", scope="comparison"),
    ]))
    assert list(lines.variant) == ["sdpa", ""]
    assert pd.isna(lines.read_ceiling[0]) and lines.read_ceiling[1] == 9 and pd.isna(lines.latency_s[1])


def test_a_context_column_that_varies_within_a_case_is_blank_there():
    lines = wide(table([
        row("a", "x", 1, "s", "measured", model="m", threads=1), row("a", "y", 1, "s", "measured", threads=2),
        row("b", "x", 1, "s", "measured", model="m", threads=1),
    ]))
    assert list(lines.model) == ["m", "m"]                               # blank in one row is no contradiction
    assert pd.isna(lines.threads[0]) and lines.threads[1] == 1


def test_runs_stay_apart_and_other_keys_may_be_chosen():
    rows = table([row("a", "latency_s", 1, "s", "measured", run_id="r1"),
                  row("a", "latency_s", 2, "s", "measured", run_id="r2")])
    assert list(wide(rows).latency_s) == [1, 2]
    together = wide(rows, on=("case_id",))
    assert (together.latency_s[0], together.latency_s_measured[0], together.run_id[0]) == (1, 2, "")


def test_an_empty_table_has_no_lines():
    lines = wide(table([]))
    assert list(lines.columns) == list(CONTEXT) and len(lines) == 0
