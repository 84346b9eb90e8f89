"""A Chrome trace is read whatever is wrong with it, and its times and bytes are those of a trace made by hand."""
import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.record import trace as reader
from kvlab.record._operators import Moved, moved, operator_class
from kvlab.record.export import StoreError
from kvlab.record.trace import read_trace, trace_of
from kvlab.record.trace_summary import NO_OPERATOR, summary


def x(name, ts, dur, cat="cpu_op", pid=1, tid=1, **args):
    return dict(ph="X", name=name, ts=ts, dur=dur, cat=cat, pid=pid, tid=tid, args=args)


def call(ts, dur, **where):
    return x("kvlab:call naive", ts, dur, cat="user_annotation", **where)


def summed(*events):
    return summary(trace_of({"traceEvents": list(events)}))


def shapes(*tensors, kind="float"):
    return {"Input Dims": [list(shape) for shape in tensors], "Input type": [kind] * len(tensors)}


def test_own_time_of_nested_operators_gaps_and_shares():
    found = summed(call(100, 100), x("matmul", 110, 50), x("bmm", 120, 30), x("bmm", 125, 5), x("softmax", 170, 20),
                   x("outside", 10, 50), x("after", 300, 5), x("elsewhere", 110, 50, pid=2))
    by = {row["name"]: row for row in found.operators}
    own = {name: round(row["self_s"] * 1e6, 6) for name, row in by.items()}
    assert own == {"bmm": 30, "matmul": 20, "softmax": 20}            # one inside another of its name is that one's
    assert round(by["bmm"]["total_s"] * 1e6, 6) == 30 and by["bmm"]["calls"] == 2
    (lane,) = found.lanes
    assert round(lane["gap_s"] * 1e6, 6) == 30 and lane["gap_share"] == pytest.approx(0.3)
    assert lane["largest_gap"] in ("between the start and matmul", "between matmul and softmax",
                                   "between softmax and the end")
    assert found.calls == 1 and found.seconds == pytest.approx(100e-6)
    assert sum(row["share"] for row in found.operators) + lane["gap_share"] == pytest.approx(1)


def test_an_operator_that_sticks_out_of_its_parent_takes_from_it_what_lies_inside_only():
    found = summed(call(0, 100), x("a", 0, 50), x("b", 40, 20))
    assert {row["name"]: round(row["self_s"] * 1e6, 6) for row in found.operators} == {"a": 40, "b": 20}
    assert round(found.lanes[0]["busy_s"] * 1e6, 6) == 60


def test_without_calls_the_whole_trace_counts_and_each_process_has_its_own_time():
    found = summed(x("a", 0, 10), x("b", 30, 10), x("c", 1000, 10, pid=2))
    assert found.calls == 0 and found.seconds == pytest.approx(50e-6)
    assert {lane["lane"]: round(lane["gap_s"] * 1e6, 6) for lane in found.lanes} == {"1/1": 20, "2/1": 0}
    assert sum(row["share"] for row in found.operators) == pytest.approx(30 / 50)
    two = summed(call(0, 10), x("a", 0, 10), call(0, 100, pid=2), x("a", 50, 10, pid=2))
    assert two.seconds == pytest.approx(110e-6) and two.operators[0]["calls"] == 2


def test_kernels_stand_beside_the_operator_that_launched_them():
    found = summed(
        call(0, 100), x("aten::mm", 10, 20), x("cudaLaunchKernel", 15, 5, cat="cuda_runtime", correlation=7),
        x("gemm", 60, 25, cat="kernel", pid=0, tid=7, correlation=7), x("aten::add", 31, 5),
        x("cudaLaunchKernel", 32, 1, cat="cuda_runtime", correlation=8),
        x("add_kernel", 95, 5, cat="kernel", pid=0, tid=7, correlation=8),
        x("cudaLaunchKernel", 400, 1, cat="cuda_runtime", correlation=9),
        x("warm-up", 500, 50, cat="kernel", pid=0, tid=7, correlation=9))
    assert [(row["operator"], row["kernel"], row["count"]) for row in found.kernels] == [
        ("aten::mm", "gemm", 1), ("aten::add", "add_kernel", 1)]                     # none of what was launched outside
    assert found.kernel_s == pytest.approx(30e-6) and found.operators[0]["name"] == "aten::mm"
    stream = next(lane for lane in found.lanes if lane["kind"] == "stream")
    assert stream["gap_s"] == pytest.approx(10e-6) and stream["largest_gap"] == "between gemm and add_kernel"
    assert found.operators[0]["self_s"] == pytest.approx(20e-6)                      # a launch is no operator


