"""Names that no engine has: every verdict, every kind of file, and files that mean harm."""
import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.serving.lint import lint

ARTICLE = Path(__file__).parents[2].parent / "shared" / "article.zh.txt"


@pytest.fixture
def judged(tmp_path):
    """Write one file, lint it, and give {name: verdict} of all that is not ok, with the report."""
    def run(text, name="x.py", **options):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        report = lint([path], **options)
        assert not report.skipped
        return {finding.name: finding.verdict for finding in report.findings}, report
    return run


def test_the_article_s_snippets(judged):
    """Its identifiers, in a text of our own: two variables that never were, five metrics, valid keyword arguments."""
    found, report = judged('''\
部署示例：
from vllm import LLM, SamplingParams
llm = LLM(
    model=”m”,
    tensor_parallel_size=4,
    gpu_memory_utilization=0.90,  # 利用率（GPU）
    max_num_seqs=256,
    block_size=16,
    enable_prefix_caching=True,
)
params = SamplingParams(max_tokens=8, temperature=0.7, top_p=0.9)
os.environ[“VLLM_SCHEDULER_POLICY”] = “fcfs”
os.environ["VLLM_SCHEDULER_MAX_TOKENS"] = "1"

# Prometheus
vllm_num_requests_running     # 数
vllm_num_requests_waiting
vllm_gpu_cache_usage_perc
vllm_num_cache_evictions
vllm_avg_generation_throughput

当vllm_num_cache_evictions大于0
''', "article.txt")
    assert found == {"VLLM_SCHEDULER_POLICY": "unknown", "VLLM_SCHEDULER_MAX_TOKENS": "unknown",
                     "vllm_num_requests_running": "wrong form", "vllm_num_requests_waiting": "wrong form",
                     "vllm_gpu_cache_usage_perc": "renamed", "vllm_num_cache_evictions": "unknown",
                     "vllm_avg_generation_throughput": "removed"}
    assert report.counts["ok"] == 9 and len(report.failing) == 8
    by_name = {finding.name: finding for finding in report.findings}
    assert by_name["vllm_num_requests_running"].todo == "write vllm:num_requests_running"
    assert by_name["vllm_gpu_cache_usage_perc"].todo.startswith("use vllm:kv_cache_usage_perc")
    assert "0.11.2" in by_name["vllm_gpu_cache_usage_perc"].says
    assert by_name["VLLM_SCHEDULER_POLICY"].todo.startswith("use --scheduling-policy")
    assert by_name["VLLM_SCHEDULER_POLICY"].line == 12 and by_name["VLLM_SCHEDULER_POLICY"].source
    assert "num_preemptions" in by_name["vllm_num_cache_evictions"].todo


def test_the_article_itself():
    if not ARTICLE.exists():
        pytest.skip("the article is not beside the checkout")
    report = lint([ARTICLE])
    assert [(f.line, f.name) for f in report.failing] == [
        (96, "VLLM_SCHEDULER_POLICY"), (97, "VLLM_SCHEDULER_MAX_TOKENS"), (123, "vllm_num_requests_running"),
        (124, "vllm_num_requests_waiting"), (125, "vllm_gpu_cache_usage_perc"), (126, "vllm_num_cache_evictions"),
        (127, "vllm_avg_generation_throughput"), (131, "vllm_num_cache_evictions")]
    assert report.counts["ok"] == 9 and report.counts["not judged"] == 0


@pytest.mark.parametrize("line", [
    'os.environ["VLLM_NO_SUCH_THING"] = "1"', 'with_env(VLLM_NO_SUCH_THING="1")',
    'os.environ.setdefault("VLLM_NO_SUCH_THING", "1")', 'run(["x"], env=dict(os.environ, VLLM_NO_SUCH_THING="1"))',
    'run(["x"], env={**os.environ, "VLLM_NO_SUCH_THING": "1"})', 'monkeypatch.setenv("VLLM_NO_SUCH_THING", "1")'])
def test_variables_in_python(judged, line):
    assert judged(f"import os\n{line}\n")[0] == {"VLLM_NO_SUCH_THING": "unknown"}


