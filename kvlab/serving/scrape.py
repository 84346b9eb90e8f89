"""One scrape of a server's metrics over HTTP: fetched within a time and a size, parsed, or refused in one sentence.

The time limit holds for everything together: looking up the name, connecting, headers that drip, the body. A token
comes from an environment variable and goes to the host that was named and nowhere else. Nothing that could hold a
secret (credentials or a query in the URL, the token) is part of a message. No proxy is used.
Source: Prometheus exposition formats, text version 0.0.4 (prometheus.io/docs/instrumenting/exposition_formats).
"""
from __future__ import annotations

import base64
import contextlib
import gzip
import http.client
import io
import os
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from kvlab.serving.metrics import Snapshot, read

TIMEOUT_S = 5.0
MOST_BYTES = 4 * 2**20                  # some hundred times what an engine exports; parsed in about 1.5 s
MOST_CHARACTERS = 2**17                 # of a line: the parser's time grows with the square of a label's length
MOST_SAMPLES = 50_000                   # of an answer: a vLLM of 64 engines has about 40,000
LONGEST_ADDRESS = 2000
REDIRECTS = 3
TOKEN_ENV = "KVLAB_TOKEN"


class ScrapeError(OSError):
    """A scrape that gave no metrics, said in one sentence."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, slots=True)
class Scrape:
    """A server whose metrics are read. Make it with `Scrape.of`, which checks what was given.

    url: with /metrics behind a bare host. timeout_s: for one fetch altogether. most_bytes: of the unpacked answer.
    """
    url: SplitResult
    timeout_s: float
    most_bytes: int
    authorization: str = ""

    def __repr__(self) -> str:
        return f"Scrape({self.shown!r})"

    @classmethod
    def of(cls, url: str, timeout_s: float = TIMEOUT_S, most_bytes: int = MOST_BYTES, token_env: str = "") -> Scrape:
        """The server at `url`; "localhost:8000" will do. token_env: variable of the token, else KVLAB_TOKEN if set.

        ValueError: no such address, a limit that is no positive number, a variable that is not set, no usable token.
        """
        text = url.strip() if len(url) <= LONGEST_ADDRESS else ""
        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            host, _ = parts.hostname, parts.port
            (host or "").encode("idna")
        except ValueError:
            host = None
        plain = text.isascii() and text.isprintable() and " " not in text
        if not host or not plain or parts.scheme not in ("http", "https"):
            raise ValueError("the address must look like http://host:port or http://host:port/metrics")
        if parts.path in ("", "/"):
            parts = parts._replace(path="/metrics")
        for name, limit in (("timeout", timeout_s), ("size limit", most_bytes)):
            if not 0 < limit < float("inf"):
                raise ValueError(f"the {name} must be a positive number, got {limit}")
        return cls(parts, timeout_s, most_bytes, _authorization(parts, token_env))

    @property
    def shown(self) -> str:
        """The address without what could be secret."""
        host = self.url.hostname or ""
        host = f"[{host}]" if ":" in host else host
        return f"{self.url.scheme}://{host}{f':{self.url.port}' if self.url.port else ''}{self.url.path}"

    def snapshot(self, at_s: float | None = None) -> Snapshot:
        """Fetch and read once. at_s: default the time of the answer on the monotonic clock. ScrapeError: why not."""
        text = self.fetch()
        at_s = time.monotonic() if at_s is None else at_s
        try:
            families = parse(text)
            count = sum(len(family.samples) for family in families)
            if count > MOST_SAMPLES:                         # a watch keeps the series of a whole window
                raise ValueError(f"with {count:,} samples, and no engine has more than {MOST_SAMPLES:,}")
            return read(families, at_s)
        except ValueError as error:
            raise ScrapeError(f"{self.shown} answers, but {error}") from None

    def fetch(self) -> str:
        """The text of one answer. ScrapeError: down, slow, too large, an error, a redirect elsewhere, or no metrics."""
        answer: list[str | Exception] = []
        open_now: list[socket.socket] = []

        def work() -> None:
            try:
                answer.append(self._fetch(open_now))
            except Exception as error:                       # carried over to the thread that waits
                answer.append(error)
        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        worker.join(self.timeout_s)
        late = not answer
        for connected in open_now if late else ():
            with contextlib.suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)
        if late or isinstance(answer[0], TimeoutError):
            raise ScrapeError(f"{self.shown} did not answer whole within {self.timeout_s:g} s; "
                              "is it busy, or should the time limit be longer?")
        if isinstance(answer[0], ScrapeError):
            raise answer[0]
        if isinstance(answer[0], OSError):
            why = answer[0].strerror or type(answer[0]).__name__
            raise ScrapeError(f"no answer from {self.shown}: {why}; is the server running, and the port right?"
                              ) from None
        if isinstance(answer[0], http.client.HTTPException):
            raise ScrapeError(f"{self.shown} does not speak HTTP as it should ({type(answer[0]).__name__})") from None
        if isinstance(answer[0], Exception):
            raise answer[0]
        return answer[0]

    def _fetch(self, open_now: list[socket.socket]) -> str:
        url = self.url
        for _ in range(REDIRECTS + 1):
            made = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
            connection = made(url.hostname or "", url.port, timeout=self.timeout_s)
            headers = {"Accept": "text/plain;version=0.0.4", "Accept-Encoding": "identity", "User-Agent": "kvlab"}
            if self.authorization:
                headers["Authorization"] = self.authorization
            with contextlib.closing(connection):
                connection.connect()
                open_now[:] = [connection.sock]
                connection.request("GET", url.path + (f"?{url.query}" if url.query else ""), headers=headers)
                with connection.getresponse() as response:      # it holds the socket, not the connection
                    if response.status not in (301, 302, 303, 307, 308):
                        return self._body(response)
                    url = self._followed(url, response.getheader("Location", ""))
        raise ScrapeError(f"{self.shown} redirects more than {REDIRECTS} times")

    def _followed(self, url: SplitResult, location: str) -> SplitResult:
        try:
            new = urlsplit(urljoin(url.geturl(), location))
            same = (new.scheme, new.hostname, new.port) == (url.scheme, url.hostname, url.port)
        except ValueError:
            same = False
        if not same:
            raise ScrapeError(f"{self.shown} redirects to another server, which is not followed; give that address "
                              "itself")
        return new

    def _body(self, response: http.client.HTTPResponse) -> str:
        if response.status != 200:
            phrase = http.client.responses.get(response.status, "")
            hint = {401: f"; put its token into the variable {TOKEN_ENV}", 403: "; its token may be missing or wrong",
                    404: "; metrics may be elsewhere (trtllm-serve: /prometheus/metrics) or switched off "
                         "(SGLang: --enable-metrics)", 501: "; llama-server needs --metrics"}.get(response.status, "")
            raise ScrapeError(f"{self.shown} answers {response.status} {phrase}".rstrip() + hint)
        raw = response.read(self.most_bytes + 1)
        promised = response.getheader("Content-Length", "")
        if promised.isdecimal() and len(raw) < min(int(promised), self.most_bytes + 1):
            raise ScrapeError(f"{self.shown} broke off after {len(raw):,} of {int(promised):,} bytes")
        if response.getheader("Content-Encoding", "identity").lower() == "gzip" and len(raw) <= self.most_bytes:
            try:
                raw = gzip.GzipFile(fileobj=io.BytesIO(raw)).read(self.most_bytes + 1)
            except (OSError, EOFError, zlib.error):
                raise ScrapeError(f"{self.shown} says gzip and sends something else") from None
        if len(raw) > self.most_bytes:
            raise ScrapeError(f"{self.shown} sends more than {self.most_bytes:,} bytes, which is no engine's metrics "
                              "page")
        text = raw.decode("utf-8", "replace")
        begins = text.lstrip()[:1]
        if begins == "<" or "html" in response.getheader("Content-Type", "").lower():
            raise ScrapeError(f"{self.shown} answers with a web page, not metrics; is /metrics missing in the address?")
        if begins in ("{", "["):
            raise ScrapeError(f"{self.shown} answers with JSON, not metrics (trtllm-serve has them at "
                              "/prometheus/metrics)")
        if not begins:
            raise ScrapeError(f"{self.shown} answers with an empty page")
        if not text.endswith("\n"):
            raise ScrapeError(f"{self.shown} breaks off inside a line: an exposition ends with a line feed")
        return text


def parse(text: str) -> list:
    """The metric families of an exposition in Prometheus' text format.

    ValueError: the first line that is none, by its number: its text may be a server's complaint that quotes the token.
    """
    from prometheus_client.parser import text_fd_to_metric_families
    number = 0

    def lines() -> Iterator[str]:
        nonlocal number
        for line in text.split("\n"):
            number += 1
            if len(line) > MOST_CHARACTERS:
                raise ValueError
            yield line
    try:
        return list(text_fd_to_metric_families(lines()))    # type: ignore[arg-type]  # it only iterates over it
    except (ValueError, IndexError, KeyError, AssertionError, OverflowError):
        raise ValueError(f"line {number} of its answer is no metric") from None


def _authorization(url: SplitResult, token_env: str) -> str:
    token = os.environ.get(token_env or TOKEN_ENV, "")
    if token_env and not token:
        raise ValueError(f"the environment variable {token_env}, which should hold the token, is not set")
    if token:
        if not token.isascii() or not token.isprintable() or " " in token:
            raise ValueError(f"the token in {token_env or TOKEN_ENV} has characters that no header can hold")
        return f"Bearer {token}"
    if url.username is not None:
        pair = f"{unquote(url.username)}:{unquote(url.password or '')}"
        return "Basic " + base64.b64encode(pair.encode()).decode()
    return ""
