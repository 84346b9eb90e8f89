"""What kvlab stores itself, and what its name linter reads, as targets."""
from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from random import Random

from fuzz_targets import Target


def _journal(path: Path) -> None:
    from kvlab.record import journal
    problems: list[str] = []
    with path.open("rb") as file:
        for one in journal.read(file, problems):
            assert one.comparison_id is not None
    for sentence in problems:
        if len(sentence) > 1000:
            raise AssertionError(f"a problem of {len(sentence):,} characters: {sentence:.100}")


def _journals() -> list[bytes]:
    from kvlab.record.journal import encode
    from kvlab.record.reading import Reading, missing
    rows = [{"case_id": "c", "kv_len": 4096, **asdict(reading)} for reading in (
        Reading("latency_s", 1.5, "s", "measured", n=30, note="µs"), missing("power", "W", "no sensor"))]
    text = b"".join(encode(name, [{**row, "comparison_id": name} for row in rows]) for name in ("c1", "c2"))
    return [b"\n".join(line[:line.rindex(b',"crc"')] + b"}" for line in text.splitlines()) + b"\n", text]


def _checksummed(chance: Random, body: bytes) -> bytes:
    """Every line that begins as a journal's with the checksum that is right for it."""
    lines = []
    for line in body.split(b"\n"):
        start = next((one for one in (b'{"row":', b'{"commit":') if line.startswith(one)), b"")
        if start and b'"crc"' not in line and line.endswith(b"}"):
            content = line[len(start):-1].lstrip()              # changed JSON has a space there
            line = b'%s%s,"crc":"%08x"}' % (start, content, zlib.crc32(content))
        lines.append(line)
    return b"\n".join(lines)


def _manifest(path: Path) -> None:
    from kvlab.record.environment import Manifest
    Manifest.read(path.parent)


def _manifests() -> list[bytes]:
    from kvlab.record.environment import Manifest
    made = Manifest(study="memory_wall", created_utc="2026-01-01T00:00:00Z", run_id="20260101T000000Z-abcdef",
                    argv=["kvlab", "run", "memory_wall"], size="smoke", device="cpu", seeds=[0, 1], models=["m"],
                    options={"a": [1, {"b": None}]}, environment={"cpu": "x", "cores": 2},
                    variants=[dict(ref="mine.py:Mine", sha256="0" * 64, source="class Mine: pass\n")])
    return [made.model_dump_json().encode()]


def _lint(path: Path) -> None:
    from kvlab.serving.lint import lint
    report = lint([path])
    for sentence in report.skipped:
        if len(sentence.replace(str(path), "")) > 1000:
            raise AssertionError(f"a sentence of {len(sentence):,} characters: {sentence:.100}")


def _sources(*names: str) -> Callable[[], list[bytes]]:
    def seeds() -> list[bytes]:
        from fuzz_lint_seeds import SEEDS
        return [SEEDS[name].encode() for name in names]
    return seeds


RECORD_TARGETS = (
    Target("journal", "readings.jsonl", _journal, _journals, _checksummed),
    Target("manifest", "manifest.json", _manifest, _manifests),
    # a tree of Python takes some 200 times its source's bytes; sources above 512 KiB are read as text
    Target("lint_python", "a.py", _lint, _sources("python"), ratio=300),
    Target("lint_notebook", "a.ipynb", _lint, _sources("notebook"), ratio=300),
    Target("lint_text", "a.md", _lint, _sources("markdown", "python", "shell"), ratio=300),
    Target("lint_yaml", "a.yaml", _lint, _sources("compose", "rules", "json"), line_s=2e-5),
    Target("lint_docker", "Dockerfile", _lint, _sources("dockerfile", "shell")))
