"""What fuzzing found, each with the input that showed it. What a parser's own tests hold stands there."""
import gzip
import json
import sys
import time
import tracemalloc
import warnings
import zlib

import pytest

from kvlab import cli
from kvlab.catalog import resolve
from kvlab.catalog._files import bytes_of, parse_json, too_dense
from kvlab.catalog.safetensors_file import read_weights
from kvlab.record import journal
from kvlab.record.environment import Manifest
from kvlab.record.reading import COLUMNS
from kvlab.record.tables import read_table
from kvlab.record.trace import load
from kvlab.registry import LONGEST, no_such
from kvlab.serving import _bench_simulated, metrics, names
from kvlab.serving._log_cells import numbers
from kvlab.serving._log_models import find_model
from kvlab.serving._settings import Settings
from kvlab.serving.bench_files import read_bench
from kvlab.serving.lint import lint
from kvlab.serving.scrape import Scrape
from kvlab.serving.scrape import parse as parse_scrape
from kvlab.serving.server_logs import check
from kvlab.serving.startup_log import from_log, parse
from kvlab.serving.traces import read_trace


def peak(call, *given):
    """Bytes that Python held at most while it was called; what it refuses is refused."""
    tracemalloc.start()
    try:
        call(*given)
    except ValueError:
        pass
    finally:
        held = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return held


def cpu_s(call, *given):
    began = time.process_time()
    call(*given)
    return time.process_time() - began


def test_a_small_file_does_not_take_the_memory_of_the_largest_allowed(tmp_path):
    """read(limit) asks for the whole limit at once: 256 MiB for a benchmark's file of a few bytes."""
    path = tmp_path / "a.json"
    path.write_bytes(b"{}")
    assert peak(bytes_of, path, "a file", 2**28) < 2**20
    assert peak(read_bench, path) < 2**22
    (tmp_path / "server.log").write_bytes(b"x")
    assert peak(from_log, tmp_path / "server.log") < 2**20


@pytest.mark.parametrize("piece", ["{},", "[],", '{"a":1},'])
def test_json_of_hardly_anything_but_empty_objects_is_refused_before_it_takes_25_times_its_bytes(tmp_path, piece):
    text = f'{{"a": [{piece * 10**6}0], "traceEvents": []}}'
    assert too_dense(text)
    with pytest.raises(ValueError, match="little but empty lists"):
        parse_json(text.encode(), "a", "a file")
    path = tmp_path / "a.json"
    path.write_text(text)
    assert peak(load, path) < 3 * len(text)
    path.write_text(f'{{"timestamp": 1, "a": [{piece * 10**5}0]}}\n')
    with pytest.raises(ValueError, match="little but empty lists"):
        read_trace(path)


def test_a_torch_trace_is_far_from_too_dense():
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::stack", "pid": 1, "tid": 1, "ts": 1.5, "dur": 2.25, "args": {
        "Input Dims": [[]] * 40, "Input Strides": [[]] * 40, "Concrete Inputs": [""] * 40, "Input type": ["Int"] * 40}}
    assert not too_dense(json.dumps([event] * 5000))


def test_a_file_that_unpacks_to_very_much_more_is_refused_early(tmp_path):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b" " * 2**26))
    with pytest.raises(ValueError, match="200 times its bytes"):
        load(path)
    path.write_bytes(gzip.compress(b"\n" * 2**22))
    with pytest.raises(ValueError, match="100 times its bytes"):
        list(read_trace(path))


def test_an_unknown_name_as_long_as_a_file_is_not_repeated(tmp_path):
    assert len(no_such("model", "a" * 10**6, ["b", "c"]).args[0]) < 3 * LONGEST
    path = tmp_path / "requests"
    path.write_text('{"id": "a", "arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1, "%s": 1}\n' % ("x" * 5000))
    with pytest.raises(ValueError) as error:
        list(read_trace(path))
    assert len(str(error.value).replace(str(path), "")) < 1000


def test_a_hub_id_that_cannot_be_is_refused_in_our_own_words():
    pytest.importorskip("huggingface_hub")
    with pytest.raises(KeyError, match="No id of the Hugging Face hub"):
        resolve.model("a b/c?")