@pytest.mark.parametrize("line", ['os.getenv("VLLM_MY_RETRIES", "3")', 'os.environ["VLLM_MY_RETRIES"]',
                                  'os.environ.get("VLLM_MY_RETRIES")', 'env_int("VLLM_MY_RETRIES", 3)'])
def test_a_variable_that_the_file_reads_is_its_own_unless_the_engine_had_it(judged, line):
    assert judged(f"import os\nx = {line}\n")[0] == {"VLLM_MY_RETRIES": "not judged"}
    had = line.replace("VLLM_MY_RETRIES", "VLLM_ATTENTION_BACKEND")
    assert judged(f"import os\nx = {had}\n")[0] == {"VLLM_ATTENTION_BACKEND": "renamed"}


@pytest.mark.parametrize("call, found", [
    ("from vllm import LLM\ngiven = dict(model='m', kv_blocks=2)\nLLM(**given)", {"kv_blocks": "unknown"}),
    ("from vllm import EngineArgs\ngiven = {'model': 'm'}\ngiven['kv_blocks'] = 2\nEngineArgs(**given)",
     {"kv_blocks": "unknown"}),
    ("from vllm import LLM\ngiven = {'kv_blocks': 2}\ngiven = other()\nLLM(**given)", {}),
    ("from vllm import LLM\ngiven = {'kv_blocks': 2}\ndef f(given): LLM(**given)", {}),
    ("from sglang.multimodal_gen.runtime.server_args import ServerArgs\nServerArgs(sp_degree=1)",
     {"sp_degree": "not judged"}),
    ("from vllm import LLM\nLLM(model='m', max_sequences=3)", {"max_sequences": "unknown"}),
    ("import vllm\nvllm.LLM('m', swap_space=4)", {"swap_space": "renamed"}),
    ("from vllm import SamplingParams as P\nP(top_p=1, best_of=2)", {"best_of": "removed"}),
    ("from vllm import AsyncEngineArgs, EngineArgs\nEngineArgs(modl='m')\nAsyncEngineArgs(enable_log_requests=True)",
     {"modl": "unknown"}),
    ("import sglang as sgl\nsgl.Engine(model_path='m', mem_fraction_static=0.8, kv_fraction=1)",
     {"kv_fraction": "unknown"}),
    ("from vllm import LLM\nLLM(**{'model': 'm', 'tensor_parallel': 2})", {"tensor_parallel": "unknown"}),
    ("from tensorrt_llm import LLM\nLLM(whatever=1)", {"whatever": "not judged"}),
    ("class LLM: ...\nLLM(whatever=1)", {"whatever": "not judged"}),
    ("from sqlalchemy import Engine\nEngine(whatever=1)", {"whatever": "not judged"}),
    ("LLM(whatever=1)", {"whatever": "not judged"}),
    ("# vLLM\nLLM(whatever=1)", {"whatever": "unknown"})])
def test_keyword_arguments_belong_to_whom_the_file_imports(judged, call, found):
    assert judged(call)[0] == found


@pytest.mark.parametrize("text, found", [
    ("vllm serve m --max-model-len 8 --enable-prefix-cache-please", {"--enable-prefix-cache-please": "unknown"}),
    ("vllm serve m \\\n  --max_model_len 8 \\\n  --swap-space 4", {"--swap-space": "renamed"}),
    ("vllm serve m --no-enable-prefix-caching --compilation-config.mode 3 --enable-prefix-cac", {}),
    ("vllm serve m --num-prompts 3", {"--num-prompts": "unknown"}),
    ("vllm bench serve --num-prompts 3 --model m", {}),
    ("VLLM_PORT=1 vllm serve m --port 1 | tee --append log && curl --silent x; ls --all", {}),
    ("python -m sglang.launch_server --model-path m --mem-fraction-static 0.8 --page-blocks",
     {"--page-blocks": "unknown"}),
    ("text-generation-launcher --model-id m --max-batch-total-tokens 9 --paged", {"--paged": "unknown"}),
    ("llama-server -m x.gguf --ctx-size 9 --cont-batching --paged", {"--paged": "unknown"}),
    ("docker run --gpus all -p 1:1 vllm/vllm-openai:latest --model m --paged", {"--paged": "unknown"}),
    ("docker run --gpus all --entrypoint bash vllm/vllm-openai:latest --login", {}),
    ("docker build --tag vllm/vllm-openai:mine --build-arg x=1 .", {}),
    ("docker run ghcr.io/huggingface/text-generation-inference:3.0 --model-id m --paged", {"--paged": "unknown"}),
    ("grep --paged x && trtllm-serve m --paged && tritonserver --pages", {"--paged": "not judged"}),
    ("We like --paged and vllm, and a dash -- here.", {})])
