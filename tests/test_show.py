"""What files say of themselves reaches the terminal as text only, and whatever it is, no traceback."""
import contextlib
import gzip
import io
import json
import re
import unicodedata
from dataclasses import asdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlab.attention import trial
from kvlab.record._merged import _events
from kvlab.record.reading import Reading, missing
from kvlab.record.trace import read_trace
from kvlab.record.trace_summary import summary
from kvlab.shapes import AttentionShape, Workload
from kvlab.show import print_check, print_list, print_readings, print_scores, print_trace, print_traces, printable

HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\n\x7f\x9b31m\u202eevil\u2066"
SHOWN = "\\x1b]0;owned\\x07\\x1b[2J\\r\\n\\x7f\\x9b31m\\u202eevil\\u2066"
json_value = st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=4),
                          lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner,
                                                                                      max_size=3), max_leaves=6)


def test_control_characters_and_bidi_overrides_are_shown_as_escapes():
    assert printable(HOSTILE) == SHOWN
    assert printable("\ud800") == "\\ud800" and printable("a\u2028b") == "a\\u2028b"
    for plain in ("naive, K÷V 漢字 é [odd] C:\\x1b ☃ \u200d", "مرحبا"):
        assert printable(plain) == plain
    assert printable(ValueError("a\tb")) == "a\\tb"


@given(st.text())
def test_nothing_that_is_printed_controls_a_terminal(text):
    shown = printable(text)
    assert not any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in shown)
    assert not re.search("[\u202a-\u202e\u2066-\u2069]", shown) and printable(shown) == shown


def x(name, ts, dur, cat="cpu_op", **args):
    return dict(ph="X", name=name, ts=ts, dur=dur, cat=cat, pid=1, tid=HOSTILE, args=args)


def printed(tmp_path, capsys, data):
    (tmp_path / "a.json").write_text(json.dumps(data))
    opened = read_trace(tmp_path / "a.json")
    print_trace("a.json", opened.about, summary(opened), 5)
    print_traces([tmp_path / "a.json"])
    return "".join(capsys.readouterr())


def test_names_in_a_trace_reach_the_terminal_as_text(tmp_path, capsys):
    shown = printed(tmp_path, capsys, {"kvlab": {"variant": HOSTILE, "trial": {"kv_format": HOSTILE}}, "traceEvents": [
        x("kvlab:call " + HOSTILE, 0, 100, "user_annotation"), x(HOSTILE, 0, 10), x("aten::gather", 50, 5, **{
            "Input Dims": [[9]], "Input type": ["float"]}), x("launch", 20, 1, "cuda_runtime", correlation=1),
        x(HOSTILE, 20, 60, "kernel", correlation=1), x(HOSTILE, 20, 60, "kernel")]})
    assert set(shown) <= set(map(chr, range(32, 127))) | set("\nµ×…")            # as `cat -v` would show it
    assert shown.count("owned") >= 6 and "evil" in shown and "kernel of (no operator): 1 × " in shown


def test_reasons_and_rows_reach_the_terminal_as_text(capsys):
    print_check([dict(name="cell", status=status, remark=HOSTILE, kernel_error=None)
                 for status in ("failed", "skipped")], dict(ok=0, failed=1, oom=0, skipped=1))
    print_list([dict(name=HOSTILE, number=1, about="[bold]:car:", many=["a", HOSTILE])])
    shown = "".join(capsys.readouterr())
    assert shown.count(SHOWN) == 4 and "[bold]:car:" in shown and "\x1b" not in shown


def test_a_source_is_named_where_a_metric_has_several_and_says_once_what_it_says_of_all_its_numbers(capsys):
    long = "D1 32 KiB, last level 1 MiB, " + "no prefetcher, " * 8
    rows = [asdict(r) for r in (
        Reading("hbm_bytes", 1e6, "B", "modelled", source="roofline"),
        Reading("hbm_bytes", 2e6, "B", "simulated", source="callgrind", note=long),
        Reading("write_allocate_bytes", 3e6, "B", "simulated", source="callgrind", note=long),
        *(missing(f"sensor_{i}", "W", "no driver", source=source) for source in ("nvml", "gpm") for i in range(5)),
        *(missing(name, "ratio", "no driver", source="gpm") for name in ("other", "sm_utilization")))]
    print_readings(rows, trial("naive", Workload.decode(AttentionShape(4, 2, 16), kv_len=64)))
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("hbm_bytes ") and line.rstrip().endswith("roofline:") for line in lines)
    assert any(line.startswith("hbm_bytes ") and "callgrind: D1 32 KiB" in line for line in lines)
    assert any(line.startswith("write_allocate_bytes ") and line.rstrip().endswith(" as above") for line in lines)
    assert sum("no driver" in line for line in lines) == 1
    assert any(line.startswith("sm_utilization, sensor_0, sensor_1 and 4 more ") and "nvml, gpm: no driver" in line
               for line in lines), "what most people look for is named"


