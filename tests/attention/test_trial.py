"""Trials, comparisons and variant references: data that survives JSON, names that are checked before anything runs."""
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from kvlab.attention import Comparison, Trial, VariantRef, trial, variants
from kvlab.attention._base import originals
from kvlab.attention.flash import Flash
from kvlab.attention.naive import Naive
from kvlab.attention.paged import Paged
from kvlab.kv.cache import Layout
from kvlab.kv.formats import KVFormat
from kvlab.kv.formats import kv_format as kv_format_of
from kvlab.probes import measure
from kvlab.probes.kernel_error import KernelError
from kvlab.registry import case_from, load_file
from kvlab.shapes import AttentionShape, Workload

DECODE = Workload.decode(AttentionShape(8, 2, 16), batch_size=2, kv_len=40)
MINE = '''
from dataclasses import dataclass
from typing import ClassVar

from kvlab.attention.naive import Naive
from kvlab.kv.cache import Layout


@dataclass(frozen=True)
class Mine(Naive):
    """The text of a user's own file."""
    tile: int = 8
    name: ClassVar[str] = "mine"


class Nameless:
    default_layout = Layout(32, page_order="random")

    def why_not(self, trial):
        return None

    def prepare(self, trial, inputs):
        return lambda: None


NOT_A_CLASS = 3
'''


@dataclass(frozen=True)
class Reversed(Naive):
    """A user's variant in an importable module: here, this test file."""
    scale: float = 1.0
    name: ClassVar[str] = "reversed"


class Methodless:
    name = "methodless"


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A file of the user's own in the current folder; a function gives its text."""
    monkeypatch.chdir(tmp_path)

    def write(text=MINE):
        (tmp_path / "mine.py").write_text(text)
        return "mine.py"
    write()
    return write


# ---------------------------------------------------------------------------------------------- data that survives

TRIALS = [
    trial("naive", DECODE),
    trial("paged", DECODE, kv_format="int8/block16", dtype="fp16", seed=7, replica=1, data="outlier", threads=2),
    trial(Flash(q_tile=64), Workload(AttentionShape(6, 2, 8, 4, True, 5, 2.5), (1, 3), (9, 4), 2), layout=Layout()),
    trial(VariantRef("mine.py:Mine", (("tile", 3), ("scale", 0.5), ("mode", "a"), ("on", True), ("top", None))), DECODE,
          layout=Layout(16, "random", "token", True)),
]


@pytest.mark.parametrize("one", TRIALS, ids=lambda t: t.variant.label)
def test_a_trial_survives_json_to_the_worker_and_back(one):
    sent = json.loads(json.dumps(asdict(one)))
    back = case_from("kvlab.attention._base:Trial", sent)
    assert back == one and hash(back) == hash(one) and back.case_id == one.case_id
    assert [type(v) for _, v in back.variant.knobs] == [type(v) for _, v in one.variant.knobs]
    assert json.loads(one.columns()["case"]) == sent, "a row holds enough to run it again"


def test_a_comparison_survives_json_to_the_worker_and_back():
    whole = Comparison((trial("naive", DECODE), trial("naive", DECODE, replica=1), trial("paged", DECODE)))
    back = case_from("kvlab.attention._base:Comparison", json.loads(json.dumps(asdict(whole))))
    assert back == whole and back.comparison_id == whole.comparison_id


def test_the_worker_makes_only_kvlabs_own_cases():
    with pytest.raises(ValueError, match="cases are kvlab's own classes, got subprocess:Popen"):
        case_from("subprocess:Popen", {})


def test_json_of_a_wrong_trial_is_refused_like_the_trial_itself():
    sent = json.loads(json.dumps(asdict(TRIALS[0])))
    for field, value, message in [("dtype", "fp31", "allowed: fp32"), ("threads", 0, "at least 1"),
                                  ("kv_format", "fp61", "Did you mean 'fp16'")]:
        with pytest.raises((ValueError, KeyError), match=message):
            case_from("kvlab.attention._base:Trial", {**sent, field: value})


