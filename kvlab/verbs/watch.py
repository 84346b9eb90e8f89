"""kvlab watch: a serving engine's own metrics, in one vocabulary whichever engine it is, with alerts."""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvlab.verbs._complete import words
from kvlab.verbs._help import verb
from kvlab.verbs._options import seconds

HELP = verb("kvlab watch http://localhost:8000 --for 5m --kv-usage 0.95",
            "kvlab watch --rules kvlab.rules.yml --engine vllm",
            Scraping="every for_ window once timeout token_env",
            Alerts="preemption_ratio queue_p99 kv_usage hit_rate rules engine", Output="out as_json help")
ENGINES = ("vllm", "sglang", "tgi", "triton", "trtllm", "llamacpp", "kvlab_sim")


def command(url: Annotated[str, typer.Argument(help="http://host:port of the server; /metrics is added to a bare "
                                               "host. Not needed for --rules with --engine.")] = "",
            every: Annotated[str, typer.Option(help="Time between scrapes: 1, 500ms, 2s.")] = "1s",
            for_: Annotated[str | None, typer.Option("--for", help="How long: 60s, 5m, 1h; default: until "
                                                     "Ctrl-C.")] = None,
            window: Annotated[str, typer.Option(help="Over how long ratios, p50, p99 and alerts look.")] = "5m",
            preemption_ratio: Annotated[float, typer.Option(help="Alert above: requests preempted per request "
                                                            "finished.")] = 0.05,
            queue_p99: Annotated[str | None, typer.Option(help="Alert above: p99 of the time in the queue, such as "
                                                          "10s.")] = None,
            kv_usage: Annotated[float | None, typer.Option(help="Alert above: share of the KV cache in use, 0 to "
                                                           "1.")] = None,
            hit_rate: Annotated[float | None, typer.Option(help="Alert below: share of prompt tokens found in the "
                                                           "prefix cache, 0 to 1.")] = None,
            out: Annotated[Path | None, typer.Option(help="A .parquet file for the result table, a case per "
                                                     "scrape.")] = None,
            once: Annotated[bool, typer.Option("--once", help="One scrape: what it tells since the engine's "
                                               "start.")] = False,
            timeout: Annotated[str, typer.Option(help="Most time for one scrape.")] = "5s",
            token_env: Annotated[str, typer.Option(help="Environment variable that holds the server's token; "
                                                   "default: KVLAB_TOKEN, if set.")] = "",
            rules: Annotated[Path | None, typer.Option(help="Write the alerts as a Prometheus rule file, and "
                                                       "end.")] = None,
            engine: Annotated[str, typer.Option(autocompletion=words(*ENGINES), help="With --rules: vllm, sglang, "
                                                "tgi, triton, trtllm, llamacpp or kvlab_sim. Default: what the "
                                                "server is.")] = "",
            as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per "
                                                  "scrape.")] = False) -> int:
    """Watch a serving engine's metrics and alerts, in one vocabulary for all engines.

    Exit code: 0 if nothing fired, 1 if an alert fired or a scrape failed, 2 for wrong use.
    """
    from kvlab.serving.alerts import Thresholds
    from kvlab.serving.scrape import Scrape
    for option, path in (("--rules", rules), ("--out", out)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ValueError(f"{option} {path} must be a file in a folder that exists")
    thresholds = Thresholds(preemption_ratio, queue_p99 and seconds("--queue-p99", queue_p99), kv_usage, hit_rate,
                            seconds("--window", window))
    if not url and not (rules and engine):
        raise ValueError("give the address of a server, such as http://localhost:8000, or --rules FILE --engine NAME")
    if engine and not rules:
        raise ValueError("--engine goes with --rules; a watched server is known by its metrics")
    server = Scrape.of(url, seconds("--timeout", timeout), token_env=token_env) if url else None
    if rules:
        return _write_rules(rules, engine or server.snapshot().engine, thresholds)
    if out is not None and out.suffix != ".parquet":
        raise ValueError(f"--out {out} must be a .parquet file")
    looks, for_s = [], None if for_ is None else seconds("--for", for_)
    try:
        fired = _show(server, thresholds, seconds("--every", every), for_s, once, as_json,
                      looks.append if out is not None else lambda look: None)
    finally:                                             # whatever ended the watch: what was seen is kept
        if looks:
            from kvlab.record.export import write_parquet
            from kvlab.record.reading import table
            write_parquet(table(row for i, look in enumerate(looks) for row in look.rows(i)), out)
    if looks:
        print(out, file=sys.stderr if as_json else sys.stdout)
    return int(fired)


def _write_rules(path: Path, engine: str, thresholds) -> int:
    from kvlab.record.export import atomic_write
    from kvlab.serving.rules import rule_file
    text = rule_file(engine, thresholds, skip_missing=True)
    for line in text.splitlines()[1:]:
        if line.startswith("#"):
            print(f"kvlab: left out {line[2:]}", file=sys.stderr)
    atomic_write(path, text.encode())
    print(path)
    return 0


def _show(server, thresholds, every_s, for_s, once, as_json, keep) -> bool:
    """Show each scrape as it comes; whether an alert fired or a scrape failed. Ctrl-C ends the watch."""
    import contextlib

    from kvlab.serving.watching import watch
    from kvlab.verbs import _watch_table as shown
    live, bad, look, ever, first = None, False, None, {}, True
    if sys.stdout.isatty() and not as_json and not once:
        from rich.live import Live
        live = Live(auto_refresh=False)
    with live or contextlib.nullcontext(), contextlib.suppress(KeyboardInterrupt):
        for look in watch(server, thresholds, every_s, for_s, once=once):
            keep(look)
            ever |= {alert.name: alert for alert in look.alerts if alert.firing}
            bad |= bool(look.problem)
            if live:
                live.update(shown.table(look, server.shown), refresh=True)
            elif as_json:
                print(shown.json_line(look), flush=True)
            else:
                if first:
                    print("\n".join([f"{look.engine} at {server.shown}", shown.LEGEND, *shown.absent(look)]))
                print(shown.line(look), flush=True)
            first = False
    if look is None:
        raise KeyboardInterrupt                          # before the first scrape: nothing was watched
    if not as_json:
        now = {alert.name: alert for alert in look.alerts}
        for name, alert in (now | ever).items():
            print(shown.said(alert) + ("" if name not in ever or now[name].firing else "; over by now"))
    return bad or bool(ever)
