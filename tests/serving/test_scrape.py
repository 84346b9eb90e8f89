"""One scrape: limits, redirects, secrets and broken answers; each refusal is one sentence."""
import gzip
import socket
import threading
import time
import tracemalloc

import pytest
from fake_engine import FakeEngine, vllm_page

from kvlab.serving.scrape import Scrape, ScrapeError, parse

PAGE = vllm_page(running=3)


@pytest.fixture(autouse=True)
def no_token(monkeypatch):
    monkeypatch.delenv("KVLAB_TOKEN", raising=False)


def refused(*answers, match, **more):
    """The sentence by which a server with these answers is refused, and what it was asked."""
    with FakeEngine(*answers) as engine, pytest.raises(ScrapeError, match=match) as error:
        Scrape.of(engine.url, **more).snapshot()
    text = str(error.value)
    assert "\n" not in text and text.isprintable() and len(text) < 250
    return text, engine.seen


def test_a_page_is_read():
    with FakeEngine(PAGE) as engine:
        got = Scrape.of(engine.url.removeprefix("http://")).snapshot()
        assert got.engine == "vllm" and got.value("running") == 3
        assert engine.seen[0][0] == "/metrics" and "Authorization" not in engine.seen[0][1]
        Scrape.of(engine.url + "/prometheus/metrics?x=1").fetch()
        assert engine.seen[1][0] == "/prometheus/metrics?x=1"


def test_the_time_of_a_snapshot_is_given_or_the_clocks():
    with FakeEngine(PAGE) as engine:
        before = time.monotonic()
        assert before <= Scrape.of(engine.url).snapshot().at_s <= time.monotonic()
        assert Scrape.of(engine.url).snapshot(5.0).at_s == 5.0


@pytest.mark.parametrize("answer", [{"body": PAGE, "pause_s": 30}, {"body": PAGE, "drip_s": 0.05}])
def test_slow_and_dripping_answers_end_at_the_limit(answer):
    began = time.monotonic()
    refused(answer, match="did not answer whole within 0.3 s", timeout_s=0.3)
    assert time.monotonic() - began < 10


def test_headers_that_drip_end_at_the_limit_too():
    with socket.create_server(("127.0.0.1", 0)) as server:
        def drip():
            connection, _ = server.accept()
            with connection:
                for byte in b"HTTP/1.1 200 OK\r\nX-Long: " + b"a" * 10_000:
                    try:
                        connection.send(bytes([byte]))
                    except OSError:
                        return
                    time.sleep(0.02)
        thread = threading.Thread(target=drip)
        thread.start()
        began = time.monotonic()
        with pytest.raises(ScrapeError, match="within 0.3 s"):
            Scrape.of(f"127.0.0.1:{server.getsockname()[1]}", timeout_s=0.3).fetch()
        assert time.monotonic() - began < 10
        thread.join(5)
        assert not thread.is_alive()                        # the connection was closed, not left to drip on


def test_a_server_that_is_down():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ScrapeError, match=f"no answer from http://127.0.0.1:{port}/metrics: Connection refused; "):
        Scrape.of(f"127.0.0.1:{port}").fetch()
    with pytest.raises(ScrapeError, match="no answer from http://nowhere.invalid/metrics"):
        Scrape.of("nowhere.invalid", timeout_s=20).fetch()


def test_a_server_that_speaks_something_else():
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: server.accept()[0].send(b"SSH-2.0-OpenSSH\r\n"), daemon=True).start()
        with pytest.raises(ScrapeError, match="does not speak HTTP as it should|no answer from"):
            Scrape.of(f"127.0.0.1:{server.getsockname()[1]}", timeout_s=5).fetch()


@pytest.mark.parametrize("status, hint", [(401, "KVLAB_TOKEN"), (403, "missing or wrong"), (404, "elsewhere"),
                                          (501, "--metrics"), (500, "500 Internal Server Error$"), (418, "Teapot")])
def test_errors_of_http(status, hint):
    refused({"body": "no", "status": status}, match=f"answers {status}.*{hint}" if status < 500 else hint)


@pytest.mark.parametrize("body, match", [
    ("<!doctype html>\n<title>x</title>\n", "web page, not metrics; is /metrics missing"),
    ('{"kvCacheStats": {}}\n', "JSON, not metrics .trtllm-serve"),
    ("", "empty page"), ("\n\n", "empty page"),
    (PAGE[:-30], "breaks off inside a line"),
    (PAGE.rstrip("\n"), "breaks off inside a line"),
    (PAGE + "vllm:num_requests_run\n", r"line \d+ of its answer is no metric"),
    (PAGE + 'vllm:x{a="b\n', r"line \d+ of its answer is no metric"),
    (PAGE + "vllm:x{\x1b[31m} 1\n", r"line \d+ of its answer is no metric"),
    (PAGE + "vllm:x 1" + "2" * 500 + "z\n", r"line \d+ of its answer is no metric"),
    ("go_goroutines 7\n", "none of its 1 metrics is of an engine that kvlab knows"),
])
def test_pages_that_are_no_metrics(body, match):
    refused(body, match=match)


def test_a_complaint_that_quotes_the_token_is_not_repeated(monkeypatch):
    monkeypatch.setenv("KVLAB_TOKEN", "s3cret")
    for body in ("# no\nbad token:s3cret\n", 'bad{token="s3cret} 1\n', "vllm:x s3cret\n"):
        text, _ = refused(body, match=r"line \d of its answer is no metric")
        assert "s3cret" not in text


