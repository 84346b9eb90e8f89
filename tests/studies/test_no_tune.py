"""--no-tune: variants with the knob `tune` keep their default, in a run, in its resumption and in a single call."""
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

import pytest
from typer.testing import CliRunner

import kvlab
from kvlab.attention import Comparison, VariantRef, trial
from kvlab.attention.naive import Naive
from kvlab.attention.triton_flash import TritonFlash
from kvlab.cli import app
from kvlab.record.environment import Manifest
from kvlab.record.reading import Reading
from kvlab.record.store import StoreError
from kvlab.shapes import AttentionShape, Workload
from kvlab.studies import _run, _worker
from kvlab.studies._run import in_process, run, untuned

WORKLOAD = Workload.decode(AttentionShape(4, 2, 16), kv_len=32)
KEPT, OFF = VariantRef("triton_flash"), VariantRef("triton_flash", (("tune", False),))
FILE = """
from dataclasses import dataclass
from kvlab.attention.naive import Naive
raise SystemExit("only a worker runs a user's file")

@dataclass(frozen=True)
class Mine(Naive):
    size: int = 4
    tune: bool = True
    name = "mine"
"""


@dataclass(frozen=True)
class Around:
    """A case that wraps a comparison, and adds to it."""
    comparison: Comparison
    level: int = 3

    @property
    def comparison_id(self):
        return f"{self.comparison.comparison_id}-{self.level}"

    def columns(self):
        return self.comparison.columns()


@dataclass(frozen=True)
class Tuned(Naive):
    """A variant that says whether it was tuned."""
    tune: bool = True
    size: int = 4
    name: ClassVar[str] = "tuned"

    def ran(self, trial):
        return f"tune {self.tune}"


def compared(*refs):
    return Comparison(tuple(trial(ref, WORKLOAD) for ref in refs))


def refs(comparison):
    return [t.variant for t in comparison.trials]


def test_only_variants_with_that_knob_are_changed():
    assert refs(untuned(compared(KEPT, "naive"))) == [OFF, VariantRef("naive")]
    assert refs(untuned(compared(OFF))) == [OFF] and OFF.load() == TritonFlash(tune=False)
    with_others = replace(VariantRef.of(Tuned), knobs=(("tune", True), ("size", 8)))
    assert refs(untuned(compared(with_others)))[0].knobs == (("size", 8), ("tune", False))


def test_trials_that_differed_in_nothing_else_become_one():
    assert refs(untuned(compared(KEPT, OFF, "naive"))) == [OFF, VariantRef("naive")]


def test_the_comparison_inside_another_case_is_changed_and_the_case_stays():
    found = untuned(Around(compared(KEPT), level=5))
    assert isinstance(found, Around) and found.level == 5 and refs(found.comparison) == [OFF]
    assert untuned("no comparison at all") == "no comparison at all"


def test_a_users_file_is_read_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    (found,) = refs(untuned(compared("mine.py:Mine")))
    assert found == VariantRef("mine.py:Mine", (("tune", False),))


class Stub:
    """A study that measures nothing: rows name the variants of its cases."""
    SIZES = ("small",)

    def cases(self, size, *, device, variants, model):
        yield compared(KEPT, "naive")
        yield Around(compared(KEPT))

    def run(self, case, *, artifacts=None, watch=None):
        inner = getattr(case, "comparison", case)
        reading = asdict(Reading("latency_s", 1.0, "s", "measured"))
        return [{"comparison_id": case.comparison_id, "case_id": t.case_id, **t.columns(), **reading}
                for t in inner.trials]


@pytest.fixture
def go(monkeypatch, tmp_path):
    monkeypatch.setattr(_run, "studies", {"stub": Stub()})
    return lambda **options: run("stub", out=tmp_path, each=in_process, progress=False, **options)


def test_a_run_without_tuning_says_so_in_its_rows_and_its_manifest(go):
    store = go(tune=False)
    assert list(store.table()["variant"]) == ["triton_flash(tune=False)", "naive", "triton_flash(tune=False)"]
    assert Manifest.read(store.path).options["tune"] is False


def test_a_tuned_run_names_no_such_option(go):
    store = go()
    assert list(store.table()["variant"]) == ["triton_flash", "naive", "triton_flash"]
    assert "tune" not in Manifest.read(store.path).options


def test_a_resumed_run_stays_as_it_was(go):
    store = go(tune=False)
    again = go(resume=store.path)
    assert len(again.committed) == 2 and list(again.table()["variant"]) == list(store.table()["variant"])
    with pytest.raises(ValueError, match="resume with the same options"):
        go(tune=False, resume=go().path)


def test_measure_without_tuning_runs_the_default():
    for tune in (True, False):
        table = kvlab.measure(Tuned, WORKLOAD, probes=["kernel_error"], tune=tune)
        assert f"tune {tune}" in table["note"][0]


def test_the_commands_pass_it_on(monkeypatch, tmp_path):
    given, told = {}, CliRunner()

    def run_study(study, **options):
        given.update(options)
        raise StoreError(2, "stop here")
    monkeypatch.setattr(_run, "run", run_study)
    told.invoke(app, ["run", "memory_wall", "--no-tune", "--out", str(tmp_path)])
    assert given["tune"] is False
    told.invoke(app, ["run", "memory_wall", "--out", str(tmp_path)])
    assert given["tune"] is True

    def worker_each(patience_s):
        return lambda job, cases: given.update(cases=cases) or iter([[dict(status="skipped", error="no GPU here")]])
    monkeypatch.setattr(_worker, "worker_each", worker_each)
    for options, ref in (((), KEPT), (("--no-tune",), OFF)):
        found = told.invoke(app, ["measure", "--variant", "triton_flash", "--kv-len", "32", *options])
        assert "cannot compute this call: no GPU here" in str(found.exception) and refs(given["cases"][0]) == [ref]


def test_a_studys_own_kind_of_comparison_stays_what_it_is():
    from kvlab.studies.kernels import SideBySide, cases
    own = SideBySide((trial("triton_flash", WORKLOAD), trial("naive", WORKLOAD)))
    assert type(untuned(own)) is SideBySide and [t.variant for t in untuned(own).trials] == [OFF, VariantRef("naive")]
    for case in cases("smoke"):
        assert type(untuned(case)) is type(case)