def test_ids_are_the_same_in_every_process():
    script = f"""
import json
from kvlab.attention._base import Comparison, Layout, Trial
from kvlab.attention._variant import VariantRef
from kvlab.shapes import AttentionShape, Workload
trials = ({", ".join(map(repr, TRIALS))},)
print(json.dumps([[t.case_id, Comparison((t,)).comparison_id] for t in trials]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONHASHSEED": "77"})
    assert json.loads(done.stdout) == [[t.case_id, Comparison((t,)).comparison_id] for t in TRIALS]
    assert len({name for pair in json.loads(done.stdout) for name in pair}) == 2 * len(TRIALS)


@pytest.mark.parametrize("change", [
    dict(variant=VariantRef("sdpa")), dict(variant=VariantRef("naive", (("a", 1),))), dict(kv_format="bf16"),
    dict(workload=replace(DECODE, shared_prefix=1)), dict(workload=replace(DECODE, kv_lens=(40, 39))),
    dict(workload=replace(DECODE, shape=replace(DECODE.shape, window=9))), dict(layout=Layout(16)),
    dict(layout=Layout(order="token")), dict(dtype="bf16"), dict(data="outlier"), dict(device="cuda"),
    dict(threads=2), dict(seed=1), dict(replica=1)], ids=lambda c: "-".join(map(str, c)))
def test_every_field_changes_the_case_id(change):
    assert replace(TRIALS[0], **change).case_id != TRIALS[0].case_id
    assert trial("naive", DECODE).case_id == TRIALS[0].case_id


def test_columns_of_a_trial_and_of_a_comparison():
    a, b = trial("naive", DECODE), trial("paged", DECODE, kv_format="bf16")
    assert a.columns().items() >= dict(variant="naive", dtype="fp32", kv_format="fp32", block_size=None, device="cpu",
                                       phase="decode", batch_size=2, kv_len=40, group_ratio=4, seed=0).items()
    both = Comparison((a, b)).columns()
    assert both["variant"] == "" and both["kv_len"] == 40 and both["dtype"] == "fp32"
    assert not {"kv_format", "block_size", "page_order"} & set(both), "the trials disagree in these"
    assert len(json.loads(both["case"])["trials"]) == 2


# ------------------------------------------------------------------------------------------------------- defaults

def test_defaults_follow_the_device_the_dtype_and_the_variant():
    cpu, cuda = trial("naive", DECODE), trial("naive", DECODE, device="cuda:1")
    assert (cpu.dtype, cpu.kv_format, cpu.itemsize, cpu.torch_dtype) == ("fp32", "fp32", 4, torch.float32)
    assert (cuda.dtype, cuda.kv_format, cuda.itemsize, cuda.torch_dtype) == ("bf16", "bf16", 2, torch.bfloat16)
    assert trial("naive", DECODE, dtype="fp16").kv_format == "fp16"
    assert trial("paged", DECODE).layout == Layout(16, "random") and trial("naive", DECODE).layout == Layout()


def test_format_path_says_whether_the_format_is_read_as_it_is():
    assert trial("naive", DECODE).format_path == "native"
    assert trial("naive", DECODE, kv_format="bf16").format_path == "decoded"

    @dataclass(frozen=True)
    class Registers(Naive):
        """Decodes int8 per token itself."""
        name: ClassVar[str] = "registers"

        def format_path(self, trial):
            return "native" if trial.kv_format == "int8/token" else "decoded"
    own, other = (trial(Registers(), DECODE, kv_format=name) for name in ("int8/token", "int8/block16"))
    assert (own.format_path, other.format_path) == ("native", "decoded")
    assert trial(Registers(), DECODE).format_path == "decoded", "what the variant says, whatever the format"


@pytest.mark.parametrize("data", ["gaussian", "outlier"])
def test_outlier_data_has_two_large_channels_of_k(data):
    one = trial("naive", Workload.decode(AttentionShape(2, 2, 16), kv_len=500), data=data)
    inputs = Comparison((one,)).inputs()[one.kv_format, one.layout][0]
    spread = inputs.k[0].std((0, 1))
    expected = torch.ones(16)
    if data == "outlier":
        expected[:2] = 15
    assert torch.allclose(spread, expected, rtol=0.15)
    assert torch.allclose(inputs.v[0].std((0, 1)), torch.ones(16), rtol=0.15)


def test_copies_differ_and_the_same_seed_gives_the_same():
    whole = Comparison((trial("naive", DECODE, seed=3), trial("paged", DECODE, seed=3)))
    inputs, again = whole.inputs(2), Comparison((trial("naive", DECODE, seed=4),)).inputs(1)
    (first, second), (paged_first, _) = inputs["fp32", Layout()], inputs["fp32", Paged.default_layout]
    assert first.q_TQD is paged_first.q_TQD and torch.equal(first.k[1], paged_first.k[1])
    assert not torch.equal(first.q_TQD, second.q_TQD) and second.k is None and (first.seed, second.seed) == (3, 4)
    assert torch.equal(second.q_TQD, again["fp32", Layout()][0].q_TQD), "copy i is the first copy of seed + i"


@pytest.mark.parametrize("layout", [Layout(), Layout(16, "random"), Layout(32, order="token")], ids=str)
@pytest.mark.parametrize("kv_format", ["fp32", "int8/block16", "k8v4", "kivi4/g16/r32", "bf16+kivi4/g16/r48",
                                       "kivi2/g8/r8+fp32"])
def test_the_bytes_announced_before_allocation_cover_what_is_allocated(layout, kv_format):
    """One long sequence among short ones: a contiguous layout gives each of them room for the longest."""
    workload = Workload(AttentionShape(4, 2, 8), (1,) * 9, (3,) * 8 + (1000,))
    whole = Comparison((trial("paged", workload, layout=layout, kv_format=kv_format),))
    inputs = whole.inputs(3)[kv_format, layout]
    allocated = sum(one.cache.nbytes + one.q_TQD.nbytes for one in inputs)
    originals = sum(x.nbytes for x in inputs[0].k + inputs[0].v)
    scores = 8 * 4 * 9 * 1000                                        # fp64, 4 heads, 9 query tokens, 1000 tokens
    assert whole.nbytes(3) == allocated + originals + 3 * originals + 3 * scores, "and what the oracle needs in fp64"
    assert whole.cache_bytes() == {(kv_format, layout): 8 * inputs[0].cache.format.nbytes(3, workload.shape)
                                   + inputs[0].cache.format.nbytes(1000, workload.shape)}


def test_touched_bytes_leave_out_what_a_window_hides_and_count_a_shared_prefix_once():
    shape, block = AttentionShape(8, 2, 16), Layout(8, share_prefix=True)
    token = 2 * (16 + 16) * 4

    def touched(workload, layout=None, kv_format="fp32"):
        whole = Comparison((trial("paged", workload, layout=layout or Layout(8), kv_format=kv_format),))
        ((key, found),) = whole.touched_bytes().items()
        assert key == (kv_format, layout or Layout(8)) and found <= whole.cache_bytes()[key]
        return found
    ragged = Workload(shape, (1, 3), (40, 33), 16)
    assert touched(ragged) == (40 + 33) * token, "a layout that does not share stores the prefix for each"
    assert touched(ragged, block) == (16 + 24 + 17) * token
    windowed = replace(ragged, shape=replace(shape, window=10))
    assert touched(windowed) == (10 + 12) * token, "three queries see two tokens more than one"
    assert touched(windowed, block) == (10 + 12) * token, "the prefix is hidden from both"
    wide = replace(ragged, shape=replace(shape, window=26))           # sees from tokens 14 and 5 on
    assert touched(wide, block) == ((16 - 5) + 24 + 17) * token
    codes, scale = 2 * 10 * 16, 2 * 4                                 # tokens 30 … 39 lie in groups 1 and 2 of 16
    assert touched(Workload(windowed.shape, (1,), (40,)), Layout(16), "int8/block16") == 2 * (codes + 2 * scale)
    fp16, eight = 2 * (16 + 16) * 2, 2 * (16 + 16)                     # bytes of a token
    k_bytes = 2 * (2 * 8 + 16 * (2 + 2) + 8 * 16 * 2)                 # K's codes 30, 31, their group's scales; 32 … 39
    assert touched(Workload(windowed.shape, (1,), (40,)), Layout(16), "kivi4/g16/r32") == k_bytes + 10 * fp16 // 2
    assert touched(Workload(windowed.shape, (1,), (47,)), Layout(16), "kivi4/g16/r32") == 10 * fp16
    assert touched(ragged, Layout(16), "fp8_e4m3") == (40 + 33) * eight


# ---------------------------------------------------------------------------------------------------- calibration

def scales_of(comparison, copies=1):
    """(fmt, layout) -> per copy, the static scales of K and of V that its cache decodes with."""
    return {key: [[a for codec in (one.cache.format.k, one.cache.format.v) for a in getattr(codec, "scales", ())]
                  for one in made] for key, made in comparison.inputs(copies).items()}


def equal(a, b):
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kv_format", ["int8/head", "fp8_e4m3/tensor", "int4/channel", "bf16+int8/head"])
def test_static_scales_are_found_once_on_tokens_that_no_input_holds(kv_format, monkeypatch):
    seen, original = [], KVFormat.calibrate
    monkeypatch.setattr(KVFormat, "calibrate", lambda fmt, k, v: seen.append((k, v)) or original(fmt, k, v))
    whole = Comparison(tuple(trial(name, DECODE, kv_format=kv_format, replica=r)
                             for name, r in (("naive", 0), ("naive", 1), ("paged", 0))))
    inputs = whole.inputs(3)
    assert len(seen) == 1, "one pass for all layouts, copies and replicas"
    (k_SKD, v_SKD), held = seen[0], [x for copies in inputs.values() for x in copies[0].k + copies[0].v]
    assert k_SKD.shape == v_SKD.shape == (256, 2, 16)
    held += [x for i in (1, 2) for side in originals(whole.trials[0], i)[1:] for x in side]
    rows = {tuple(row) for x in held for row in x.flatten(0, 1).tolist()}
    assert len(rows) == 2 * 2 * 2 * 40 * 3                             # K and V, sequences, heads, tokens, copies
    assert not rows & {tuple(row) for x in (k_SKD, v_SKD) for row in x.flatten(0, 1).tolist()}
    wanted = original(kv_format_of(kv_format), k_SKD, v_SKD)
    wanted = [a for codec in (wanted.k, wanted.v) for a in getattr(codec, "scales", ())]
    for copies in scales_of(whole, 3).values():
        assert len(copies) == 3 and all(equal(mine, wanted) for mine in copies)


def test_both_halves_of_an_a_a_pair_have_the_same_scales_and_another_seed_has_others():
    def scales(**changed):
        one = trial("naive", DECODE, kv_format="int8/head", **changed)
        return scales_of(Comparison((one,)))["int8/head", one.layout][0]
    assert equal(scales(), scales(replica=1)) and equal(scales(), scales(layout=Layout(order="token")))
    assert not equal(scales(), scales(seed=1))
    assert not equal(scales(), scales(data="outlier")), "calibrated on data of the same kind"
    k_scale, v_scale = scales(data="outlier")
    assert 8 < float((k_scale / scales()[0]).mean()) < 18 and torch.allclose(v_scale, scales()[1])


def test_calibration_draws_from_its_own_seed_and_leaves_the_inputs_alone():
    plain, static = (trial("naive", DECODE, kv_format=name) for name in ("fp32", "int8/head"))
    alone = Comparison((plain,)).inputs(2)["fp32", Layout()]
    beside = Comparison((plain, static)).inputs(2)["fp32", Layout()]
    for a, b in zip(alone, beside, strict=True):
        assert torch.equal(a.q_TQD, b.q_TQD) and all(map(torch.equal, a.cache.arrays, b.cache.arrays))


def test_a_latent_is_calibrated_without_a_v():
    latent = Workload.decode(AttentionShape(4, 1, 24, v_head_dim=16, v_in_k=True), kv_len=50)
    (rows,) = measure(Comparison((trial("naive", latent, kv_format="int8/head"),)), [KernelError()])
    assert rows["status"] == "ok"


def test_a_block_table_at_the_address_of_one_that_is_gone_is_read_anew():
    """The layers of a model share a workspace, and not always a table (a teacher's have one each)."""
    one, kept = trial("paged_gather", DECODE, layout=Layout(16, order="head")), {}
    (inputs,) = Comparison((one,)).inputs()["fp32", one.layout]
    call = one.variant.load().prepare
    expected = [call(one, replace(inputs, block_table=table, scratch={}))()
                for table in (inputs.block_table, inputs.block_table.flip(0))]
    assert not torch.equal(*expected)
    for turn in range(20):
        table = inputs.block_table.flip(0) if turn % 2 else inputs.block_table.clone()
        assert torch.equal(call(one, replace(inputs, block_table=table, scratch=kept))(), expected[turn % 2])
        del table                                                     # the next takes its place


def test_a_trials_copies_share_one_workspace_and_two_trials_do_not():
    whole = Comparison((trial("paged_gather", DECODE), trial("paged_gather", DECODE, replica=1)))
    seen = []

    @dataclass(frozen=True)
    class Keeps(Naive):
        name: ClassVar[str] = "keeps"

        def prepare(self, trial, inputs):
            space = inputs.workspace("partial sums", 3, 5, dtype=torch.float64)
            assert space.shape == (3, 5) and space.dtype == torch.float64
            assert inputs.workspace("partial sums", 3, 5, dtype=torch.float64) is space
            assert inputs.workspace("other", 2, dtype=torch.float32) is not space
            seen.append(space.data_ptr())
            return super().prepare(trial, inputs)
    copies = whole.inputs(3)["fp32", Paged.default_layout]
    for _ in range(2):                                                # kept, so that no address is used a second time
        seen.append(trial(Keeps(), DECODE).prepare(copies))
    first, second = seen[:3], seen[4:7]
    assert len(set(first)) == len(set(second)) == 1 and not copies[0].scratch
    spaces, original = [], torch.index_select
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "index_select", lambda *a, out: spaces.append(out.data_ptr()) or original(*a, out=out))
        calls = [call for one in whole.trials for call in one.prepare(copies)]
        for call in calls:
            call()
    apart = len(spaces) // 2
    assert len(set(spaces[:apart])) == len(set(spaces[apart:])) == 2, "K and V, whatever the copy"
    assert not set(spaces[:apart]) & set(spaces[apart:])