def launch(ts, number, **where):
    return x("cudaLaunchKernel", ts, 1, cat="cuda_runtime", correlation=number, **where)


def kernel(name, ts, dur, number):
    return x(name, ts, dur, cat="kernel", pid=0, tid=7, correlation=number)


@pytest.mark.parametrize("thread", [1, 2])                           # that of the operators, or one without any
def test_a_kernel_that_a_call_launches_outside_of_any_operator_counts(thread):
    found = summed(call(0, 100), x("aten::empty", 1, 2), launch(5, 3, tid=thread), kernel("flash::decode", 20, 60, 3))
    assert found.kernels == [dict(operator=NO_OPERATOR, kernel="flash::decode", count=1, total_s=pytest.approx(60e-6),
                                  **{"class": "attention"})]
    (alone,) = (row for row in found.operators if row["name"] == NO_OPERATOR)
    assert alone["kernel_s"] == pytest.approx(60e-6) and (alone["calls"], alone["self_s"]) == (0, 0.0)
    assert found.problems == () and [lane["kind"] for lane in found.lanes] == ["thread", "stream"]
    outside = summed(call(0, 100), x("aten::empty", 1, 2), launch(150, 3), kernel("warm", 160, 60, 3))
    assert outside.kernels == [] and outside.problems == ()
    only = summed(call(0, 100), launch(5, 3), kernel("decode", 20, 60, 3))
    assert only.kernel_s == pytest.approx(60e-6)


@pytest.mark.parametrize("number", [4, None, [3], {"a": 1}])
def test_kernels_without_a_launch_are_counted_and_said(number):
    found = summed(call(0, 100), x("aten::mm", 1, 20), launch(5, 3), kernel("gemm", 20, 60, 3),
                   kernel("lost", 80, 7, number), kernel("lost", 90, 7, number))
    assert found.kernel_s == pytest.approx(60e-6)
    assert found.problems == ("2 kernels (14 µs) are left out: their launch is not in the trace, so whether a call "
                              "launched them is unknown",)
    whole = summed(x("aten::mm", 1, 20), kernel("gemm", 20, 60, number))        # without calls every kernel counts
    assert whole.kernels[0]["operator"] == NO_OPERATOR and whole.problems == ()


def test_bytes_count_once_at_the_innermost_operator_and_views_are_free():
    product = shapes([8, 1, 64], [8, 64, 512])
    found = summed(call(0, 100), x("aten::matmul", 0, 50, **product), x("aten::expand", 1, 5, **product),
                   x("aten::bmm", 10, 30, **product), x("aten::resolve_conj", 11, 1, **product),
                   x("aten::index_select", 60, 5, **shapes([4096, 64])),
                   x("aten::cat", 70, 5, **{"Input Dims": [[[2], [2]], []], "Input type": ["TensorList", "Scalar"]}),
                   x("mylib::attn", 80, 5, **shapes([10])))
    sizes = {row["name"]: (row["bytes"], row["bytes_of"]) for row in found.operators if row["bytes_of"]}
    assert sizes == {"aten::bmm": (4 * (8 * 64 + 8 * 64 * 512 + 8 * 512), "inputs + outputs"),
                     "mylib::attn": (40, "inputs")}
    assert set(found.not_counted) == {"aten::index_select", "aten::cat"} and found.bytes == sizes["aten::bmm"][0] + 40


