"""Readers of traces: what each format gives, what is refused with which line, and that memory does not grow."""
import gzip
import json
import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_data import shared_data

from kvlab.serving._trace_lines import LONGEST_LINE
from kvlab.serving._trace_summary import Lengths, Reuse, reuse
from kvlab.serving.request import Request
from kvlab.serving.traces import FORMATS, describe, read_trace, write_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
GOOD = {
    "azure": AZURE + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n",
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
                "5,ChatGPT,374,44,418,Conversation log\n9.314579,GPT-4,396,109,505,API log\n",
    "mooncake": '{"timestamp": 7000, "input_length": 374, "output_length": 44, "hash_ids": [3]}\n'
                '{"timestamp": 11314.579, "input_length": 396, "output_length": 109, "hash_ids": [4]}\n',
    "engine_run": '{"request_id": "a", "input_toks": 374, "output_toks": 44, "arrival_time": 1787267980.0}\n'
                  '{"request_id": "b", "input_toks": 396, "output_toks": 109, "arrival_time": 1787267984.314579}\n',
    "kvlab": '{"id": "a", "arrival_s": 0, "prompt_tokens": 374, "output_tokens": 44}\n'
             '{"id": "b", "arrival_s": 4.314579, "prompt_tokens": 396, "output_tokens": 109, "prefix": [4]}\n',
}


