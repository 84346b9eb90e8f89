"""A real engine: llama.cpp's server on loopback, its /metrics against what was asked of it, `kvlab watch` beside it."""
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
from live_llama import llama_server

from kvlab.serving.scrape import Scrape, ScrapeError
from kvlab.serving.windows import History


@pytest.fixture(scope="module")
def server():
    """The address of a llama.cpp server that serves SmolLM2 with two slots."""
    with llama_server() as url:
        yield url


def complete(url, prompt, tokens):
    body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(url + "/completion", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_what_the_server_counts_is_what_was_asked(server):
    """Prompt tokens, tokens found in the cache and generated tokens are exact, answer by answer."""
    scrape = Scrape.of(server, timeout_s=10)
    history = History([scrape.snapshot()])
    prompts = ["The capital of France is", "Once upon a time there was a small", "The capital of France is"]
    answers = [complete(server, prompt, 4 + i) for i, prompt in enumerate(prompts)]
    history.add(scrape.snapshot())
    window = history.window(3600)
    assert window.newest.engine == "llamacpp"
    assert window.increase("generated_tokens") == sum(a["tokens_predicted"] for a in answers) == 4 + 5 + 6
    cached = [a["timings"]["cache_n"] for a in answers]
    assert window.increase("prompt_tokens") == sum(a["timings"]["prompt_n"] for a in answers) + sum(cached)
    assert window.increase("prefix_hit_tokens") == sum(cached) > 0
    assert window.ratio("prefix_hit_tokens", "prefix_queried_tokens") == pytest.approx(
        sum(cached) / sum(a["tokens_evaluated"] for a in answers))
    assert window.newest.value("running") == 0 and window.newest.value("kv_usage") is None
    assert "never preempts" in window.newest.missing["preemptions"]


def test_running_and_waiting_are_seen_while_they_are(server):
    """Three requests at two slots: two run and one waits, until they are done."""
    scrape, seen = Scrape.of(server, timeout_s=10), []
    clients = [threading.Thread(target=complete, args=(server, f"Story {i}:", 30)) for i in range(3)]
    for client in clients:
        client.start()
    while any(client.is_alive() for client in clients):
        snapshot = scrape.snapshot()
        seen.append((snapshot.value("running"), snapshot.value("waiting")))
        time.sleep(0.02)
    assert (2, 1) in seen and set(seen) <= {(0, 0), (1, 0), (2, 0), (1, 1), (2, 1)}
    snapshot = scrape.snapshot()
    assert (snapshot.value("running"), snapshot.value("waiting")) == (0, 0)


def test_kvlab_watch_shows_it(server, tmp_path):
    """The command's own output: a JSON line per scrape, and the table that it wrote."""
    out = tmp_path / "watch.parquet"
    before = Scrape.of(server).snapshot().value("generated_tokens")
    command = [sys.executable, "-m", "kvlab", "watch", server, "--every", "200ms", "--json", "--out", str(out)]
    watching = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines = [json.loads(watching.stdout.readline())]                           # it watches now
    complete(server, "Count: one, two,", 10)
    while len(lines) < 50 and lines[-1]["values"]["generated_tokens"] == before:
        lines.append(json.loads(watching.stdout.readline()))
    watching.send_signal(signal.SIGINT)
    rest, errors = watching.communicate(timeout=30)
    assert watching.returncode == 0, errors
    lines += [json.loads(line) for line in rest.splitlines()]
    assert len(lines) >= 2 and not any(line["problem"] for line in lines)
    assert lines[-1]["values"]["generated_tokens"] == before + 10
    assert "exports no histogram" in lines[-1]["missing"]["ttft_s_p99"]
    assert max(line["values"].get("generated_tokens_per_s", 0) for line in lines) > 0

    from kvlab.record.store import read_table
    table = read_table(out)
    assert table["case_id"].nunique() in (len(lines), len(lines) + 1) and set(table["kind"]) == {"measured", "missing"}
    row = table[table["metric"] == "generated_tokens"].iloc[-1]
    assert row["value"] == before + 10 and row["source"] == "llamacpp: llamacpp:tokens_predicted_total"


def test_a_path_that_is_not_there(server):
    with pytest.raises(ScrapeError, match="answers 404"):
        Scrape.of(server + "/nothing/here").fetch()