# ------------------------------------------------------------------------------------------------------- refusals

@pytest.mark.parametrize("arguments, message", [
    (dict(variant="sdpaa"), "no attention variant named 'sdpaa'. Did you mean 'sdpa'? Known: "),
    (dict(variant="nonsense"), "no attention variant named 'nonsense'. Known: c_decode, "),
    (dict(kv_format="int8/tokn"), "no KV format named 'int8/tokn'. Did you mean 'int8/token'?"),
    (dict(dtype="fp8"), "dtype='fp8'; allowed: fp32, fp16, bf16"),
    (dict(dtype="fp64", kv_format="fp32"), "dtype='fp64'; allowed: fp32, fp16, bf16"),
    (dict(data="uniform"), "data='uniform'; allowed: gaussian, outlier"),
    (dict(device="gpu"), "device='gpu'; allowed: cpu, cuda, cuda:0, cuda:1"),
    (dict(device="cuda:"), "device='cuda:'; allowed"),
    (dict(device="cpu:0"), "device='cpu:0'; allowed"),
    (dict(threads=0), "threads=0 must be a whole number of at least 1"),
    (dict(threads=1.5), "threads=1.5 must be"),
    (dict(threads=True), "threads=True must be"),
])
def test_wrong_arguments_are_refused_in_words(arguments, message):
    with pytest.raises((KeyError, ValueError)) as caught:
        trial(**{"variant": "naive", "workload": DECODE, **arguments})
    assert message in caught.value.args[0]