@pytest.mark.parametrize("about", [
    [], "x", 3, {"variant": ["a"]}, {"trial": []}, {"trial": {"workload": ["kv_lens"]}},
    {"trial": {"workload": {"kv_lens": 3}}}, {"trial": {"workload": {"kv_lens": [1, "2"]}, "kv_format": {}}}])
def test_metadata_of_another_type_is_left_out(tmp_path, capsys, about):
    shown = printed(tmp_path, capsys, {"kvlab": about, "traceEvents": [x("aten::mm", 0, 5)]})
    assert "a.json: a trace, whole trace, 5 µs" in shown and "1 traces; name one:" in shown and "kv_len" not in shown


about = st.fixed_dictionaries({}, optional=dict(
    variant=json_value, version=json_value, trial=json_value | st.fixed_dictionaries({}, optional=dict(
        kv_format=json_value, workload=json_value | st.fixed_dictionaries(dict(kv_lens=json_value))))))
field = {name: json_value for name in ("ts", "dur", "pid", "tid", "cat", "id")}
event = st.fixed_dictionaries(dict(
    ph=st.sampled_from(["X", "M", "s", "f", "B"]) | json_value,
    name=st.sampled_from(["aten::mm", "thread_name", "kvlab:call x"]) | json_value, args=json_value), optional=field)
timed = st.fixed_dictionaries(dict(
    ph=st.just("X"), name=st.sampled_from(["aten::where", "aten::_softmax", "kvlab:call x"]), ts=st.integers(0, 99),
    dur=st.integers(0, 99), cat=st.sampled_from(["cpu_op", "kernel", "cuda_runtime", "user_annotation"]),
    args=st.dictionaries(st.sampled_from(["Input Dims", "Input type", "Input Strides", "Concrete Inputs", "correlation",
                                          "External id"]), json_value)), optional=dict(pid=json_value, tid=json_value))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.fixed_dictionaries(dict(traceEvents=st.lists(event | timed | json_value, max_size=6)),
                             optional=dict(kvlab=about | json_value, schemaVersion=json_value)))
def test_no_trace_crashes_what_prints_or_merges_it(tmp_path, data):
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(json.dumps(data).encode()))
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        opened = read_trace(path)
        print_trace(path, opened.about, summary(opened), 5)
        print_traces([path])
    out.getvalue().encode()
    merged = "\n".join(json.dumps(one, allow_nan=True) for one in _events(path, 1, "label"))
    assert '"name": "label"' in merged


@pytest.mark.parametrize("change, said", [(0.02, "loss above 0.1 %"), (-0.02, "gain above 0.1 %"),
                                          (0.0, "change below 0.1 %")])
def test_a_gain_is_not_called_a_loss(capsys, change, said):
    import pandas as pd

    from kvlab.accuracy.scoring import compare
    frame = pd.DataFrame(dict(document="a", window=0, position=range(256), token=1, nll=2.0 + change, nll_reference=2.0,
                              kl=0.01, top1=True))
    print_scores({"int8/token": compare(frame)})
    assert said in capsys.readouterr().out


def test_what_is_undecided_says_the_width_that_more_tokens_would_give(capsys):
    import numpy as np
    import pandas as pd

    from kvlab.accuracy.scoring import compare
    noise = np.random.default_rng(0).normal(scale=0.05, size=256)
    found = compare(pd.DataFrame(dict(document="a", window=0, position=range(256), token=1, nll=2 + noise,
                                      nll_reference=2.0, kl=0.01, top1=True)), margin=0.002)
    print_scores({"int8/token": found})
    said = " ".join(capsys.readouterr().out.split())
    assert found.verdict == "inconclusive" and f"±0.1 % would take {found.n_needed:,} tokens, here 256" in said
