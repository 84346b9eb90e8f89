"""A server on loopback that answers each request as told: pages, statuses, headers, or bytes that drip."""
import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeEngine:
    """`answers`: one per request, the last one for all further; each a dict of body (bytes or text), status, headers,
    pause_s (before anything), drip_s (between single bytes). `seen`: (path, headers) of what was asked."""

    def __init__(self, *answers):
        self.answers, self.seen, self.stop = list(answers), [], threading.Event()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, handler):
        given = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        given = given if isinstance(given, dict) else {"body": given}
        self.seen.append((handler.path, dict(handler.headers)))
        body = given.get("body", b"")
        body = body.encode() if isinstance(body, str) else body
        self.stop.wait(given.get("pause_s", 0))
        handler.send_response(given.get("status", 200))
        headers = {"Content-Type": "text/plain; version=0.0.4", "Content-Length": str(len(body))}
        for name, value in (headers | given.get("headers", {})).items():
            if value is not None:
                handler.send_header(name, value)
        handler.end_headers()
        if "drip_s" not in given:
            handler.wfile.write(body)
        for i in range(len(body) if "drip_s" in given else 0):
            if self.stop.wait(given["drip_s"]):
                return
            handler.wfile.write(body[i:i + 1])

    def __enter__(self):
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                with contextlib.suppress(OSError):                     # the client may have gone
                    fake.answer(self)

            def log_message(self, *what):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

        self.server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *what):
        self.stop.set()
        self.server.shutdown()
        self.server.server_close()


class FakeClock:
    """A clock that goes forward by what was slept, and by a hundredth of a second each time it is looked at."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        self.now += 0.01
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def vllm_page(running=1, waiting=0, usage=0.5, preempted=0, finished=0, queried=0, hit=0, queue=(0, 0, 0), engine="0"):
    """A small vLLM page; queue: requests up to 0.3 s, up to 60 s, altogether."""
    labels = f'engine="{engine}",model_name="org/m"'
    return "".join([
        f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{{{labels}}} {running}\n",
        f"# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{{{labels}}} {waiting}\n",
        f"# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{{{labels}}} {usage}\n",
        f"# TYPE vllm:num_preemptions_total counter\nvllm:num_preemptions_total{{{labels}}} {preempted}\n",
        f'# TYPE vllm:request_success_total counter\nvllm:request_success_total{{{labels},finished_reason="stop"}} '
        f"{finished}\n",
        f"# TYPE vllm:prefix_cache_queries_total counter\nvllm:prefix_cache_queries_total{{{labels}}} {queried}\n",
        f"# TYPE vllm:prefix_cache_hits_total counter\nvllm:prefix_cache_hits_total{{{labels}}} {hit}\n",
        "# TYPE vllm:request_queue_time_seconds histogram\n",
        *(f'vllm:request_queue_time_seconds_bucket{{{labels},le="{bound}"}} {count}\n'
          for bound, count in zip(("0.3", "60.0", "+Inf"), queue)),
        f"vllm:request_queue_time_seconds_count{{{labels}}} {queue[2]}\n",
        f"vllm:request_queue_time_seconds_sum{{{labels}}} 1.0\n"])

