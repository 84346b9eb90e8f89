"""What a hostile server can do to `kvlab watch` and `drive`: cost a bounded time and size, and get a sentence."""
import contextlib
import gzip
import socket
import threading
import time

import pytest
from fake_engine import FakeEngine, vllm_page
from typer.testing import CliRunner

from kvlab.cli import app
from kvlab.serving import scrape as module
from kvlab.serving.drive import Ask, drive
from kvlab.serving.scrape import Scrape, ScrapeError
from kvlab.serving.windows import History

PAGE = vllm_page(running=3)


@contextlib.contextmanager
def server(talk):
    """A server that accepts one connection after another and does with each whatever `talk` says; yields its URL."""
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        def serve():
            while not stop.is_set():
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError):
                    talk(connection, stop)
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        stop.set()
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        thread.join(5)
        assert not thread.is_alive(), "the client let the connection go"


def sends(head, again, every_s=0.0):
    """First the head, then the same bytes over and over."""
    def talk(connection, stop):
        connection.recv(65536)
        connection.sendall(head)
        while not stop.is_set():
            connection.sendall(again)
            if every_s:
                stop.wait(every_s)
    return talk


def sentence(url, **more):
    with pytest.raises(ScrapeError) as error:
        Scrape.of(url, **more).snapshot()
    text = str(error.value)
    assert text.isprintable() and len(text) < 250
    return text


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize("talk, said", [
    (sends(OK + b"\r\n", b"vllm:x 1\n" * 1000), "sends more than 100,000 bytes"),
    (sends(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"2328\r\n" + b"vllm:x 1\n" * 1000 + b"\r\n"),
     "sends more than"),
    (sends(OK + b"Content-Length: 999999999999\r\n\r\n", b"vllm:x 1\n" * 1000), "sends more than"),
    (sends(OK, b"X: " + b"a" * 60_000 + b"\r\n"), "does not speak HTTP as it should"),
    (sends(OK + b"X: ", b"a" * 60_000), "does not speak HTTP as it should"),
    (sends(b"HTTP/1.1 ", b"2" * 60_000), "does not speak HTTP as it should"),
], ids=["body", "chunks", "promised", "headers", "a header", "status"])
def test_floods_end_at_a_size(talk, said):
    with server(talk) as url:
        assert said in sentence(url, most_bytes=100_000, timeout_s=20)


@pytest.mark.parametrize("talk", [
    sends(b"", b"H", 0.02), sends(OK, b"a: b\r\n", 0.02), sends(OK + b"\r\n", b"v", 0.02),
    sends(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nv\r\n", 0.02),
    sends(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.02),
    lambda connection, stop: connection.recv(65536) and stop.wait(20),
], ids=["status", "headers", "body", "chunks", "100 Continue", "silence"])
def test_whoever_drips_is_cut_off_at_the_limit_for_everything_together(talk):
    with server(talk) as url:
        assert "did not answer whole within 0.3 s" in sentence(url, timeout_s=0.3)


def test_more_samples_than_any_engine_has_are_refused(monkeypatch):
    monkeypatch.setattr(module, "MOST_SAMPLES", 50)
    line = 'vllm:num_requests_running{engine="%d",model_name="m"} 1\n'
    with FakeEngine(PAGE + "".join(line % n for n in range(100))) as engine:
        assert "samples, and no engine has more than 50" in sentence(engine.url)
    with FakeEngine(PAGE) as engine:
        assert Scrape.of(engine.url).snapshot().value("running") == 3


def test_what_a_long_watch_keeps_of_a_scrape_are_gauges_and_sums():
    """Not the series of every counter and histogram: a server may name as many as fit an answer, each time new ones."""
    from kvlab.serving.metrics import read
    page = vllm_page(queried=9, hit=3, queue=(1, 2, 3))
    history = History((read(module.parse(page), float(at)) for at in range(5)), keep_s=100)
    kept = [(bool(one.snapshot.counters), bool(one.snapshot.histograms)) for one in history._entries]
    assert kept == [(False, False)] * 4 + [(True, True)] and all(one.snapshot.gauges for one in history._entries)
    assert history.window(100).increase("finished") == 0 and history.since_start().quantile("queue_s", 0.5)


def test_compression_is_unpacked_no_further_than_the_limit():
    bomb = gzip.compress(gzip.compress(b"vllm:x 1\n" * 3_000_000)) * 3
    with FakeEngine({"body": bomb, "headers": {"Content-Encoding": "gzip"}}) as engine:
        sentence(engine.url, most_bytes=10_000)
    for other in ("deflate", "br", "zstd", "gzip, gzip"):                # never asked for, and not unpacked
        with FakeEngine({"body": bomb[:1000] + b"\n", "headers": {"Content-Encoding": other}}) as engine:
            assert engine.url in sentence(engine.url)


@pytest.mark.parametrize("place", ["file:///etc/passwd", "ftp://127.0.0.1/x", "gopher://127.0.0.1/", "//127.0.0.2/",
                                   "https://127.0.0.1/", "http://127.0.0.1:1/", "javascript:alert(1)", "data:,x",
                                   "http://user:pw@127.0.0.2/"])
def test_a_redirect_leads_to_no_other_scheme_host_or_port(place):
    with FakeEngine({"status": 302, "headers": {"Location": place}}) as engine:
        text = sentence(engine.url)
        assert "redirects to another server, which is not followed" in text and "pw" not in text


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://h/x", "gopher://h", "data:text/plain,x", "unix:///run/x",
                                 "http+unix://x/y", "HTTP+FILE://h", "javascript:alert(1)"])