@pytest.mark.parametrize("lengths, message", [
    (((0,), (5,)), "q_len=0 must be"), (((1,), (0,)), "kv_len=0 must be"), (((1,), (-5,)), "kv_len=-5 must be"),
    (((6,), (5,)), "kv_len=5 is less than q_len=6"), (((1, 1), (5,)), "one entry per sequence"),
    (((), ()), "one entry per sequence"),
])
def test_wrong_lengths_never_become_a_trial(lengths, message):
    with pytest.raises(ValueError, match=message):
        trial("naive", Workload(DECODE.shape, *lengths))


@pytest.mark.parametrize("trials, message", [
    ((), "at least one trial"),
    ((TRIALS[0], trial("naive", DECODE)), "must differ; give an A/A pair different replicas"),
    ((TRIALS[0], trial("naive", DECODE, seed=1)), "may differ only in variant, kv_format, layout and replica"),
    ((TRIALS[0], trial("naive", DECODE, threads=2)), "may differ only in"),
    ((TRIALS[0], trial("naive", replace(DECODE, shared_prefix=3))), "may differ only in"),
    ((TRIALS[0], trial("naive", DECODE, dtype="bf16")), "may differ only in"),
])
def test_a_comparison_refuses_trials_that_cannot_be_compared(trials, message):
    with pytest.raises(ValueError, match=message):
        Comparison(trials)