def test_flags_belong_to_the_command_they_stand_behind(judged, text, found):
    assert judged(text, "run.sh")[0] == found
    assert judged(f"Start it:\n\n```bash\n{text}\n```\n", "readme.md")[0] == found


def test_flags_in_lists_of_arguments(judged):
    code = 'import subprocess\nsubprocess.Popen(["vllm", "serve", m,\n    "--max-model-len", "8",\n    "--paged"])\n'
    found, report = judged(code)
    assert found == {"--paged": "unknown"} and report.findings[0].line == 4
    assert judged('run(["ls", "--paged"])\np.add_argument("--paged", help="as vllm serve")\n')[0] == {}
    assert judged('run(f"vllm serve {m} --paged {n}")\n')[0] == {"--paged": "unknown"}
    assert judged('run("vllm serve m --paged", shell=True)  # vllm serve m --swap\n')[0] == {
        "--paged": "unknown", "--swap": "unknown"}


COMPOSE = """\
services:
  exporter:
    image: nvidia/dcgm-exporter:latest
    command: ["--paged", "x"]
  engine:
    image: vllm/vllm-openai:v0.32.0
    environment:
      - VLLM_LOGGING_LEVEL=INFO
      - VLLM_PAGED_BLOCKS=3
      - MODEL=${VLLM_MY_CHOICE}
    command:
      - --model
      - m
      - --paged=3
"""
K8S = """\
spec:
  containers:
  - name: engine
    args:
    - --max-model-len=8
    - "--paged"
    env:
    - name: VLLM_PAGED_BLOCKS
      value: "3"
    image: vllm/vllm-openai:latest
"""


@pytest.mark.parametrize("text", [COMPOSE, K8S])
def test_compose_and_kubernetes(judged, text):
    found, report = judged(text, "x.yaml")
    assert {name for name, verdict in found.items() if verdict == "unknown"} == {"--paged", "VLLM_PAGED_BLOCKS"}
    assert [f.name for f in report.failing].count("--paged") == 1


PODS = """\
spec:
  initContainers:
  - command: ["huggingface-cli", "--local-dir", "x"]
    image: python:3.12
  containers:
  - args: ["--model-path", "m",
           "--kv-pages"]
    command: ["python3", "-m", "sglang.launch_server"]
    image: lmsysorg/sglang:latest
  - name: exporter
    image: prom/prometheus
    args:
    - --config.file=/etc/x.yml
  - name: engine
    args:
    - "--blocks"
    image: vllm/vllm-openai
  - name: check
    image: vllm/vllm-openai
    command: ["python3", "check.py"]
    args: ["--blocks-too"]
servingEngineSpec:
  repository: "vllm/vllm-openai"
  vllmConfig:
    extraArgs: ["--max-model-len", "8", "--pages"]
other:
  image:
    repository: ghcr.io/huggingface/text-generation-inference
  args: ["--tgi-pages"]
"""


def test_a_list_of_arguments_belongs_to_its_own_container(judged):
    _, report = judged(PODS, "pods.yaml")
    assert [(f.line, f.engine, f.name) for f in report.failing] == [
        (7, "sglang", "--kv-pages"), (16, "vllm", "--blocks"), (25, "vllm", "--pages"), (29, "tgi", "--tgi-pages")]