@pytest.mark.parametrize("label", ['\\"' * 2**20, "\\\\" * 2**20])
def test_a_label_that_takes_the_parser_long_is_refused_at_once(label):
    began = time.monotonic()
    refused(PAGE + f'vllm:x{{a="{label}"}} 1\n', match="of its answer is no metric")
    assert time.monotonic() - began < 10
    began = time.monotonic()
    parse(PAGE + ('vllm:x{a="' + label[:2**16 - 2] + '"} 1\n') * 5)                 # the longest lines that are read
    assert time.monotonic() - began < 20


def test_html_by_its_type_alone():
    refused({"body": "sign in\n", "headers": {"Content-Type": "text/html"}}, match="web page")


def test_broken_off_in_transit():
    refused({"body": PAGE, "headers": {"Content-Length": str(len(PAGE) + 10)}}, match="broke off after", timeout_s=5)


def test_sizes():
    big = vllm_page() + "# " + "x" * 100_000 + "\n"
    refused(big, match="more than 50,000 bytes", most_bytes=50_000)
    bomb = gzip.compress(b"vllm:x 1\n" * 3_000_000)
    assert len(bomb) < 100_000
    tracemalloc.start()
    refused({"body": bomb, "headers": {"Content-Encoding": "gzip"}}, match="more than 4,194,304 bytes")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000_000                                        # of 27 MB that it would unpack to


def test_gzip():
    with FakeEngine({"body": gzip.compress(PAGE.encode()), "headers": {"Content-Encoding": "gzip"}}) as engine:
        assert Scrape.of(engine.url).snapshot().value("running") == 3
    for body in (b"plain\n", gzip.compress(PAGE.encode())[:-20]):
        refused({"body": body, "headers": {"Content-Encoding": "gzip"}}, match="says gzip and sends something else")


def to(location):
    return {"status": 302, "headers": {"Location": location}}


def test_redirects_stay_on_the_server(monkeypatch):
    monkeypatch.setenv("KVLAB_TOKEN", "s3cret")
    with FakeEngine(to("/elsewhere"), PAGE) as engine:
        assert Scrape.of(engine.url).snapshot().value("running") == 3
        assert [path for path, _ in engine.seen] == ["/metrics", "/elsewhere"]
    with FakeEngine(PAGE) as other:
        for place in (f"{other.url}/metrics", "//127.0.0.2/metrics", "https://127.0.0.1/", "file:///etc/passwd", ""):
            if place:
                text, _ = refused(to(place), match="redirects to another server, which is not followed")
                assert "passwd" not in text
        assert not other.seen                                        # nor was the token carried there
    refused(to("/metrics"), match="redirects more than 3 times")
    refused(to("http://[bad"), match="another server")


def test_a_token_goes_into_the_header_and_nowhere_else(monkeypatch, capsys):
    monkeypatch.setenv("OTHER", "s3cret")
    with FakeEngine(PAGE, {"body": "no", "status": 401}) as engine:
        scrape = Scrape.of(engine.url, token_env="OTHER")
        scrape.fetch()
        assert engine.seen[0][1]["Authorization"] == "Bearer s3cret"
        with pytest.raises(ScrapeError) as error:
            scrape.fetch()
    assert "s3cret" not in str(error.value) + repr(scrape) + scrape.shown + "".join(capsys.readouterr())
    with pytest.raises(ValueError, match="variable NOT_SET, which should hold the token, is not set"):
        Scrape.of("localhost", token_env="NOT_SET")
    for bad in ("s3cret\n", "two words s3cret", "schlüssel-s3cret"):
        monkeypatch.setenv("KVLAB_TOKEN", bad)
        with pytest.raises(ValueError, match="characters that no header can hold") as error:
            Scrape.of("localhost")
        assert "s3cret" not in str(error.value)


def test_credentials_and_queries_of_an_address_are_not_shown():
    with FakeEngine(PAGE, {"body": "no", "status": 500}) as engine:
        scrape = Scrape.of(engine.url.replace("//", "//me:s3cr%40t@") + "/metrics?key=hidden")
        scrape.fetch()
        assert engine.seen[0][1]["Authorization"] == "Basic bWU6czNjckB0"             # me:s3cr@t
        with pytest.raises(ScrapeError) as error:
            scrape.fetch()
    for text in (str(error.value), repr(scrape), scrape.shown):
        assert "s3cr" not in text and "hidden" not in text and engine.url in text


@pytest.mark.parametrize("url", ["", "ftp://x", "http://", "http://h:99999", "http://h:x", "http://h/a b",
                                 "http://h/\x1b[0m", "http://ü" + "x" * 80, "http://a..b/", "http://[::1", "file:///etc/passwd"])
def test_addresses_that_are_none(url):
    with pytest.raises(ValueError, match="must look like http://host:port") as error:
        Scrape.of(url)
    assert str(error.value).isprintable()


def test_limits_must_be_positive():
    for bad in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="the timeout must be a positive number"):
            Scrape.of("localhost", timeout_s=bad)
    with pytest.raises(ValueError, match="size limit"):
        Scrape.of("localhost", most_bytes=0)


def test_an_address_of_ipv6_is_shown_as_one():
    assert Scrape.of("http://[::1]:8000").shown == "http://[::1]:8000/metrics"


def test_four_mebibytes_are_parsed_in_seconds():
    line = 'vllm:num_requests_running{engine="0",model_name="%d"} 1\n'
    text = "# TYPE vllm:num_requests_running gauge\n" + "".join(line % i for i in range(80_000))
    began = time.monotonic()
    assert len(parse(text)[0].samples) == 80_000 and time.monotonic() - began < 10