def test_only_http_and_https_are_opened(url, tmp_path):
    for opened in (lambda: Scrape.of(url), lambda: drive(url, [Ask(0, "a", 1)], tmp_path / "r", {})):
        with pytest.raises(ValueError, match="must look like http://host:port"):
            opened()
    done = CliRunner().invoke(app, ["watch", url, "--once"], standalone_mode=False)
    assert isinstance(done.exception, ValueError)


# --- drive ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("talk", [
    sends(OK, b"a: b\r\n", 0.02), sends(OK + b"\r\ndata: ", b"x", 0.02), sends(b"", b"H", 0.02),
    lambda connection, stop: connection.recv(65536) and stop.wait(20)], ids=["headers", "a line", "status", "silence"])
def test_driving_a_server_that_drips_ends_with_the_time_of_the_answer(talk, tmp_path):
    began = time.monotonic()
    with server(talk) as url:
        (row,) = drive(url, [Ask(0, "Hello", 2)], tmp_path / "run", {}, timeout_s=0.4)
    assert row["error"] == "the answer takes too long" and row["last_token_ts"] is None
    assert time.monotonic() - began < 10                                 # not 20: a hang, not a slow machine


def test_driving_a_server_that_sends_without_end_stops_at_the_size(tmp_path, monkeypatch):
    monkeypatch.setattr("kvlab.serving.drive.MOST_BYTES", 100_000)
    with server(sends(OK + b"\r\n", b": comment\n" * 1000)) as url:
        (row,) = drive(url, [Ask(0, "Hello", 2)], tmp_path / "run", {}, timeout_s=20)
    assert row["error"] == "the answer is too long"


@pytest.mark.parametrize("url", ["http://user:hunter22@h:1", "https://user:hunter22@h", "http://h:99999", "http://"])
def test_driving_refuses_credentials_and_does_not_repeat_them(url, tmp_path):
    with pytest.raises(ValueError, match="without credentials") as error:
        drive(url, [Ask(0, "a", 1)], tmp_path / "r", {})
    assert "hunter22" not in str(error.value) and not (tmp_path / "r").exists()


# --- download -------------------------------------------------------------------------------------

def test_a_config_larger_than_is_read_is_not_downloaded(monkeypatch):
    hub = pytest.importorskip("huggingface_hub", reason="the extra `models` is not installed")
    from types import SimpleNamespace

    from kvlab.catalog import resolve
    fetched = []
    monkeypatch.setattr(resolve, "in_hub_cache", lambda name, unknown: None)
    monkeypatch.setattr(hub, "get_hf_file_metadata", lambda url: SimpleNamespace(size=2**40))
    monkeypatch.setattr(hub, "hf_hub_download", lambda *what: fetched.append(what))
    with pytest.raises(OSError, match="the hub states 1,099,511,627,776 bytes, and kvlab reads 4,194,304"):
        resolve.model("org/model", download=True)

    def fails(url):
        raise RuntimeError("401 for url https://me:hunter22@mirror.invalid/x?token=tok3nvalue")
    monkeypatch.setattr(hub, "get_hf_file_metadata", fails)
    with pytest.raises(OSError, match="could not be fetched") as error:
        resolve.model("org/model", download=True)
    assert "hunter22" not in str(error.value) and "tok3nvalue" not in str(error.value) and not fetched