@pytest.mark.parametrize("command, line", [
    ("command: --model m --pages 3", 4), ("command: m --pages 3", 4), ("command: vllm serve m --pages 3", 4),
    ("command: '--model m\n      --pages 3'", 5), ("command:\n      --model m\n      --pages 3", 6),
    ("command: >\n      --model m\n\n      --pages 3", 7), ("command: |-\n      --model m\n      --pages 3", 6),
    ("command: >-\n      vllm serve m\n      --max-model-len 8\n      --pages 3", 7),
    ("command: |\n      vllm serve m \\\n      --pages 3", 6),
    ("command: sh -c 'pip install --upgrade x && vllm serve m\n      --pages && ls --color'", 5),
    ("entrypoint: [bash, -c]\n    command:\n      - >\n        ls --color && vllm serve m\n        --pages; ls --a",
     8),
    ("entrypoint: [bash, -c]\n    command:\n      - |\n        vllm serve m --pages\n        ls --color", 7)])
def test_arguments_that_are_a_string(judged, command, line):
    text = f"services:\n  engine:\n    image: vllm/vllm-openai:latest\n    {command}\n    labels:\n      A: --color\n"
    _, report = judged(text, "compose.yaml")
    assert [(f.name, f.verdict, f.line, f.engine) for f in report.findings] == [("--pages", "unknown", line, "vllm")]
    bare = text.replace("vllm/vllm-openai:latest", "prom/prometheus")
    assert [f.name for f in judged(bare, "compose.yaml")[1].findings] == ["--pages"] * ("vllm serve" in command)


@pytest.mark.parametrize("command", ["entrypoint: python3 check.py --pages", "command: bash start.sh --pages",
                                     "entrypoint: /start.sh\n    command: --pages", "working_dir: --pages",
                                     "entrypoint: [python3, check.py, --pages]",
                                     "entrypoint: >-\n      ./check.py\n      --pages", "command: m; curl --pages"])
def test_strings_that_are_for_another_program(judged, command):
    assert judged(f"a:\n  b:\n    image: vllm/vllm-openai\n    {command}\n", "compose.yaml")[0] == {}


def test_an_image_that_a_variable_may_replace(judged):
    text = "a:\n  image: ${IMAGE:-vllm/vllm-openai:v0.32.0}\n  command: --pages 3\n"
    assert judged(text, "compose.yaml")[0] == {"--pages": "unknown"}


TAGGED = "a:\n  image: vllm/vllm-openai:{}\n  environment:\n    - VLLM_USE_V1=1\n  command: --pages --swap-space 4\n"


@pytest.mark.parametrize("tag, used, version", [
    ("v0.10.0", None, "0.10.0"), ("v0.10.0-x86_64", None, "0.10.0"), ("latest", "removed", "0.32.0"),
    ("v0.6.3", None, "0.8.5"), ("v0.99.1", "removed", "0.32.0"),
    ("v0.32.0\n  # vllm/vllm-openai:v0.10.0", None, "0.32.0")])
def test_the_release_of_an_image_is_the_one_judged_against(judged, tag, used, version):
    found, report = judged(TAGGED.format(tag), "compose.yaml")
    assert found["--pages"] == "unknown" and found.get("VLLM_USE_V1") == used
    assert next(f.version for f in report.findings if f.name == "--pages") == version
    assert judged(TAGGED.format(tag), "compose.yaml", engine="vllm", version="0.32.0")[0]["VLLM_USE_V1"] == "removed"
    assert judged(TAGGED.format(tag), "compose.yaml", engine="vllm")[0].get("VLLM_USE_V1") == used


def test_an_image_older_than_the_table_may_have_what_was_gone_by_then(judged):
    text = "a:\n  image: vllm/vllm-openai:{}\n  command: --worker-use-ray\n"
    assert "--worker-use-ray" not in {f.name for f in judged(text.format("v0.6.3"), "c.yaml")[1].failing}
    assert judged(text.format("v0.8.5"), "c.yaml")[0] == {"--worker-use-ray": "renamed"}