@pytest.mark.parametrize("arguments, message", [
    (dict(block_size=0), "block_size=0 must be a whole number of at least 1, or None"),
    (dict(block_size=-16), "block_size=-16 must be"),
    (dict(block_size=1.5), "block_size=1.5 must be"),
    (dict(block_size=True), "block_size=True must be"),
    (dict(page_order="shuffled"), "page_order='shuffled'; allowed: in_order, random"),
    (dict(order="hand"), "order='hand'; allowed: head, token"),
    (dict(share_prefix=True), "share_prefix needs blocks"),
])
def test_wrong_layouts_are_refused_in_words(arguments, message):
    with pytest.raises(ValueError) as caught:
        Layout(**arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize("layout, kv_format, why", [
    (Layout(24), "int8/block16", "block_size=24 is not a multiple of int8/block16's token group (16)"),
    (Layout(16, share_prefix=True), "fp32", "block_size=16 divides, got 40"),
    (Layout(10, share_prefix=True), "fp32", None),
    (Layout(32), "int8/block16", None),
    (Layout(24), "kivi4/g16/r32", "block_size=24 is not a multiple of kivi4/g16/r32's token group (16)"),
    (Layout(8, share_prefix=True), "kivi4/g8/r24", "kivi4/g8/r24 keeps each sequence's newest tokens apart"),
    (Layout(8, share_prefix=True), "int8/head", None),
    (Layout(8), "q8_0", "kvlab knows how large q8_0 is and does not compute with it; see kvlab ls formats"),
    (Layout(8), "bf16+nvfp4", "kvlab knows how large bf16+nvfp4 is and does not compute with it"),
])
def test_a_layout_says_which_workloads_and_formats_it_cannot_hold(layout, kv_format, why):
    said = trial("paged", replace(DECODE, shared_prefix=40), layout=layout, kv_format=kv_format).why_not()
    assert said is None if why is None else why in said


def test_sharing_a_prefix_that_is_not_there_is_refused():
    assert "a shared_prefix above 0" in trial("paged", DECODE, layout=Layout(8, share_prefix=True)).why_not()


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_a_device_that_is_not_there_is_a_reason_before_all_others():
    said = trial("sdpa", DECODE, device="cuda", layout=Layout(16)).why_not()
    assert said.startswith("torch sees no CUDA device; use device cpu")


def test_more_threads_than_cores_are_a_reason():
    cores = os.cpu_count()
    assert trial("naive", DECODE, threads=cores).why_not() is None
    assert trial("naive", DECODE, threads=cores + 1).why_not() == (
        f"threads={cores + 1}, and this machine has {cores} logical cores")


def test_a_gpu_that_is_not_there_is_a_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert trial("sdpa", DECODE, device="cuda:7").why_not() == "there is no cuda:7; torch sees 2 CUDA devices"
    assert trial("sdpa", DECODE, device="cuda:2").why_not().startswith("there is no cuda:2")
    assert [trial("sdpa", DECODE, device=d).why_not() for d in ("cuda", "cuda:0", "cuda:1")] == [None] * 3


# ----------------------------------------------------------------------------------------------- variant references

def test_a_registered_variant_is_its_name_and_the_knobs_that_were_changed():
    assert VariantRef.of("flash") == VariantRef.of(Flash) == VariantRef.of(Flash()) == VariantRef("flash")
    changed = VariantRef.of(Flash(kv_tile=64))
    assert changed == VariantRef("flash", (("kv_tile", 64),)) and changed.label == "flash(kv_tile=64)"
    assert changed.load() == Flash(kv_tile=64) and VariantRef.of(changed) is changed
    assert VariantRef("flash").label == "flash" and VariantRef("flash").source_file is None


@pytest.mark.parametrize("name", list(variants))
def test_every_registered_variant_loads_under_its_own_name(name):
    loaded = VariantRef(name).load()
    assert loaded.name == name and VariantRef.of(loaded) == VariantRef(name)


def test_a_knob_that_json_cannot_carry_is_refused():
    with pytest.raises(ValueError, match=r"Flash\(q_tile=\[8\]\): a knob must be a number, a string, a bool or None"):
        VariantRef.of(Flash(q_tile=[8]))


def test_a_class_of_a_file_is_found_without_running_the_file(mine):
    mine("raise SystemExit('this file was run')\n" + MINE)
    ref = VariantRef.of("mine.py:Mine")
    assert ref.ref == "mine.py:Mine" and ref.label == "mine" and str(ref.source_file) == "mine.py"
    assert not ref.in_process and ref.default_layout == Layout()
    with pytest.raises(SystemExit, match="this file was run"):
        ref.load()


def test_a_class_of_a_file_is_loaded_and_measured(mine):
    ref = VariantRef("mine.py:Mine", (("tile", 3),))
    assert ref.load().tile == 3 and ref.label == "mine(tile=3)"
    rows = measure(Comparison((trial(ref, DECODE),)), [KernelError()])
    assert [(r["status"], r["variant"]) for r in rows] == [("ok", "mine(tile=3)")]


def test_a_file_that_changed_is_read_anew(mine):
    ref = VariantRef("mine.py:Mine")
    assert ref.load().tile == 8 and ref.load() is ref.load()
    mine(MINE.replace("tile: int = 8", "tile: int = 123"))
    os.utime("mine.py", (1e9, 1e9))                                   # two writes may fall into one tick of the clock
    assert ref.load().tile == 123


def test_a_file_of_that_name_in_another_folder_is_another(mine, tmp_path, monkeypatch):
    ref = VariantRef("mine.py:Mine")
    (tmp_path / "other").mkdir()
    text = MINE.replace("tile: int = 8", "tile: int = 9").replace('"mine"', '"mime"')
    (tmp_path / "other" / "mine.py").write_text(text)
    for path in (tmp_path / "mine.py", tmp_path / "other" / "mine.py"):
        os.utime(path, (1e9, 1e9))
    assert (ref.load().tile, ref.label) == (8, "mine")
    monkeypatch.chdir(tmp_path / "other")
    assert (ref.load().tile, ref.label) == (9, "mime")


@pytest.mark.parametrize("body, label", [
    ("name = 'mine'", "mine"),
    ("name: ClassVar[str] = 'my own'", "my own"),
    ("name: str = 'first'\n    name = 'last'", "last"),
    ("x, y = 1, 2\n    name = 'mine'", "mine"),
    ("name = 'paged'", "Mine"),                                       # a shipped one's: the two must not be mixed up
    ("name = ''", "Mine"),
    ("name = 3", "Mine"),
    ("name = 'a' + 'b'", "Mine"),                                     # no literal, and the file is not run
    ("name: str", "Mine"),
    ("pass", "Mine"),
])
def test_the_label_is_the_variants_own_name_read_off_the_text(mine, body, label):
    mine(f"1 / 0\nclass Mine:\n    {body}\n")
    assert VariantRef("mine.py:Mine").label == label
    assert VariantRef("mine.py:Mine", (("a", 1),)).label == f"{label}(a=1)"


def test_the_label_follows_the_file_and_is_the_class_when_the_file_is_gone_or_broken(mine, tmp_path):
    ref = VariantRef("mine.py:Mine")
    assert ref.label == "mine"
    mine(MINE.replace('"mine"', '"better"'))
    os.utime("mine.py", (1e9, 1e9))
    assert ref.label == "better"
    mine("class Mine(:")
    os.utime("mine.py", (2e9, 2e9))
    assert ref.label == "Mine"
    (tmp_path / "mine.py").unlink()
    assert ref.label == "Mine"
    assert VariantRef("cell:test.<locals>.Elsewhere").label == "Elsewhere"

@pytest.mark.parametrize("layout, expected", [
    ("default_layout = Layout(32, page_order='random')", Layout(32, "random")),
    ("default_layout: ClassVar[Layout] = Layout(block_size=8, order='token')", Layout(8, order="token")),
    ("default_layout: ClassVar[Layout]", Layout()),
    ("other = Layout(32)", Layout()),
])
def test_default_layout_is_read_off_the_text(mine, layout, expected):
    mine(f"1 / 0\nclass Mine:\n    {layout}\n")
    assert VariantRef.of("mine.py:Mine").default_layout == expected
    assert trial("mine.py:Mine", DECODE).layout == expected


@pytest.mark.parametrize("layout", ["Layout(SIZE)", "Layout(32, **more)", "Layout(pages=3)", "Layout(0)", "LAYOUT"])
def test_a_default_layout_that_cannot_be_read_off_the_text_is_refused(mine, layout):
    mine(f"class Mine:\n    default_layout = {layout}\n")
    with pytest.raises(ValueError, match="default_layout of mine.py:Mine must be a Layout of plain values"):
        trial("mine.py:Mine", DECODE)


@pytest.mark.parametrize("ref, message", [
    ("mine.py:Mime", "no class in mine.py named 'Mime'. Did you mean 'Mine'? Known: Mine, Nameless"),
    ("mine.py:NOT_A_CLASS", "no class in mine.py named 'NOT_A_CLASS'"),
    ("absent.py:Mine", "cannot read 'absent.py' (No such file or directory); give the path of a Python file"),
    (".py:Mine", "cannot read '.py'"),
    ("mine.py", "'mine.py' is a file; name the class in it: mine.py:Class"),
    ("broken.py:Mine", "broken.py is not valid Python: "),
])
def test_a_reference_that_leads_nowhere_is_refused_in_words(mine, tmp_path, ref, message):
    (tmp_path / "broken.py").write_text("class Mine(:\n")
    with pytest.raises((KeyError, ValueError)) as caught:
        VariantRef.of(ref)
    assert message in caught.value.args[0]


@pytest.mark.parametrize("ref, error, message", [
    ("mine.py:Nameless", TypeError, r"Nameless is not a variant: it needs a name and the methods why_not, prepare, "
                                    r"cost \(missing: cost\)"),
    ("mine.py:Gone", KeyError, "no class 'Gone' in mine.py"),
    ("mine.py:NOT_A_CLASS", KeyError, "no class 'NOT_A_CLASS' in mine.py"),
    ("mine.py:Unnamed", TypeError, r"\(missing: name\)"),
])
def test_a_class_that_is_no_variant_fails_when_loaded_and_its_row_says_so(mine, ref, error, message):
    mine(MINE + "\nclass Unnamed(Nameless):\n    def cost(self, trial, cache_bytes=0):\n        return None\n")
    with pytest.raises(error, match=message):
        VariantRef(ref).load()
    rows = measure(Comparison((Trial(VariantRef(ref), DECODE),)), [KernelError()])
    assert [r["status"] for r in rows] == ["failed"] and rows[0]["error"].startswith(error.__name__)


def test_an_instance_from_a_module_is_its_file_and_its_changed_knobs(monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)
    ref = VariantRef.of(Reversed(scale=2.0))
    assert ref == VariantRef("test_trial.py:Reversed", (("scale", 2.0),))
    assert VariantRef.of("test_trial.py:Reversed") == VariantRef.of(Reversed())
    with pytest.raises(TypeError, match="missing: why_not, prepare, cost"):
        VariantRef.of(Methodless).load()


def test_a_file_outside_the_current_folder_is_named_from_there(mine, tmp_path, monkeypatch):
    kind = load_file(tmp_path / "mine.py").Mine
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    ref = VariantRef.of(kind(tile=2))
    assert ref.source_file == Path("..") / "mine.py" and ref.load().tile == 2
    assert VariantRef.of(f"{tmp_path}/mine.py:Mine").ref == ref.ref


def cell(**body):
    """A class as a notebook cell makes it: its module is __main__."""
    return type("InACell", (Naive,), {"__module__": "__main__", "__qualname__": "InACell", "name": "in_a_cell", **body})


def test_a_class_of_a_notebook_cell_stays_in_the_process():
    ref = VariantRef.of(cell(default_layout=Layout(order="token")))
    assert ref == VariantRef("cell:InACell") and ref.in_process and ref.label == "in_a_cell" and ref.source_file is None
    assert ref.default_layout == Layout(order="token")
    rows = measure(Comparison((trial(ref, DECODE),)), [KernelError()])
    assert [(r["status"], r["variant"]) for r in rows] == [("ok", "in_a_cell")]


def test_a_cell_that_is_run_again_replaces_its_class():
    assert VariantRef.of(cell(generation=1)).load().generation == 1
    assert VariantRef.of(cell(generation=2)).load().generation == 2
    ref = VariantRef.of(cell(name="first"))
    assert ref.label == "first"
    assert VariantRef.of(cell(name="second")) == ref and ref.label == "second"
    assert VariantRef.of(cell(name="sdpa")).label == "InACell"


def test_a_class_inside_a_function_stays_in_the_process_as_no_worker_could_find_it():
    @dataclass(frozen=True)
    class Inner(Naive):
        depth: int = 1
        name: ClassVar[str] = "inner"
    ref = VariantRef.of(Inner(depth=4))
    assert ref.in_process and ref.load() == Inner(depth=4) and ref.label == "inner(depth=4)"
