"""Small files as people write them around serving engines, for the name linter."""
import json

PYTHON = '''\
import os
from vllm import LLM, SamplingParams
os.environ["VLLM_USE_V1"] = "1"
llm = LLM(model="m", tensor_parallel_size=4, gpu_memory_utilization=0.9, block_size=16)  # 注
params = SamplingParams(max_tokens=8, temperature=0.7)
subprocess.run(["vllm", "serve", "m", "--max-model-len", "8192"])
MODE = os.getenv("SGL_MODE", f"{os.environ.get('VLLM_A')}")
'''
SHELL = '''\
export VLLM_ATTENTION_BACKEND=FLASHINFER
vllm serve m --max-model-len 4096 --no-enable-prefix-caching \\
  --kv-cache-dtype fp8 # comment
python -m sglang.launch_server --model-path m --mem-fraction-static 0.8 && llama-server -c 4096
curl -s localhost:8000/metrics | grep vllm:num_requests_running
'''
MARKDOWN = f'# Serving\n\n```python\n{PYTHON}```\n\n```bash\n{SHELL}```\n\n```yaml\nargs: ["vllm", "serve", "m"]\n' \
           '```\nWatch `vllm_num_cache_evictions` and rate(vllm:prefix_cache_hits_total[5m]).\n'
DOCKERFILE = '''\
FROM vllm/vllm-openai:v0.11.0
ENV VLLM_USE_V1=1 \\
    SGLANG_X=2
ARG TAG=latest
ENTRYPOINT ["vllm", "serve", "--port", "8000"]
CMD --max-num-seqs 16
'''
COMPOSE = '''\
services:
  a:
    image: vllm/vllm-openai:v0.10.2
    environment:
      - VLLM_LOGGING_LEVEL=DEBUG
      - HF_TOKEN=${HF_TOKEN}
    command: >
      --model m --tensor-parallel-size 2
  b:
    image: lmsysorg/sglang:latest
    command: ["python3", "-m", "sglang.launch_server", "--tp", "2"]
    env:
      - name: SGLANG_TORCH_PROFILER_DIR
        value: "/tmp"
'''
RULES = '''\
groups:
- name: kv
  rules:
  - alert: Full
    expr: avg(vllm:gpu_cache_usage_perc) > 0.9 or rate(vllm:num_preemptions_total[5m]) > 0
    for: 5m
  - expr: histogram_quantile(0.99, sum by (le) (rate(vllm:time_to_first_token_seconds_bucket[5m])))
'''
JSON = json.dumps({"panels": [{"targets": [{"expr": "sum(sglang:token_usage)"}]}], "env": {"VLLM_USE_V1": "1"},
                   "args": ["vllm", "serve", "m", "--enforce-eager"]})
NOTEBOOK = json.dumps({"cells": [
    {"cell_type": "code", "source": PYTHON.splitlines(keepends=True), "outputs": [], "metadata": {}},
    {"cell_type": "code", "source": ["!vllm serve m --max-model-len 10\n", "%env VLLM_USE_V1=0\n", "%time x = 1\n"]},
    {"cell_type": "markdown", "source": MARKDOWN}], "nbformat": 4, "metadata": {}})
SEEDS = {"python": PYTHON, "shell": SHELL, "markdown": MARKDOWN, "dockerfile": DOCKERFILE, "compose": COMPOSE,
         "rules": RULES, "json": JSON, "notebook": NOTEBOOK}