@pytest.mark.parametrize("name, dims, types, strides, expected", [
    ("aten::add", [[4, 1], [3]], ["float", "c10::Half"], None, Moved(16 + 6, 4 * 12)),
    ("aten::mul", [[4, 100]], ["float"], [[1, 0]], Moved(16, 1600)),                # broadcast: it lies there once
    ("aten::copy_", [[10], [10]], ["float", "double"], None, Moved(80, 40)),        # written, not read
    ("aten::fill_", [[10], []], ["float", "Scalar"], None, Moved(0, 40)),
    ("aten::add_", [[10], [10], []], ["float", "c10::Half", "Scalar"], None, Moved(60, 40)),
    ("aten::masked_fill_", [[8, 100], [8, 100], []], ["float", "bool", "Scalar"], None, Moved(4000, 3200)),
    ("aten::masked_fill", [[8, 100], [8, 100], []], ["c10::Half", "bool", "double"], None, Moved(2408, 1600)),
    ("aten::transpose_", [[8, 100]], ["float"], None, None),
    ("aten::index_copy_", [[8, 100], [], [1], [1, 100]], ["float", "Scalar", "long int", "float"], None,
     Moved(why_not="it writes a part of its output that shapes do not tell")),
    ("aten::where", [[8, 100]] * 3, ["bool", "float", "float"], None, Moved(800 + 6400, 3200)),
    ("aten::where", [[8, 100], [8, 100], []], ["bool", "c10::BFloat16", "float"], None, Moved(800 + 1600 + 4, 1600)),
    ("aten::where", [[8, 100], [], []], ["bool", "Scalar", "Scalar"], None, Moved(800, None)),
    ("aten::eq", [[8, 100], []], ["double", "Scalar"], None, Moved(6400, 800)),
    ("aten::logical_and", [[10], [10], [10]], ["float"] * 3, None, Moved(80, 10)),  # the third is out=
    ("aten::mm", [[2, 3], [3, 5], [2, 5]], ["float"] * 3, None, Moved(84, 40)),
    ("aten::exp", [[10]], ["long int"], None, Moved(80, None)),
    ("aten::mul", [[10], []], ["long int", "double"], None, Moved(88, None)),       # the number makes it floating
    ("aten::mul", [[10], []], ["float", "double"], None, Moved(48, 40)),            # the number does not widen it
    ("aten::add", [[10], [10]], ["c10::Half", "c10::BFloat16"], None, Moved(40, 40)),
    ("aten::add", [[10], [10]], ["int", "long int"], None, Moved(120, None)),
    ("aten::add", [[10], [10]], ["float", "c10::complex<float>"], None, Moved(120, None)),
    ("aten::bitwise_and", [[10], [10]], ["bool"] * 2, None, Moved(20, 10)),
    ("aten::mm", [[2, 3], [3, 5]], ["c10::BFloat16"] * 2, None, Moved(2 * 21, 20)),
    ("aten::addmm", [[5], [2, 3], [3, 5]], ["float"] * 3, None, Moved(4 * 26, 40)),
    ("aten::_scaled_dot_product_flash_attention_for_cpu", [[1, 8, 1, 4], [1, 8, 6, 4], [1, 8, 6, 2]], ["float"] * 3,
     None, Moved(4 * (32 + 192 + 96), 4 * 16)),
    ("aten::sort", [[4], []], ["long int", "Scalar"], None, Moved(32, None)),
    ("aten::copy_", [[], [1]], ["float", "double"], None, None),                    # numbers that became tensors
    ("aten::view", [[4]], ["float"], None, None),
    ("aten::add", [[4], "x"], ["float"], None, None),
    ("aten::add", None, None, None, None),
    ("aten::add", [[-1]], ["float"], None, None), ("aten::add", [[True]], ["float"], None, None),
    ("aten::add", [[2]], [["float"]], None, None), ("aten::add", [[2**60]], ["float"], None, None),
])
def test_bytes_of_recorded_shapes(name, dims, types, strides, expected):
    assert moved(name, dims, types, strides) == expected


def test_classes_of_operators():
    assert [operator_class(name) for name in ("aten::scaled_dot_product_attention", "aten::bmm", "aten::_softmax",
                                              "aten::copy_", "aten::view")] == [
        "attention", "matmul", "softmax", "copy", "other"]


GOOD = [call(0, 100), x("aten::mm", 10, 20)]


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
@pytest.mark.parametrize("bare", [True, False])
def test_an_object_or_a_bare_list_plain_or_packed(tmp_path, suffix, bare):
    data = GOOD if bare else {"traceEvents": GOOD, "kvlab": {"variant": "naive"}}
    path = tmp_path / f"a{suffix}"
    path.write_bytes(gzip.compress(json.dumps(data).encode()) if suffix.endswith("gz") else json.dumps(data).encode())
    found = read_trace(path)
    assert summary(found).operators[0]["name"] == "aten::mm" and found.problems == ()
    assert found.about == ({} if bare else {"variant": "naive"})