def test_an_index_of_shards_with_a_name_no_file_can_have(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": "9" * 5000 + ".safetensors"}}))
    with pytest.raises(ValueError, match="not a file name beside it") as error:
        read_weights(path)
    assert len(str(error.value).replace(str(path), "")) < 300


def test_numbers_of_thousands_of_digits():
    """int() refuses 4,301 digits in its own words; a float of 310 is infinite, and int() of that an OverflowError."""
    row = parse(f"llama_kv_cache: size = 1.00 MiB ( {'9' * 5000} cells, 1 layers, 1/1 seqs), K (f16): 1.0 MiB, "
                f"V (f16): 1.0 MiB\nllama_context: n_ctx = {'9' * 5000}\n")
    assert "max_model_len" not in row
    assert numbers({"cell": "9" * 300 + "e99"}, "cell") == []
    assert check([{"model": "Qwen/Qwen3-8B", "swap_gib": "9" * 300 + "e99", "cpu_blocks": "9" * 300 + "e99",
                   "engine_version": "vLLM 0.6"}])[0]["verdict"] == "unmatched"
    assert check([{"model": "Qwen/Qwen3-8B", "kv_tokens": "9" * 307}])[0]["verdict"] == "unmatched"
    assert names.key("9" * 5000 + ".1") == (999999999, 1)
    with pytest.raises(ValueError, match="at most"):
        Settings(weights_gib=1e300)


def test_an_image_with_a_tag_of_thousands_of_digits(tmp_path):
    (tmp_path / "Dockerfile").write_text(f"FROM vllm/vllm-openai:v0.{'9' * 5000}\nENV VLLM_NO_SUCH=1\n")
    report = lint([tmp_path / "Dockerfile"])
    assert not report.skipped and [finding.name for finding in report.findings] == ["VLLM_NO_SUCH"]


def test_what_python_says_of_source_is_not_printed_as_ours(tmp_path):
    (tmp_path / "a.py").write_text('x = 1and 2\ny = "\\d"\n')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lint([tmp_path / "a.py"]).files == 1


@pytest.mark.parametrize("name, text", [
    ("a.txt", "from vllm import a" + " " * 60_000 + "b\n"),         # commas between spaces: the square of their number
    ("a.txt", " " * 60_000 + "a"),                                  # a record of rules, with or without a dash
    ("a.txt", "vllm/" * 12_000),                                    # an image's name from every slash on
    ("a.txt", "vllm serve " * 6_000),                               # the lines of all characters behind, each time
    ("a.py", "LLM(" * 8_000 + ")" * 8_000),                         # each call, and again each inside it
    ("a.sh", "".join(f"export VLLM_MAX_CACHE_{n}=1\n" for n in range(2_500))),      # 4 ms a name that is not known
    ("a.sh", "vllm serve m " + " ".join(f"--max-cache-{n}" for n in range(3_000))),
    ("a.yaml", '    command: ["a", "--tp", "2"]\n' * 1_500)])       # the text under a key, for each key beside it
def test_the_linter_takes_no_longer_than_its_text_is_long(tmp_path, name, text):
    """CPU seconds, four times what the slowest takes and more; before, these took 5 to 30 times as long."""
    path = tmp_path / name
    path.write_text(text)
    lint([path])
    least = min(cpu_s(lint, [path]) for _ in range(2))
    assert least < (4 if sys.gettrace() is None else 16)             # coverage counts its lines


def test_a_line_of_a_log_table_that_nothing_explains_is_tried_against_few_models():
    """Each of some 1,500 settings built its model anew, and 64 swap spaces were tried that could not fit: 80 ms."""
    row = dict(model="google/gemma-3-27b-it", kv_tokens="123457", gpu_blocks="7717", cpu_blocks="12345",
               kv_cache_gib="17.33", max_concurrency="3.21", engine_version="vLLM", max_model_len="9999")
    check([row])
    assert cpu_s(check, [row | {"max_model_len": str(n)} for n in range(10_000, 10_010)]) < 1


@pytest.mark.parametrize("line", ["a," * 300_000, "kv_tokens," * 100_000])
def test_a_line_of_hundred_thousand_columns_is_refused(tmp_path, line):
    path = tmp_path / "a.csv"
    path.write_text(line + "\n1\n")
    for read in (check, read_trace, read_bench):
        with pytest.raises(ValueError, match="more than 1,000"):
            read(path)
        assert peak(read, path) < 10 * path.stat().st_size


def test_an_address_of_a_megabyte_is_not_taken_apart():
    with pytest.raises(ValueError, match="must look like"):
        Scrape.of("http://" + "a." * 2**19)


def test_a_metric_of_aiperf_with_a_bracket_and_no_unit(tmp_path):
    """It was refused with "not enough values to unpack"."""
    path = tmp_path / "a.csv"
    path.write_text("Metric,avg,p50\nodd),1,1\nTime to First Token (ms),10,9\n")
    assert read_bench(path).cases[0].stats["ttft"]


def test_a_value_as_long_as_the_file_is_not_repeated_whole(tmp_path):
    config = dict(n_layer=127, n_head=234, hidden_size=[], sliding_window_size=[10**6] * 127)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="nothing says which layers|it has a window of") as refused:
        resolve.model(str(tmp_path / "config.json"))
    assert len(str(refused.value)) < 800 + len(str(tmp_path)), str(refused.value)


