"""Drives a live server and records what became of each request, in the format that `kvlab simulate --replay` reads.

The server speaks OpenAI's /v1/completions with streaming (vLLM, SGLang, llama.cpp). Times are those of this client's
monotonic clock, from the request's first byte out to a token's first byte in: the network and the server's front end
are in them.
"""
from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from kvlab.shapes import positive

MOST_LINE = 2**20               # bytes of one event
MOST_BYTES = 2**26              # bytes of one answer


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: when it is sent (s after the start), its prompt, and how many tokens it asks for."""
    at_s: float
    prompt: str
    max_tokens: int

    def __post_init__(self):
        positive(max_tokens=self.max_tokens)
        if not 0 <= self.at_s < float("inf"):
            raise ValueError(f"at_s={self.at_s!r} must be a finite number of at least 0 seconds")


def drive(url: str, asks: Sequence[Ask], folder: Path | str, meta: dict, *, model: str = "default",
          timeout_s: float = 120.0, extra: dict | None = None) -> list[dict]:
    """Send the requests at their times, each over its own connection; write meta.json and requests.jsonl; the rows.

    meta: what meta.json says (model, engine_kwargs, kv_cache, hardware). extra: further fields of each request's body,
    such as ignore_eos. timeout_s: of one answer altogether. A request that fails or is cut off is recorded as not
    finished, with the reason in `error`. No redirect is followed and no proxy used.
    ValueError: a URL that is not http or has credentials, no requests, a folder that is not empty.
    """
    folder, where = Path(folder), _where(url)
    if not asks:
        raise ValueError("no requests to send")
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; give the folder of a new run")
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict] = [{} for _ in asks]
    start = time.monotonic()
    threads = [threading.Thread(target=_ask, daemon=True,
                                args=(where, ask, f"live-{i}", start, rows[i], model, timeout_s, extra or {}))
               for i, ask in enumerate(asks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (folder / "meta.json").write_text(json.dumps({"schema_version": 1, **meta, "num_requests": len(rows)}, indent=2),
                                      encoding="utf-8")
    (folder / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return rows


def _where(url: str) -> SplitResult:
    """The address in its parts; what is refused is not repeated: it may hold a password."""
    try:
        where = urlsplit(url)
        usable = where.scheme == "http" and where.hostname and where.username is None and (where.port or 80) > 0
    except ValueError:
        usable = False
    if not usable:
        raise ValueError("the address of the server must look like http://host:port, without credentials")
    return where


def _ask(where: SplitResult, ask: Ask, name: str, start: float, row: dict, model: str, timeout_s: float,
         extra: dict) -> None:
    """One request, start to end; whatever goes wrong becomes the row's error."""
    row.update(request_id=name, input_toks=None, output_toks=None, queued_ts=None, scheduled_ts=None,
               first_token_ts=None, last_token_ts=None)
    time.sleep(max(0.0, start + ask.at_s - time.monotonic()))
    body = json.dumps({"model": model, "prompt": ask.prompt, "max_tokens": ask.max_tokens, "temperature": 0,
                       "stream": True, "stream_options": {"include_usage": True}, **extra}).encode()
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=timeout_s)
    until = time.monotonic() + timeout_s
    late = None
    try:
        row.update(arrival_time=time.time(), queued_ts=time.monotonic())
        connection.connect()
        # a server that drips bytes keeps every other limit; the connection itself forgets its socket at the answer
        late = threading.Timer(timeout_s, _cut, [connection.sock])
        late.daemon = True
        late.start()
        connection.request("POST", where.path.rstrip("/") + "/v1/completions", body,
                           {"Content-Type": "application/json"})
        with connection.getresponse() as answer:
            if answer.status != 200:
                raise OSError(f"HTTP {answer.status}: {answer.read(200).decode(errors='replace')}")
            _read(answer, row)
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        why = "the answer takes too long" if time.monotonic() >= until else str(error)[:200] or type(error).__name__
        row.update(first_token_ts=None, last_token_ts=None, error=why)
    finally:
        if late is not None:
            late.cancel()
        connection.close()


def _cut(connected: socket.socket) -> None:
    """End what is being read; the reader then finds no more."""
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def _read(answer: http.client.HTTPResponse, row: dict) -> None:
    """The events of one answer: when the first and the last token came, and how many the server counted."""
    first = last = usage = None
    left, ended = MOST_BYTES, False
    while line := answer.readline(MOST_LINE):
        now, left = time.monotonic(), left - len(line)
        if left < 0:
            raise OSError("the answer is too long")
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            ended = True
            break
        event = json.loads(data)
        if not isinstance(event, dict):
            raise ValueError("an event of the answer is no JSON object")
        usage = event.get("usage") or usage
        if any(isinstance(choice, dict) and choice.get("text") for choice in event.get("choices") or ()):
            first, last = first or now, now
    if not ended or not isinstance(usage, dict) or first is None:
        raise OSError("the answer ended without its usage or without a token")
    row.update(input_toks=usage.get("prompt_tokens"), output_toks=usage.get("completion_tokens"), first_token_ts=first,
               last_token_ts=last)
