"""One new file adds a variant, a probe, a format family, a study or a figure; no existing file is edited."""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

NEW = {
    "attention/backwards.py": '''
"""Attention over tokens in reverse order: softmax does not care."""
from dataclasses import dataclass
from typing import ClassVar

from kvlab.attention import contiguous_only, least_cost


@dataclass(frozen=True)
class Backwards:
    """Decode attention that walks the tokens from the last to the first."""
    name: ClassVar[str] = "backwards"

    def why_not(self, trial):
        if trial.workload.phase != "decode" or trial.workload.shape.window:
            return "decodes only, without a window"
        return contiguous_only(trial)

    def prepare(self, trial, inputs):
        def call():
            import torch
            out = []
            for b, q_TQD in enumerate(inputs.q_BTQD):
                k, v = (x.flip(1) for x in inputs.decode(*inputs.stored(b), inputs.kv_lens[b]))
                q_KGD = q_TQD.view(k.shape[0], -1, k.shape[-1])
                weight = (q_KGD @ k.transpose(1, 2) * k.shape[-1]**-0.5).softmax(-1)
                out.append((weight @ v).view(1, q_TQD.shape[1], -1))
            return torch.cat(out)
        return call

    def cost(self, trial, cache_bytes=0):
        return least_cost(trial, cache_bytes)
''',
    "probes/tokens.py": '''
"""How many tokens a call attends to."""
from dataclasses import dataclass
from typing import ClassVar

from kvlab.record.reading import Reading


@dataclass(frozen=True)
class Tokens:
    """Sum of kv_lens, counted."""
    name: ClassVar[str] = "tokens"
    metrics: ClassVar[dict[str, str]] = {"attended_tokens": "count"}
    needs: ClassVar[tuple[str, ...]] = ("kernel_error",)
    rotates: ClassVar[bool] = False

    def why_not(self, trial):
        return None

    def measure(self, bench):
        for trial in bench.trials:
            yield trial, Reading("attended_tokens", sum(trial.workload.kv_lens), "count", "modelled", source=self.name)
''',
    "kv/formats/fp64.py": '''
"""K and V in double precision."""
from dataclasses import dataclass

from kvlab.kv.formats._base import Codec, Component, KVFormat

EXAMPLES = ("fp64",)


@dataclass(frozen=True)
class Double(Codec):
    """Eight bytes an element."""
    name: str = "fp64"
    about: str = "fp64, no scale"

    def components(self, head_dim):
        return (Component("values", 1, head_dim, 8, "float64"),)

    def encode(self, x_KSD):
        return (x_KSD.double().contiguous(),)

    def decode(self, arrays, kv_len, dtype):
        return arrays[0][..., :kv_len, :].to(dtype)


def kv_format(name):
    return KVFormat(name, Double(), Double()) if name == "fp64" else None
''',
    "studies/reversal.py": '''
"""Does the order of the tokens matter? It should not."""
from kvlab.attention import Comparison, trial
from kvlab.probes import measure
from kvlab.probes.kernel_error import KernelError
from kvlab.probes.tokens import Tokens
from kvlab.shapes import AttentionShape, Workload

SIZES = ("smoke",)


def cases(size, *, device="cpu", variants=None, model=None):
    for kv_len in (32, 64):
        workload = Workload.decode(AttentionShape(4, 2, 16), kv_len=kv_len)
        yield Comparison(tuple(trial(v, workload, kv_format="fp64", device=device) for v in ("backwards", "naive")))


def run(case, *, artifacts=None, watch=None):
    return measure(case, (KernelError(), Tokens()), artifacts=artifacts, watch=watch)
''',
    "figures/reversal.py": '''
"""Error of walking the tokens backwards."""
STUDY = "reversal"


def select(table):
    return table[table["metric"] == "kernel_error"]


def draw(rows, style):
    figure, (ax,) = style.figure(2.5)
    for name, look in style.looks(rows["variant"]).items():
        own = rows[rows["variant"] == name]
        style.bars(ax, own["kv_len"], own, look)
    return figure
''',
}


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """A copy of the package with one new file of each kind in it."""
    folder = tmp_path_factory.mktemp("grown")
    shutil.copytree(ROOT / "kvlab", folder / "kvlab", ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in NEW.items():
        assert not (folder / "kvlab" / name).exists()
        (folder / "kvlab" / name).write_text(text.lstrip())
    return folder


def kvlab(folder, *arguments):
    return subprocess.run([sys.executable, "-m", "kvlab", *arguments], capture_output=True, text=True, cwd=folder,
                          env={**os.environ, "PYTHONPATH": str(folder)})


@pytest.mark.parametrize("what, name", [
    ("variants", "backwards"), ("probes", "tokens"), ("formats", "fp64"), ("studies", "reversal"),
    ("figures", "reversal"), ("metrics", "attended_tokens")])
def test_a_new_file_is_listed(grown, what, name):
    done = kvlab(grown, "ls", what, "--json")
    assert done.returncode == 0 and name in [row["name"] for row in json.loads(done.stdout)], done.stderr


def test_a_new_format_can_be_that_of_k_or_of_v_alone(grown):
    script = ("from kvlab.kv.formats import kv_format; from kvlab.shapes import AttentionShape; "
              "print([kv_format(n).nbytes(10, AttentionShape(2, 1, 4)) for n in ('fp64+bf16', 'int8/token+fp64')])")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=grown,
                          env={**os.environ, "PYTHONPATH": str(grown)})
    assert done.stdout.strip() == str([10 * 4 * (8 + 2), 10 * (4 + 4 + 4 * 8)]), done.stderr


def test_a_new_study_runs_with_the_new_variant_probe_and_format_and_its_figure_is_drawn(grown):
    done = kvlab(grown, "run", "reversal", "--size", "smoke", "--out", ".")
    assert done.returncode == 0, done.stderr
    run = grown / done.stdout.strip().splitlines()[-1]
    rows = (run / "figures" / "reversal.csv").read_text()
    assert "backwards" in rows and "fp64" in rows and (run / "figures" / "reversal.png").exists()
    from kvlab.record.store import read_table
    table = read_table(run)
    assert sorted(table[table["metric"] == "attended_tokens"]["value"]) == [32, 32, 64, 64]
    assert set(table["status"]) == {"ok"}


def test_a_new_variant_is_judged_by_the_same_oracle(grown):
    done = kvlab(grown, "check", "backwards")
    assert done.returncode == 0 and " 0 fail" in done.stdout, done.stdout + done.stderr