def _sealed_line(kind, content):
    return b'{"%s":%s,"crc":"%08x"}\n' % (kind, content, zlib.crc32(content))


@pytest.mark.parametrize("lines", [
    [b"{}\n"] * 200_000,
    [*[_sealed_line(b"row", b'{"comparison_id":"c"}')] * 20_000,
     _sealed_line(b"commit", b'{"comparison_id":"c","count":20000}')]], ids=["damaged lines", "tiny rows"])
def test_a_journal_takes_little_more_memory_than_its_bytes(lines):
    assert peak(lambda: list(journal.read(lines, []))) < 10 * sum(map(len, lines))


def test_a_damaged_manifest_does_not_repeat_a_name_as_long_as_itself(tmp_path):
    content = json.loads(Manifest(study="memory_wall", variants=[dict(ref="a")]).text())
    content["variants"][0]["x" * 3000] = 1
    known = {name: value for name, value in content.items() if name in Manifest.model_fields}
    (tmp_path / "manifest.json").write_text(json.dumps(known))
    with pytest.raises(ValueError, match="damaged at variants.0.xxx") as refused:
        Manifest.read(tmp_path)
    assert len(str(refused.value).replace(str(tmp_path), "")) < 400


def test_a_model_named_by_thousands_of_words():
    """Every part of the name was looked up, however long: the cube of its words."""
    assert cpu_s(find_model, "x1 " * 3000, "") < 1
    assert cpu_s(find_model, "m q1" + "0" * 60 + "?", "") < 1, "a pattern that tried every way to part the zeros"
    assert find_model("Hermes 3 " * 100 + "Llama 3.1 8B", "")[0].name == find_model("Llama 3.1 8B", "")[0].name


@pytest.mark.parametrize("numbers", ["--gpus 2147483647", f"--gpus {'9' * 300}", f"--max-len {'9' * 400}",
                                     f"--blocks 9 --max-num-seqs {'9' * 400}"])
def test_a_plan_of_numbers_that_nothing_has(numbers, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", f"kvlab plan meta-llama/Llama-2-7b-hf --gpu H200 {numbers}".split())
    began = time.process_time()
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (0, 2) and time.process_time() - began < 1
    out, err = capsys.readouterr()
    assert len(err) < 1000 and "Traceback" not in err and (ended.value.code == 0) == (not err)


def test_a_sample_whose_time_or_value_no_float_holds():
    sums = "".join(f'# TYPE vllm:prefix_cache_{name}_total counter\nvllm:prefix_cache_{name}_total {"9" * 400}\n'
                   for name in ("hits", "queries"))
    assert metrics.read(parse_scrape(sums), 0.0).counters == {}
    with pytest.raises(ValueError, match="line 1 of its answer is no metric"):
        parse_scrape(f"a 1 {'9' * 400}\n")


def test_a_count_beyond_64_bits(tmp_path):
    (tmp_path / "a.json").write_text('{"backend": "vllm", "model_id": "m", "completed": 9223372036854775808, '
                                     '"duration": 1.5, "request_throughput": 2.0, "mean_tpot_ms": 2.0}')
    with pytest.raises(ValueError, match="column 'n' .* beyond 64 bits"):
        read_bench(tmp_path / "a.json").table()


@pytest.mark.parametrize("names", [_bench_simulated.COLUMNS, COLUMNS])
def test_a_csv_with_a_line_of_more_cells_than_its_first(names, tmp_path):
    """pandas makes an index of thousands of levels of them."""
    path = tmp_path / "a.csv"
    path.write_text(f"{','.join(names)}\n{'1,' * 5000}1\n")
    read = read_bench if names is _bench_simulated.COLUMNS else read_table
    began = time.process_time()
    with pytest.raises(ValueError, match="cannot be read.*a line has more cells than the first"):
        read(path)
    assert time.process_time() - began < 1


def test_an_unknown_name_of_one_letter(tmp_path):
    """It has no pairs of letters, and some known names have none either."""
    (tmp_path / "a.py").write_text("from vllm import SamplingParams\nSamplingParams(f=0.7, max_tokens=8)\n")
    assert [found.name for found in lint([tmp_path]).findings] == ["f"]


def test_a_time_of_a_simulated_request_that_no_float_holds(tmp_path):
    line = ["1"] * len(_bench_simulated.COLUMNS)
    line[1] = "9" * 400
    (tmp_path / "a.csv").write_text(f"{','.join(_bench_simulated.COLUMNS)}\n{','.join(line[:-1])},\n")
    with pytest.raises(ValueError, match="is no number"):
        read_bench(tmp_path / "a.csv")
