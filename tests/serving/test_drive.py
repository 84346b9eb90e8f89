"""What kvlab records of servers that answer badly: never a finished request, always a reason."""
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvlab.serving.drive import Ask, drive

TOKEN = b'data: {"choices": [{"text": " a"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.fixture
def server():
    class Handler(BaseHTTPRequestHandler):
        answer, status = b"", 200

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(self.status)
            self.end_headers()
            self.wfile.write(self.answer)

        def log_message(self, *_):
            pass
    serving = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{serving.server_port}", Handler
    serving.shutdown()
    serving.server_close()


def asked(server, tmp_path, answer, status=200):
    url, handler = server
    handler.answer, handler.status = answer, status
    (row,) = drive(url, [Ask(0, "Hello", 2)], tmp_path / "run", {}, timeout_s=5)
    return row


def test_a_whole_answer_is_recorded(server, tmp_path):
    row = asked(server, tmp_path, TOKEN + b": a comment\n" + TOKEN + USAGE + DONE)
    assert (row["input_toks"], row["output_toks"]) == (3, 2) and "error" not in row
    assert row["queued_ts"] < row["first_token_ts"] <= row["last_token_ts"]


@pytest.mark.parametrize("answer,status,why", [
    (TOKEN + USAGE, 200, "ended without its usage or without a token"),
    (TOKEN + DONE, 200, "ended without its usage"),
    (USAGE + DONE, 200, "without a token"),
    (b"<html>busy</html>", 200, "ended without"),
    (b"data: {half", 200, "Expecting property name"),
    (b"data: [1]\n\n", 200, "no JSON object"),
    (b"data: " + b"[" * 100_000 + b"\n", 200, ""),
    (b"no such model", 404, "HTTP 404: no such model"),
])
def test_a_bad_answer_is_no_finished_request(server, tmp_path, answer, status, why):
    row = asked(server, tmp_path, answer, status)
    assert row["error"] and why in row["error"] and row["last_token_ts"] is None and row["output_toks"] is None


def test_an_answer_without_end_is_cut(server, tmp_path, monkeypatch):
    monkeypatch.setattr("kvlab.serving.drive.MOST_BYTES", 500)
    assert "too long" in asked(server, tmp_path, TOKEN * 100)["error"]


def test_what_is_asked_is_checked():
    for wrong in ((-1, 2), (float("inf"), 2), (0, 0)):
        with pytest.raises(ValueError):
            Ask(wrong[0], "Hello", wrong[1])