def test_the_tag_of_a_chart_and_of_another_engine(judged):
    chart = 'image:\n  repository: "vllm/vllm-openai"\n  tag: "v0.10.0"\nenv:\n- name: VLLM_USE_V1\n'
    assert judged(chart, "values.yaml")[0] == {}
    assert judged(chart.replace("vllm/vllm-openai", "lmsysorg/sglang"), "values.yaml")[0] == {"VLLM_USE_V1": "removed"}


def test_a_metric_that_never_was(judged):
    _, report = judged("rate(vllm:cache_evictions_total[5m])\n", "x.md")
    (finding,) = report.findings
    assert finding.says.endswith("has no metric vllm:cache_evictions_total, nor had any release")
    assert finding.todo.startswith("use rate(vllm:num_preemptions_total[5m])") and "never" not in finding.source


@pytest.mark.parametrize("text, todo", [
    ("export VLLM_KV_CACHE_DTYPE=fp8", "did you mean the flag --kv-cache-dtype?"),
    ("export VLLM_BLOCK_SIZE=16", "did you mean the flag --block-size?"),
    ("vllm serve m --page-size 16", "did you mean --block-size?"),
    ("python -m sglang.launch_server --gpu-memory-utilization 0.9", "did you mean --mem-fraction-static?"),
    ("sglang serve --max-num-seqs 9", "did you mean --max-running-requests?"),
    ("llama-server --n-slots 4", "did you mean --parallel?"),
    ("from vllm import SamplingParams; SamplingParams(temp=1)", "did you mean temperature?"),
    ("from vllm import LLM; LLM(mem_fraction_static=1)", "did you mean gpu_memory_utilization?"),
    ("vllm serve m --kv-cache-typo fp8", "did you mean --kv-cache-dtype?"),
    ("export VLLM_QQ_NOTHING_LIKE_IT=1", "take it out; nothing similar exists")])
def test_what_was_meant(judged, text, todo):
    (finding,) = judged(text, "x.py" if "import" in text else "x.sh")[1].findings
    assert finding.verdict == "unknown" and finding.todo == todo


def test_hints_name_only_what_the_newest_releases_have():
    from kvlab.serving import names
    from kvlab.serving._lint_hints import FLAGS, KWARGS, NICKNAMES
    flags = {(engine, flag) for words in FLAGS for engine, flag in words.items()}
    for engine, flag in flags:
        table = names.table(engine)
        assert any(row.exists(table.newest) for row in table.find("flag", flag)), (engine, flag)
    assert set(NICKNAMES.values()) <= {flag for _, flag in flags}
    params = names.table("vllm").find
    assert all(params("kwarg", name, ["SamplingParams"]) for name in KWARGS.values())
    assert not any(params("kwarg", name, ["SamplingParams"]) for name in KWARGS)


def test_flags_of_an_engine_without_a_table_are_not_judged(judged):
    _, report = judged("trtllm-serve m --kv_cache_free_gpu_memory_fractio 0.9\n", "x.sh")
    assert report.findings[0].says == "kvlab has no table of the flags of tensorrt_llm" and not report.failing


OR = "avg_over_time(vllm:kv_cache_usage_perc[5m]) or avg_over_time(vllm:gpu_cache_usage_perc[5m])"


@pytest.mark.parametrize("expression, found", [
    (OR, {}), (OR.replace(" or ", "\n          or\n          "), {}),
    (OR.replace(" or ", " + "), {"vllm:gpu_cache_usage_perc": "renamed"}),
    (OR.partition(" or ")[2], {"vllm:gpu_cache_usage_perc": "renamed"}),
    ("vllm:kv_cache_usage_perc_x or vllm:gpu_cache_usage_perc", {"vllm:kv_cache_usage_perc_x": "unknown",
                                                                  "vllm:gpu_cache_usage_perc": "renamed"})])
def test_a_former_name_may_stand_in_beside_its_successor(judged, expression, found):
    text = f"groups:\n- name: a\n  rules:\n  - alert: B\n    expr: |\n          {expression}\n" \
           "    labels:\n      x: vllm:kv_cache_usage_perc or another\n"
    assert judged(text, "rules.yml")[0] == found


