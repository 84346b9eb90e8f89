"""Recorded runs as tests write them: folders with meta.json, requests.jsonl and timeseries.csv."""
import json

META = {"model": "meta-llama/Llama-3.1-8B", "vllm_version": "0.19.0",
        "engine_kwargs": {"tensor_parallel_size": 1, "data_parallel_size": 1, "max_num_seqs": 16,
                          "max_num_batched_tokens": 512, "max_model_len": None},
        "kv_cache": {"num_gpu_blocks": 600, "block_size": 16, "enable_prefix_caching": False},
        "hardware": {"device_name": "NVIDIA GeForce RTX 4090"}}


def write(folder, rows, meta=META, series=""):
    folder.mkdir(exist_ok=True)
    (folder / "requests.jsonl").write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n"
                                                   for row in rows))
    if meta is not None:
        (folder / "meta.json").write_text(json.dumps(meta))
    if series:
        (folder / "timeseries.csv").write_text(series)
    return folder


def row(i=0, queued=1000.0, first=1001.0, last=1002.0, prompt=100, output=10, **more):
    return {"request_id": f"r{i}", "input_toks": prompt, "output_toks": output, "arrival_time": 1.7e9 + queued,
            "queued_ts": queued, "first_token_ts": first, "last_token_ts": last, **more}


def changed(**places):
    return {name: META.get(name, {}) | value if isinstance(value, dict) else value for name, value in
            (META | places).items()}
