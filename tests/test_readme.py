"""The README is true: its variant is right as printed, its commands exist, its numbers come out."""
import re
import subprocess
import sys
from pathlib import Path

from kvlab.catalog.models import model
from kvlab.kv.sizing import crossover_tokens, kv_bytes, weight_bytes

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_printed_variant_agrees_with_the_oracle(tmp_path):
    (variant,) = [code for code in re.findall(r"```python\n(.*?)```", README, re.S) if code.startswith("# my.py")]
    (tmp_path / "my.py").write_text(variant)
    done = subprocess.run([sys.executable, "-m", "kvlab", "check", "my.py:Mine"], capture_output=True, text=True,
                          cwd=tmp_path, env={**__import__("os").environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0 and " 0 fail" in done.stdout, done.stdout + done.stderr


def test_the_numbers_of_the_first_screen():
    spec, text = model("Qwen/Qwen2-72B"), " ".join(README.split())
    assert f"{weight_bytes(spec) / 1e9:.0f} GB" == "145 GB" and "145 GB of weights" in text
    assert f"{kv_bytes(spec, 2048, 'bf16') / 1e9:.2f} GB" == "0.67 GB" and "0.67 GB of K and V" in text
    assert f"{crossover_tokens(spec):,}" == "443,763" and "443,763 cached tokens, over thirteen full contexts" in text
    assert int(crossover_tokens(spec) / spec.context) == 13


def test_the_printed_size_is_what_the_command_prints():
    done = subprocess.run([sys.executable, "-m", "kvlab", "size", "Qwen/Qwen2-72B", "--kv-len", "4096"],
                          capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() in README


def test_every_command_and_file_that_is_named_exists():
    told = subprocess.run([sys.executable, "-m", "kvlab", "--help"], capture_output=True, text=True, cwd=ROOT).stdout
    code = "\n".join(re.findall(r"```\n(.*?)```", README, re.S) + re.findall(r"`([^`\n]+)`", README))
    verbs = set(re.findall(r"^(?:\$ |python -m )?kvlab ([a-z][a-z-]*)", code, re.M))
    assert {"size", "run", "check"} <= verbs
    for verb in verbs:
        assert re.search(rf"^  {verb} ", told, re.M), verb
    for path in re.findall(r"\]\(((?!http)[^)]+)\)", README):
        assert (ROOT / path).exists(), path
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"^make ([a-z-]+)", code, re.M)):
        assert re.search(rf"^{target}:", makefile, re.M), target