def test_broken_json_is_said_and_still_read(tmp_path):
    path = tmp_path / "board.json"
    path.write_text('{"expr": "vllm:gpu_cache_usage_perc",}')
    report = lint([path])
    assert len(report.skipped) == 1 and "board.json is broken JSON" in report.skipped[0] and report.failing
    path.write_text("[" * 50_000)
    assert len(lint([path]).skipped) == 1
    path.write_text("{,}")
    assert lint([tmp_path]).skipped == []                    # in a folder, only what names an engine is looked at
    path.write_text('{"expr": "up"}')
    assert lint([path]).skipped == []


def test_commands_inside_yaml_lists(judged):
    found, _ = judged("command:\n- vllm\n- serve\n- m\n- --paged\n", "x.yml")
    assert found == {"--paged": "unknown"}
    found, _ = judged('command: ["sh", "-c", "vllm serve m --paged"]\n', "x.yml")
    assert found == {"--paged": "unknown"}


def test_dockerfile_and_shell_variables(judged):
    text = "FROM x\nARG VLLM_PAGED\nENV VLLM_LOGGING_LEVEL=INFO\nENV VLLM_PAGED_BLOCKS 3\n"
    assert judged(text, "Dockerfile")[0] == {"VLLM_PAGED": "not judged", "VLLM_PAGED_BLOCKS": "unknown"}
    assert judged("VLLM_PAGED=1\necho ${VLLM_PAGED}\nexport VLLM_OTHER_THING=1\n", "x.sh")[0] == {
        "VLLM_PAGED": "not judged", "VLLM_OTHER_THING": "unknown"}
    assert judged("VLLM_BASE_URL=http://x python client.py\n", "x.sh")[0] == {"VLLM_BASE_URL": "not judged"}
    assert judged("see VLLM_*, VLLM_<NAME>, MY_VLLM_PAGED, VLLM_MACRO(x) and mode=VLLM_PAGED_MODE\n", "x.md")[0] == {}
    assert judged("export SGL_MOE_PADDING=1 SGLANG_NO_SUCH=1\n", "x.sh")[0]["SGLANG_NO_SUCH"] == "unknown"


@pytest.mark.parametrize("text, found", [
    ('FROM x\nENTRYPOINT ["vllm", "serve"]\nCMD ["m", "--max-model-len", "8", \\\n  "--paged"]\n', {"--paged": 4}),
    ('FROM vllm/vllm-openai:v1\nHEALTHCHECK CMD ["curl", "--fail"]\nCMD ["--model", "m", "--paged"]\n', {"--paged": 3}),
    ('FROM vllm/vllm-openai:v1\nENTRYPOINT ["python", "--x"]\nCMD ["--paged"]\n', {}),
    ('FROM vllm/vllm-openai:v1 AS a\nFROM debian\nCMD ["ls", "--paged"]\n', {}),
    ('FROM x\nCMD vllm serve m --paged\n', {"--paged": 2})])
def test_what_a_dockerfile_starts(judged, text, found):
    _, report = judged(text, "Dockerfile")
    assert {f.name: f.line for f in report.failing} == found


def test_a_variable_s_own_default_goes_on_to_the_engine(judged):
    assert judged("export VLLM_PAGED=${VLLM_PAGED:-1}\n", "x.sh")[0] == {"VLLM_PAGED": "unknown"}
    assert judged("environment:\n  VLLM_PAGED: ${VLLM_PAGED:-1}\n", "x.yaml")[0] == {"VLLM_PAGED": "unknown"}
    assert judged('VLLM_PAGED="${VLLM_PAGED:-1}"\necho $VLLM_PAGED\n', "x.sh")[0] == {"VLLM_PAGED": "not judged"}
    assert judged("VLLM_ATTENTION_BACKEND=X\necho $VLLM_ATTENTION_BACKEND\n", "x.sh")[0] == {
        "VLLM_ATTENTION_BACKEND": "renamed"}                                     # it was the engine's once