@pytest.fixture
def trace(tmp_path):
    """Writes text or bytes to a file and returns its path."""
    def write(content, name="trace"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path
    return write


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("how", ["plain", "bom", "gz", "crlf", "no end"])
def test_every_format_gives_the_same_requests_however_it_is_stored(trace, format, how):
    data = GOOD[format].encode()
    data = {"plain": data, "bom": b"\xef\xbb\xbf" + data, "gz": gzip.compress(data),
            "crlf": data.replace(b"\n", b"\r\n"), "no end": data.rstrip()}[how]
    found = read_trace(trace(data))
    one, two = found
    assert found.format == format and found.read == 2 and found.note() == ""
    assert (one.arrival_s, one.prompt_tokens, one.output_tokens) == (0.0, 374, 44)
    assert (two.prompt_tokens, two.output_tokens) == (396, 109)
    assert two.arrival_s == pytest.approx(4.314579, abs=2e-6)
    assert two.prefix == ((4,) if format in ("mooncake", "kvlab") else ()) and two.piece_tokens == 512
    assert (one.id, two.id) == {"azure": ("2", "3"), "burstgpt": ("2", "3"), "mooncake": ("1", "2")}.get(
        format, ("a", "b"))


def test_the_2024_azure_times_and_the_8_columns_of_burstgpt_3_are_read(trace):
    azure = trace(AZURE + "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 02:00:01.017335+02:00,2399,6\n", "a")
    assert [r.arrival_s for r in read_trace(azure)] == [0, pytest.approx(1.007405)]
    burst = trace("Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
                  "19440110.0,1722ac82,43,GPT-4,906,446,1352,Conversation log\n", "b")
    assert list(read_trace(burst)) == [Request("2", 0.0, 906, 446)]


def test_requests_that_failed_in_burstgpt_are_counted_not_refused(trace):
    found = read_trace(trace(GOOD["burstgpt"] + "12,GPT-4,300,0,300,API log\n"))
    assert len(list(found)) == 2 and found.failed == 1 and found.skipped == 0
    assert found.note() == "left out: 1 that failed in the trace itself"


M = '{"timestamp": %s, "input_length": %s, "output_length": %s, "hash_ids": %s}\n'
K = '{"id": "%s", "arrival_s": %s, "prompt_tokens": %s, "output_tokens": 5%s}\n'


@pytest.mark.parametrize("format, line, why", [
    ("azure", "2023-11-16 18:15:51,0,5\n", "ContextTokens '0'; it must be a whole number from 1"),
    ("azure", "2023-11-16 18:15:51,-3,5\n", "ContextTokens '-3'"),
    ("azure", "2023-11-16 18:15:51,nan,5\n", "ContextTokens 'nan'"),
    ("azure", "2023-11-16 18:15:51,1_000,5\n", "ContextTokens '1_000'"),
    ("azure", "2023-11-16 18:15:51,5,1000000000\n", "GeneratedTokens '1000000000'"),
    ("azure", "2023-11-16 18:15:51,5\n", "has 2 values for 3 columns"),
    ("azure", "yesterday,5,5\n", "TIMESTAMP 'yesterday'; it must be a time such as"),
    ("azure", '"2023,5,5\n', "is no line of CSV"),
    ("burstgpt", "inf,GPT-4,5,5,10,x\n", "Timestamp 'inf'; it must be a finite number"),
    ("burstgpt", "nan,GPT-4,5,5,10,x\n", "Timestamp 'nan'"),
    ("burstgpt", "12,GPT-4,0,5,5,x\n", "Request tokens '0'"),
    ("mooncake", M % ("NaN", 5, 5, "[1]"), "has NaN; a number must be finite"),
    ("mooncake", M % (-1, 5, 5, "[1]"), "timestamp -1"),
    ("mooncake", M % ("true", 5, 5, "[1]"), "timestamp True"),
    ("mooncake", M % (12000, 5.0, 5, "[1]"), "input_length 5.0"),
    ("mooncake", M % (12000, 513, 5, "[1]"), "has 1 hash_ids for input_length 513; it takes 2"),
    ("mooncake", M % (12000, 512, 5, "[1, 2]"), "has 2 hash_ids for input_length 512; it takes 1"),
    ("mooncake", M % (12000, 512, 5, '["1"]'), "it must be a list of whole numbers"),
    ("mooncake", M % (12000, 512, 5, "[9223372036854775808]"), "whole numbers of at most 64 bits"),
    ("mooncake", M % (12000, 512, 5, "[" + "9" * 50 + "]"), "a whole number of 50 digits"),
    ("mooncake", '{"timestamp": 12000, "input_length": 5}\n', "has no output_length"),
    ("mooncake", "[1, 2]\n", "is no JSON object"),
    ("mooncake", "[" * 100_000 + "\n", "nested too deeply"),
    ("mooncake", '{"timestamp": 12000, "input_', "is not JSON"),
    ("engine_run", '{"request_id": "b", "input_toks": 5, "output_toks": 5, "arrival_time": 1787267985}\n',
     "has the id 'b', as a line before it"),
    ("engine_run", '{"request_id": 7, "input_toks": 5, "output_toks": 5, "arrival_time": 1787267985}\n',
     "request_id 7; it must be text"),
    ("kvlab", K % ("c", 5, 600, ', "prefix": [1, 2, 3]'), "has 3 pieces in prefix; its prompt has room for 2"),
    ("kvlab", K % ("c", 5, 600, ', "max_tokens": 4'), "max_tokens=4 is below output_tokens=5"),
    ("kvlab", K % ("c", 5, 600, ', "colour": 1'), "colour"),
    ("kvlab", K % ("c", 5, 600, ', "priority": 1.5'), "priority 1.5"),
    ("azure", b"2023-11-16 18:15:51,5,\xff\n", "is not UTF-8 text (byte 23)"),
    ("azure", b"7" * (LONGEST_LINE * 2 + 7) + b"\n", "is longer than 1,048,576 bytes"),
])
def test_a_bad_line_is_refused_by_number_or_skipped_and_counted(trace, format, line, why):
    line = line if isinstance(line, bytes) else line.encode()
    ended = line.endswith(b"\n")
    later = {"azure": b"2023-11-16 18:15:59,7,7\n", "burstgpt": b"99,GPT-4,7,7,14,x\n",
             "mooncake": (M % (99000, 7, 7, "[1]")).encode(), "kvlab": (K % ("z", 99, 7, "")).encode(),
             "engine_run": b'{"request_id": "z", "input_toks": 7, "output_toks": 7, "arrival_time": 1787267999}\n'}
    path = trace(GOOD[format].encode() + line + (later[format] if ended else b""))
    number = GOOD[format].count("\n") + 1
    with pytest.raises(ValueError) as refused:
        list(read_trace(path))
    said = str(refused.value)
    assert f"line {number} " in said and why in said and 'bad="skip"' in said and "\n" not in said and len(said) < 700
    assert ("may be cut off" in said) == (not ended)
    found = read_trace(path, bad="skip")
    assert len(list(found)) == 2 + ended and found.skipped == 1
    assert why in found.first_skipped and "1 bad lines" in found.note()


@pytest.mark.parametrize("content, why", [
    ("", "the file is empty"), ("\n\n", "the file is empty"), ("a,b,c\n1,2,3\n", "no known trace"),
    ('{"a": 1}\n', "no known trace"), ("{oops\n", "the first line is not JSON"),
    (AZURE, "holds no request"), (AZURE + "x,1,1\n", "line 2"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens,ContextTokens\n", "names a column twice"),
    ("TIMESTAMP,ContextTokens\n".encode("utf-16"), "UTF-16"), (b"\x00\x01\x02", "no known trace"),
    (gzip.compress(AZURE.encode() * 3000)[:-9], "damaged or cut-off gzip"),
])
def test_a_file_that_is_no_trace_is_refused_in_one_sentence(trace, content, why):
    with pytest.raises(ValueError, match=why) as refused:
        list(read_trace(trace(content), bad="skip" if "gzip" in why else "refuse"))
    assert "\n" not in str(refused.value)


def test_a_folder_an_unknown_format_and_the_wrong_format_are_refused(trace, tmp_path):
    with pytest.raises(ValueError, match="not a regular file"):
        read_trace(tmp_path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_trace(tmp_path / "none")
    path = trace(GOOD["azure"])
    with pytest.raises(KeyError, match="mooncake"):
        read_trace(path, "mooncak")
    with pytest.raises(ValueError, match="which is no mooncake trace"):
        read_trace(path, "mooncake")
    with pytest.raises(ValueError, match="allowed: refuse, skip"):
        read_trace(path, bad="ignore")


def test_times_that_go_back_are_refused_with_the_advice_and_sorted_on_request(trace):
    path = trace(GOOD["azure"] + "2023-11-16 18:15:46.0000000,7,9\n")
    with pytest.raises(ValueError, match=r"line 4 arrives 4.995\d+ s before line 3.*sort=True"):
        list(read_trace(path))
    with pytest.raises(ValueError, match="sort=True"):
        list(read_trace(path, bad="skip"))                  # a fault of the file, not of the line
    found = list(read_trace(path, sort=True))
    assert [r.prompt_tokens for r in found] == [7, 374, 396]
    assert [r.arrival_s for r in found] == pytest.approx([0, 0.68059, 4.995169])


def test_sorting_is_bounded_and_finds_any_second_id(trace, monkeypatch):
    lines = [K % (i, i, 5, "") for i in range(20)]
    monkeypatch.setattr("kvlab.serving.traces.REMEMBERED", 5)
    path = trace("".join(lines) + K % (3, 30, 5, ""))
    assert len(list(read_trace(path))) == 21                # 3 is further back than what is remembered
    with pytest.raises(ValueError, match="has the id '3'"):
        list(read_trace(path, sort=True))
    with pytest.raises(ValueError, match="has the id '18'"):
        list(read_trace(trace("".join(lines) + K % (18, 30, 5, ""))))
    monkeypatch.setattr("kvlab.serving.traces.MOST_SORTED", 10)
    with pytest.raises(ValueError, match="more than the 10 requests"):
        list(read_trace(path, sort=True))


REQUEST = st.builds(
    lambda i, gap, prompt, output, more, priority, piece, ids: (gap, dict(
        id=f"r{i}", prompt_tokens=prompt, output_tokens=output, max_tokens=None if more is None else output + more,
        priority=priority, piece_tokens=piece, prefix=tuple(ids[:-(-prompt // piece)]))),
    st.integers(0, 10**6), st.floats(0, 1e6), st.integers(1, 10**6), st.integers(1, 10**5),
    st.none() | st.integers(0, 9), st.integers(-5, 5), st.integers(1, 4096),
    st.lists(st.integers(0, 2**60), max_size=9))


@settings(max_examples=40, deadline=None)
@given(st.lists(REQUEST, min_size=1, max_size=9, unique_by=lambda one: one[1]["id"]))
def test_what_is_written_is_read_back_exactly(tmp_path_factory, made):
    time, requests = 0.0, []
    for gap, fields in made:
        time += gap
        requests.append(Request(arrival_s=time, **fields))
    path = tmp_path_factory.mktemp("t") / "own.jsonl"
    assert write_trace(path, iter(requests)) == len(requests)
    assert list(read_trace(path)) == requests
    assert list(path.parent.iterdir()) == [path]


def test_a_trace_that_cannot_be_written_leaves_what_was_there(tmp_path):
    path = tmp_path / "own.jsonl"
    write_trace(path, [Request("a", 0, 1, 1)])
    with pytest.raises(RuntimeError):
        write_trace(path, (_fail() for _ in range(1)))
    assert [r.id for r in read_trace(path)] == ["a"] and list(tmp_path.iterdir()) == [path]


def _fail():
    raise RuntimeError


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300) | st.text(max_size=200).map(str.encode))
def test_no_bytes_raise_anything_but_a_sentence(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("t") / "any"
    for start in (b"", AZURE.encode(), GOOD["mooncake"].encode()):
        path.write_bytes(start + data)
        for bad in ("refuse", "skip"):
            try:
                list(read_trace(path, bad=bad))
            except ValueError as error:
                assert str(error).startswith(str(path))


def test_memory_does_not_grow_with_the_file(tmp_path):
    """10 times the lines, the same peak: what is held is a line, the last ids and the histograms."""
    def peak(lines):
        path = tmp_path / f"{lines}.jsonl"
        rng = random.Random(0)
        with path.open("w") as file:
            for i in range(lines):
                file.write(json.dumps({"request_id": f"bench-{i}", "input_toks": rng.randint(1, 10**5),
                                       "output_toks": rng.randint(1, 10**4), "arrival_time": 1.7e9 + i}) + "\n")
        tracemalloc.start()
        try:
            assert describe(read_trace(path))["count"] == lines
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    import kvlab.serving.traces as module
    module.REMEMBERED, kept = 2_000, module.REMEMBERED
    try:
        small, large = peak(4_000), peak(40_000)
    finally:
        module.REMEMBERED = kept
    assert large < 1.25 * small + 200_000


def test_a_line_without_end_is_not_held(trace):
    path = trace(AZURE.encode() + b"9" * (LONGEST_LINE * 24))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="line 2 is longer than"):
            list(read_trace(path))
        assert tracemalloc.get_traced_memory()[1] < 6 * LONGEST_LINE
    finally:
        tracemalloc.stop()


def test_describe_says_what_the_requests_are_like():
    requests = [Request(str(i), time, length, 10, prefix=ids) for i, (time, length, ids) in enumerate(
        [(0, 100, (1, 2)), (1, 200, (1, 3)), (2, 300, (1, 3, 4)), (12, 400, (5,))])]
    found = describe(requests)
    assert (found["count"], found["duration_s"], found["rate_per_s"]) == (4, 12, 0.25)
    assert found["gap_cv"] == pytest.approx(18**0.5 / 4)    # gaps 1, 1, 10
    assert (found["longest_gap_s"], found["longest_gap_at_s"]) == (10, 2)
    assert found["prompt_tokens"] == dict(mean=250, min=100, max=400, p1=100, p10=100, p25=100, p50=200, p75=300,
                                          p90=400, p99=400)
    assert found["shared_prefix"] == 3 / 8 and found["shared_prefix_note"] == ""
    alone = describe(requests[:1])
    assert alone["rate_per_s"] is alone["gap_cv"] is alone["longest_gap_s"] is None
    with pytest.raises(ValueError, match="no requests"):
        describe([])
    with pytest.raises(ValueError, match="before the one before it"):
        describe(requests[::-1])


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 10**8), min_size=1, max_size=200), st.sampled_from([1, 10, 50, 90, 99, 100]))
def test_a_percentile_is_within_what_is_stated(values, percent):
    lengths = Lengths()
    for value in values:
        lengths.add(value)
    exact = sorted(values)[max(1, -(-len(values) * percent // 100)) - 1]
    assert lengths.percentile(percent) == pytest.approx(exact, rel=0.002)
    assert exact >= 512 or lengths.percentile(percent) == exact


def test_the_same_ids_behind_another_beginning_are_another_prompt():
    requests = [Request("", 0, 1024, 1, prefix=ids) for ids in ((1, 2), (3, 9), (3, 2))]
    assert reuse(requests, [None]) == [1 / 6]               # 3, and not 2, which was behind 1
    assert hash(-1) == hash(-2) and reuse([Request("", 0, 512, 1, prefix=(one,)) for one in (-1, -2)], [None]) == [0]


def test_of_a_full_cache_the_tail_of_the_oldest_prompt_goes_first():
    cache = Reuse(3)
    assert [cache.add(ids) for ids in [(1, 2), (3, 4), (1, 2)]] == [0, 0, 1]
    assert cache.evictions == 2                             # 2, then 4


@pytest.mark.parametrize("name, count, prompt, output, rate", [
    ("azure_2023_conv.csv", 19366, 1154.697, 211.126, 5.5301), ("azure_2023_code.csv", 8819, 2047.848, 27.8825, 2.5664),
    ("mooncake_conversation.jsonl", 12031, 12035.06, 342.619, 3.4012),
    ("mooncake_synthetic.jsonl", 3993, 15325.48, 149.119, 3.9060)])
def test_the_public_traces_are_read_whole(name, count, prompt, output, rate):
    found = describe(read_trace(shared_data(f"traces/{name}")))
    assert found["count"] == count
    assert found["prompt_tokens"]["mean"] == pytest.approx(prompt, rel=1e-5)
    assert found["output_tokens"]["mean"] == pytest.approx(output, rel=1e-5)
    assert found["rate_per_s"] == pytest.approx(rate, rel=1e-4)


@pytest.mark.parametrize("name, shares", [
    ("conversation", [0.0445, 0.1118, 0.3257, 0.3664]), ("synthetic", [0.0841, 0.2793, 0.6242, 0.6396])])
def test_an_lru_cache_over_the_mooncake_traces_has_the_known_hit_rates(name, shares):
    """Research section 4: conversation 4.5 % at 1k blocks, 11.0 % at 5k, 32.6 % at 30k, 36.6 % without a limit."""
    requests = read_trace(shared_data(f"traces/mooncake_{name}.jsonl"))
    assert reuse(requests, [1000, 5000, 30000, None]) == pytest.approx(shares, abs=1e-4)


def test_the_engine_runs_are_read():
    found = read_trace(shared_data("engine_runs/rtx4090_llama-3.1-8b/requests.jsonl"))
    requests = list(found)
    assert found.format == "engine_run" and len(requests) == 300 and requests[0].id == "bench-0"
    assert (requests[0].prompt_tokens, requests[0].output_tokens, requests[0].arrival_s) == (2358, 531, 0)
    assert requests[1].arrival_s == pytest.approx(0.265091, abs=1e-6)