def test_half_a_json_gives_the_whole_events_before_and_says_so(tmp_path):
    text = json.dumps({"kvlab": {"variant": "naive"}, "traceEvents": [*GOOD, x("lost", 50, 5)]})
    path = tmp_path / "half.json"
    path.write_text(text[:text.index("lost") + 9])
    found = read_trace(path)
    assert "ends in the middle" in found.problems[0] and "the 2 whole events" in found.problems[0]
    assert found.about == {"variant": "naive"} and [e.name for e in found.operators] == ["aten::mm"]
    path.write_text(json.dumps(GOOD)[:-1])                           # a list whose end is missing, as Chrome allows
    assert len(read_trace(path).operators) == 1


def test_a_packed_file_that_is_cut_off_gives_what_came(tmp_path):
    events = [call(0, 1e6), *(x(f"op{i * 7919 % 9973}", i, 0.5, note=str(i**7)) for i in range(60_000))]
    packed = gzip.compress(json.dumps(events).encode())
    (tmp_path / "a.json.gz").write_bytes(packed[:len(packed) // 2])
    found = read_trace(tmp_path / "a.json.gz")
    assert "cut off" in found.problems[0] and 1000 < len(found.operators) < 60_000
    short = gzip.compress(json.dumps([x(f"op{i * 7919 % 9973}", i, 0.5) for i in range(300)]).encode())
    (tmp_path / "b.json.gz").write_bytes(short[:len(short) // 2])
    assert 50 < len(read_trace(tmp_path / "b.json.gz").operators) < 300


def test_an_operator_that_works_counts_beside_copies_inside_it():
    weights, bias = shapes([4096], [8, 64], [64, 4096]), shapes([8, 4096], [4096])
    found = summed(call(0, 100), x("aten::addmm", 0, 50, **weights), x("aten::copy_", 1, 5, **bias),
                   x("aten::softmax", 60, 20, **shapes([8, 64])), x("aten::_softmax", 61, 10, **shapes([8, 64])))
    sizes = {row["name"]: row["bytes"] for row in found.operators if row["bytes_of"]}
    assert sizes == {"aten::addmm": 4 * (4096 + 8 * 64 + 64 * 4096 + 8 * 4096), "aten::copy_": 4 * (4096 + 8 * 4096),
                     "aten::_softmax": 2 * 4 * 8 * 64}


def test_without_shapes_bytes_are_unknown_and_not_0(capsys):
    from kvlab.show import print_trace
    found = summed(call(0, 100), x("aten::mm", 0, 50))
    assert found.bytes is None
    print_trace("a.json", {}, found, 5)
    assert "bytes: unknown, the trace holds no shapes (profile with record_shapes=True)" in capsys.readouterr().out


@pytest.mark.parametrize("content, sentence", [
    (b"", "is no Chrome trace"), (b"hello", "is no Chrome trace"), (b'{"a": 1}', "no list of traceEvents"),
    (b'{"traceEvents": 3}', "no list of traceEvents"), (b"\x00\xff" * 100, "is no Chrome trace"), (b"null", "no list"),
    (b"[" * 100_000, "is no Chrome trace"), (b"\x1f\x8bgarbage", "is no Chrome trace"), (b'{"traceEvents": [', "is no"),
])
def test_what_is_no_trace_is_refused_in_a_sentence(tmp_path, content, sentence):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        read_trace(tmp_path / "a.json")
    with pytest.raises(StoreError, match="there is no trace file"):
        read_trace(tmp_path / "nothing.json")
    with pytest.raises(StoreError, match="there is no trace file"):
        read_trace(tmp_path)


def test_more_than_the_cap_is_refused_without_unpacking_it_all(tmp_path, monkeypatch):
    bomb, unpacked = tmp_path / "bomb.json.gz", []
    with gzip.open(bomb, "wb") as file:
        for _ in range(100):
            file.write(b" " * 10**6)
    read = gzip.GzipFile.read1
    monkeypatch.setattr(gzip.GzipFile, "read1",
                        lambda self, size=-1: unpacked.append(len(got := read(self, size))) or got)
    with pytest.raises(ValueError, match="holds more than 1,000,000 bytes of JSON"):
        reader.load(bomb, 10**6)
    assert 10**6 < sum(unpacked) < 2 * 10**6
    (tmp_path / "large.json").write_bytes(b" " * (10**6 + 1))
    with pytest.raises(ValueError, match="more than 1,000,000"):
        reader.load(tmp_path / "large.json", 10**6)


def test_events_that_cannot_be_used_are_counted_and_said(monkeypatch):
    bad = [x("a", float("nan"), 1), x("a", 0, float("inf")), x("a", 0, -1), x("a", "0", 1), x("a", 0, None),
           x("a", True, 1), x("a", 10**400, 1), x(None, 0, 1), x(3, 0, 1), 7, None, "x", {}]
    odd = [x("aten::mm", 5, 5, pid=[1], tid={"a": 2}), {**x("aten::mm", 5, 5), "args": 3},
           {**x("aten::mm", 5, 5), "cat": ["cpu_op"]}]
    found = trace_of({"traceEvents": [*bad, *odd, *GOOD, dict(ph="B", name="b", ts=0), dict(ph="i", name="i")],
                      "kvlab": 3})
    assert found.problems == ("13 events without a name or a usable time are left out",
                              "1 begin and end events are left out: complete events (ph X) are read")
    assert len(found.operators) == 3 and found.about == {} and summary(found).calls == 1
    monkeypatch.setattr(reader, "MOST_EVENTS", 1)
    assert "only the first 1 of 2 events" in trace_of({"traceEvents": GOOD}).problems[0]


def test_a_trace_of_another_program_is_said():
    found = summed(x("Task", 0, 10, cat="toplevel"), x("Paint", 2, 3, cat="toplevel"))
    assert [row["name"] for row in found.operators] == ["Task", "Paint"]
    assert "no operators of torch" in found.problems[0]
    assert summed().operators == [] and summed().lanes == []
    assert "no operator ran inside" in summed(call(0, 10), x("aten::mm", 50, 1)).problems[0]


times = st.integers(0, 1000)


@given(st.lists(st.tuples(st.sampled_from("abc"), times, times, st.integers(0, 1)), max_size=12))
def test_busy_time_is_within_the_trace_and_own_times_are_within_the_total(events):
    found = summed(*(x(name, ts, dur, tid=tid) for name, ts, dur, tid in events))
    for lane in found.lanes:
        assert 0 <= lane["busy_s"] <= found.seconds + 1e-12
        assert lane["busy_s"] + lane["gap_s"] == pytest.approx(found.seconds)
    for row in found.operators:
        assert 0 <= row["self_s"] <= sum(dur for name, _, dur, _ in events if name == row["name"]) * 1e-6 + 1e-12
        assert row["total_s"] <= sum(dur for name, _, dur, _ in events if name == row["name"]) * 1e-6 + 1e-12


json_value = st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=4),
                          lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                              st.sampled_from(["ph", "name", "ts", "dur", "args", "pid", "Input Dims", "Input type"]),
                              inner, max_size=5), max_leaves=10)


def test_what_json_allows_and_no_text_can_hold_is_replaced(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf{"kvlab": {"variant": "\\ud800"}, "traceEvents": [' + json.dumps(
        x("a\udfffb", 0, 5, note=float("nan"))).encode() + b"]}")
    found = read_trace(path)
    assert found.operators[0].name == "a?b" and found.about == {"variant": "?"}
    deep = "[" * 400 + "]" * 400
    for before in ("", '"\\ud800", '):                               # also where the strict reader stops before
        path.write_text(f'{{"traceEvents": [{before}{{"ph": "X", "args": {deep}}}]}}')
        with pytest.raises(ValueError, match="recursion limit"):
            read_trace(path)


complete = st.fixed_dictionaries(dict(ph=st.just("X"), name=st.just("aten::add"), ts=json_value | times,
                                      dur=json_value | times, args=json_value))


@given(st.lists(json_value | complete, max_size=5))
def test_no_json_crashes_the_reader(events):
    summary(trace_of({"traceEvents": events, "kvlab": events}))