RULES = """\
groups:
- name: g
  rules:
  - record: vllm:my_own_ratio
    expr: rate(vllm:num_preemptions_total[5m]) / rate(vllm:request_success_total[5m])
  - alert: A
    expr: |
      vllm:my_own_ratio > 0.05 and vllm:gpu_cache_usage_perc > 0.9
      and vllm_num_requests_waiting{model="m"} > 3
      and rate(vllm:num_preemptions[5m]) > 0 and vllm:recorded_thing:rate5m > 1
"""


def test_prometheus_rules(judged):
    found, _ = judged(RULES, "rules.yaml")
    assert found == {"vllm:my_own_ratio": "not judged", "vllm:gpu_cache_usage_perc": "renamed",
                     "vllm_num_requests_waiting": "wrong form", "vllm:num_preemptions": "wrong form"}


def test_grafana_dashboards(judged):
    panels = [{"targets": [{"expr": expr}]} for expr in (
        "histogram_quantile(0.99, sum by(le) (rate(vllm:e2e_request_latency_seconds_bucket[$__rate_interval])))",
        "sglang:token_usage", "sglang:tokens_used_total", "tgi_queue_size", "rate(tgi_request_success_total[1m])",
        "rate(tgi_no_such_thing[1m])", "llamacpp:kv_cache_usage_ratio",
        'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used"}', "vllm:num_requests_running_total")]
    for indent in (None, 2):
        found, _ = judged(json.dumps({"panels": panels}, indent=indent), "dash.json")
        assert found == {"sglang:tokens_used_total": "unknown", "tgi_request_success_total": "wrong form",
                         "tgi_no_such_thing": "unknown", "llamacpp:kv_cache_usage_ratio": "removed",
                         "vllm:num_requests_running_total": "unknown"}


def test_what_only_looks_like_a_metric(judged):
    assert judged("vllm_config = vllm_engine.vllm_config\nimport vllm_utils\nvllm_num_gpus_per_node = 3\n"
                  "torch.ops.vllm.x('vllm::unified_attention', 'vllm:latest', 'a/vllm:v0_1_2')\n")[0] == {}
    assert judged("image vllm:v0_6, vllm:kv_block_*, vllm:num_requests_{running,waiting}, vllm:metric_name\n"
                  "vllm_config and vllm_engine_args, tgi_client, trtllm_mha backend\n", "x.md")[0] == {}


def test_notebooks(judged):
    cells = [dict(cell_type="markdown", metadata={}, source=["# Try\n", "`vllm:gpu_cache_usage_perc`\n"]),
             dict(cell_type="code", metadata={}, outputs=[],
                 source=["from vllm import LLM\n", "%env VLLM_PAGED_BLOCKS=1\n"]),
             dict(cell_type="code", metadata={}, outputs=[{"text": "VLLM_IN_OUTPUT"}],
                  source="!vllm serve m --paged\n%time llm = LLM(model='m',\n          max_sequences=3)\n")]
    found, report = judged(json.dumps(dict(cells=cells, nbformat=4), indent=1), "x.ipynb")
    assert found == {"vllm:gpu_cache_usage_perc": "renamed", "VLLM_PAGED_BLOCKS": "unknown", "--paged": "unknown",
                     "max_sequences": "unknown"}
    assert all(1 <= f.line <= 60 for f in report.findings)


def test_versions(judged):
    line = "vllm serve m --swap-space 4\n"
    assert judged(line, "x.sh", engine="vllm", version="0.16.0")[0] == {"--swap-space": "deprecated"}
    assert judged(line, "x.sh", engine="vllm", version="0.18.0")[0] == {"--swap-space": "renamed"}
    report = judged("vllm:kv_cache_usage_perc\n", "x.md", engine="vllm", version="0.8.5")[1]
    assert report.findings[0].verdict == "unknown" and "came with 0.9" in report.findings[0].says
    assert judged("LLM(whatever=1)", engine="vllm")[0] == {"whatever": "unknown"}
    for options, kind, says in ((dict(engine="vlm"), KeyError, "Did you mean 'vllm'"),
                                (dict(engine="vllm", version="9.9"), ValueError, "0.8.5 to 0.32.0"),
                                (dict(version="0.32.0"), ValueError, "--engine")):
        with pytest.raises(kind, match=says):
            lint([], **options)


def test_unreadable_files_are_one_sentence_each(tmp_path):
    (tmp_path / "binary.py").write_bytes(b"\x7fELF\0\0")
    (tmp_path / "gbk.txt").write_bytes("当vllm".encode("gbk"))
    (tmp_path / "huge.txt").write_bytes(b"x" * (4 * 2**20 + 1))
    (tmp_path / "broken.ipynb").write_text('{"cells": [{"source": 3}]}')
    os.symlink("loop", tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    for name, says in (("binary.py", "is binary"), ("gbk.txt", "not UTF-8"), ("huge.txt", "larger than 4 MiB"),
                       ("broken.ipynb", "no notebook"), ("loop", "cannot read"),
                       ("pipe", "neither a file nor a folder"),
                       ("missing.py", "No such file")):
        report = lint([tmp_path / name])
        assert report.files == 0 and len(report.skipped) == 1 and says in report.skipped[0], name
        assert "\n" not in report.skipped[0]


def test_folders_are_walked_without_links(tmp_path):
    (tmp_path / "a" / "node_modules").mkdir(parents=True)
    (tmp_path / "a" / "x.md").write_text("VLLM_PAGED_BLOCKS")
    (tmp_path / "a" / "node_modules" / "y.md").write_text("VLLM_PAGED_BLOCKS")
    (tmp_path / "a" / "z.bin").write_text("VLLM_PAGED_BLOCKS")
    os.symlink(tmp_path, tmp_path / "a" / "up")
    os.symlink(tmp_path / "a" / "x.md", tmp_path / "a" / "again.md")
    report = lint([tmp_path])
    assert report.files == 1 and [f.name for f in report.findings] == ["VLLM_PAGED_BLOCKS"]


def test_a_call_with_something_left_out(judged):
    text = "from vllm import LLM\nllm = LLM(\n    model='m',\n    max_sequences=3,  # (more)\n    ...\n)\n"
    assert judged(f"```python\n{text}```\n", "x.md")[0] == {"max_sequences": "unknown"}


def test_nothing_is_executed(judged, tmp_path):
    mark = tmp_path / "ran"
    code = f"open({str(mark)!r}, 'w')\nfrom vllm import LLM\nLLM(model=open({str(mark)!r}, 'w'))\n"
    for name in ("x.py", "x.md", "x.txt"):
        judged(code if name == "x.py" else f"```python\n{code}```\n", name)
    judged(f"vllm serve $(touch {mark}) --paged `touch {mark}`\n", "x.sh")
    assert not mark.exists()


@pytest.mark.parametrize("text", ["(" * 100_000, "LLM(" * 5_000, "-" * 100_000 + "x", "vllm serve " * 20_000,
                                  "VLLM_A " * 50_000, "vllm:a_" * 50_000, "`" * 10_000, "```python\n" * 5_000,
                                  "vllm_a_b_c_d " * 20_000, "$" * 50_000, "- --a\n" * 20_000])
def test_hostile_text_ends_soon(tmp_path, text):
    for name in ("x.py", "x.md", "x.yaml"):
        (tmp_path / name).write_text(text)
        began = time.perf_counter()
        report = lint([tmp_path / name])
        assert time.perf_counter() - began < 10 and len(report.skipped) + report.files == 1


@settings(max_examples=60, deadline=None)
@given(st.text(st.sampled_from(list("vllm serve:_-\"'`\n(){}=LM#!%é当 \\|$")), max_size=300),
       st.sampled_from([".py", ".md", ".sh", ".yaml", ".json"]))
def test_any_text_is_judged_without_an_error(tmp_path_factory, text, suffix):
    path = tmp_path_factory.mktemp("any") / f"x{suffix}"
    path.write_text(text, encoding="utf-8")
    report = lint([path])
    assert report.files == 1 and sum(report.counts.values()) >= len(report.findings)
    assert all(1 <= finding.line <= text.count("\n") + 1 for finding in report.findings)
