"""Captured tensors as a trial's data: what is read, from where, and what is refused in which sentence."""
import json
import sys
from dataclasses import asdict, replace

import pytest
import torch

import kvlab
from kvlab.attention import Comparison, _captured, _captured_file, reference, trial
from kvlab.attention._base import originals
from kvlab.cli import app
from kvlab.kv.cache import Layout
from kvlab.probes import measure
from kvlab.probes.format_error import FormatError
from kvlab.probes.kernel_error import KernelError
from kvlab.shapes import AttentionShape, Workload
from kvlab.studies._run import Job
from kvlab.studies._worker import worker_each

pytest.importorskip("safetensors", reason="captured tensors are safetensors files")
from safetensors.torch import save_file  # noqa: E402

SHAPE = AttentionShape(4, 2, 8, 6)
DECODE = Workload.decode(SHAPE, kv_len=40)
TOKENS = 400


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "captured"


def tensors(tokens=TOKENS, shape=SHAPE, seed=0, **changed):
    generator = torch.Generator().manual_seed(seed)
    sizes = dict(q=(shape.num_q_heads, shape.head_dim), k=(shape.num_kv_heads, shape.head_dim),
                 v=(shape.num_kv_heads, shape.v_dim))
    return {name: torch.randn(tokens, *size, generator=generator) for name, size in sizes.items()} | changed


def kept(made=None, calibration=None, **about):
    made = made or tensors()
    return _captured_file.write(made["q"], made["k"], made["v"], dict(layer=3, window=None, softcap=None) | about,
                           calibration and (calibration["k"], calibration["v"]))


# ------------------------------------------------------------------------------------------------------- drawn data

def test_trials_of_drawn_data_keep_their_ids_and_numbers():
    """Ids name rows of earlier runs: a new kind of data must not change them."""
    workload = Workload.decode(AttentionShape(8, 2, 16), batch_size=2, kv_len=40)
    for data, case_id, k_sum in (("gaussian", "756a786e6761", 1056.92346663),
                                 ("outlier", "c7cd0d90296e", 2936.70528577)):
        one = trial("naive", workload, data=data, seed=3)
        q_TQD, k, v = originals(one, 3)
        assert one.case_id == case_id and asdict(one)["data"] == data
        assert float(q_TQD.double().sum()) == pytest.approx(5.11287891958)
        assert float(k[1].double().abs().sum()) == pytest.approx(k_sum)
        assert float(v[0].double().sum()) == pytest.approx(33.6897341984)


@pytest.mark.parametrize("data", ["gausian", "file:12", "file:" + "A" * 64, "file:" + "a" * 65, "", 3, None])
def test_a_trial_refuses_data_of_no_kind(data):
    one = trial("naive", DECODE)
    with pytest.raises(ValueError, match="allowed: gaussian, outlier, file:<the 64 hex digits"):
        replace(one, data=data)
    with pytest.raises(ValueError, match="allowed: gaussian, outlier, file:<the 64 hex digits"):
        trial("naive", DECODE, data=data)


# ------------------------------------------------------------------------------------------------- which tokens, when

def test_the_first_sequence_holds_the_texts_first_tokens_and_asks_for_the_last_of_them():
    made = tensors()
    data, path = kept(made)
    one = trial("naive", Workload(SHAPE, (3,), (50,)), data=data)
    assert path.name == data.removeprefix("file:") + ".safetensors" and one.why_not() is None
    q_TQD, (k_SKD,), (v_SKE,) = originals(one, 0)
    assert torch.equal(q_TQD, made["q"][47:50]) and torch.equal(k_SKD, made["k"][:50])
    assert torch.equal(v_SKE, made["v"][:50])


def test_copies_and_sequences_take_other_tokens():
    made = {name: torch.arange(400.0).view(-1, 1, 1).expand(-1, x.shape[1], x.shape[2]).contiguous()
            for name, x in tensors().items()}
    data, _ = kept(made)
    one = trial("naive", Workload(SHAPE, (2, 1), (40, 90)), data=data, seed=5)
    seen = []
    for seed in range(5, 30):
        q_TQD, k, v = originals(one, seed)
        for k_SKD, v_SKE, kv_len in zip(k, v, (40, 90)):
            first = float(k_SKD[0, 0, 0])
            assert torch.equal(k_SKD[:, 0, 0], torch.arange(kv_len) + first) and torch.equal(v_SKE[:, 1, 5],
                                                                                              k_SKD[:, 0, 0])
        assert q_TQD[:, 3, 7].tolist() == [float(x) for x in (k[0][-2, 0, 0], k[0][-1, 0, 0], k[1][-1, 0, 0])]
        seen.append((float(k[0][0, 0, 0]), float(k[1][0, 0, 0])))
    assert len({a for a, _ in seen}) == len({b for _, b in seen}) == 25, "25 copies, 25 places"
    pair = replace(one, workload=Workload.decode(SHAPE, batch_size=2, kv_len=40))
    starts = [float(k_SKD[0, 0, 0]) for seed in range(25) for k_SKD in originals(pair, seed)[1]]
    assert len(set(starts)) == 50, "nor does a sequence come again in the next copy"
    again = [x for side in originals(one, 5)[1:] for x in side]
    assert all(map(torch.equal, again, [x for side in originals(one, 5)[1:] for x in side]))


@pytest.mark.parametrize("room", [0, 1, 2, 12, 143, 360])
def test_every_place_comes_once_before_any_comes_again(room):
    starts = [_captured.start(i, room) for i in range(room + 1)]
    assert starts[0] == 0 and sorted(starts) == list(range(room + 1))
    assert _captured.start(-1, room) in range(room + 1)


def test_a_capture_as_long_as_kv_len_gives_all_copies_the_same_tokens():
    made = tensors(40)
    one = trial("naive", DECODE, data=kept(made)[0])
    for seed in (0, 7):
        assert torch.equal(originals(one, seed)[1][0], made["k"])


@pytest.mark.parametrize("tokens, batch_size, sentence", [
    (40, 1, "; the capture's 40 tokens have 1 place for a sequence of 40: sequences and input copies hold"),
    (42, 4, "; the capture's 42 tokens have 3 places for a sequence of 40: sequences and"),
    (42, 3, ""), (41, 1, ""), (400, 2, "")])
def test_a_row_says_where_sequences_hold_the_same_tokens(tokens, batch_size, sentence):
    one = trial("naive", Workload.decode(SHAPE, batch_size=batch_size, kv_len=40), data=kept(tensors(tokens))[0])
    note = {row["metric"]: row["note"] for row in measure(Comparison((one,)), [KernelError(), FormatError()])}
    assert note["format_error"].removeprefix(f"data: {one.data}").startswith(sentence)
    assert bool(sentence) == ("hold the same tokens" in note["format_error"])
    assert _captured.repeats(trial("naive", DECODE)) == ""


def test_a_shared_prefix_holds_the_same_tokens_and_what_follows_does_not():
    one = trial("paged", Workload.decode(SHAPE, batch_size=3, kv_len=40, shared_prefix=16), data=kept()[0],
                layout=Layout(8, share_prefix=True))
    _, k, v = originals(one, 0)
    for side in (k, v):
        assert all(torch.equal(x[:16], side[0][:16]) and not torch.equal(x[16:], side[0][16:]) for x in side[1:])
    (rows,) = measure(Comparison((one,)), [KernelError()])
    assert rows["status"] == "ok", rows["error"]


def test_a_shared_prefix_leaves_an_overlapping_sequence_as_it_is():
    made = tensors(50)
    one = trial("paged", Workload.decode(SHAPE, batch_size=2, kv_len=40, shared_prefix=16), data=kept(made)[0])
    _, k, v = originals(one, 0)
    assert torch.equal(k[0], made["k"][:40]) and torch.equal(v[0], made["v"][:40])
    assert 0 < _captured.start(1, 10) < 40 and torch.equal(k[1][16:], made["k"][_captured.start(1, 10):][16:40])


def test_static_scales_come_from_the_files_other_text():
    other = tensors(256, seed=1)
    one = trial("naive", DECODE, data=kept(calibration=other)[0], kv_format="int8/head")
    assert one.why_not() is None
    assert all(map(torch.equal, _captured.calibration(one), (other["k"], other["v"])))
    fmt = Comparison((one,)).inputs(1)["int8/head", one.layout][0].cache.format
    wanted = one.format.calibrate(other["k"], other["v"])
    assert all(map(torch.equal, fmt.k.scales + fmt.v.scales, wanted.k.scales + wanted.v.scales))
    without = replace(one, data=kept()[0])
    assert without.why_not() == ("int8/head needs a calibration pass over another text, which these captured tensors "
                                 "do not hold; capture them with calibration=TEXT")
    assert replace(without, kv_format="int8/token").why_not() is None


@pytest.mark.parametrize("dtype, kv_format", [("fp32", "fp32"), ("bf16", "int8/token"), ("fp16", "kivi4/g8")])
def test_variants_are_judged_on_captured_tensors(dtype, kv_format):
    data, _ = kept({name: x.bfloat16() for name, x in tensors().items()})
    pair = tuple(trial(name, Workload(SHAPE, (1, 3), (40, 33)), data=data, dtype=dtype, kv_format=kv_format)
                 for name in ("naive", "paged"))
    rows = measure(Comparison(pair), [KernelError(), FormatError()])
    assert [row["status"] for row in rows] == ["ok"] * 4, [row["error"] for row in rows]
    assert {row["data"] for row in rows} == {data} and all(data in r["note"] for r in rows
                                                           if r["metric"] == "format_error")


def test_the_worker_finds_the_file_and_says_the_same_where_it_is_gone(cache):
    data, path = kept()
    cases = [Comparison((trial("naive", DECODE, data=data, seed=seed),)) for seed in range(2)]
    rows = []
    for found in worker_each(60)(Job(probes=("kernel_error",)), cases):
        rows += found
        path.unlink(missing_ok=True)
    assert [row["status"] for row in rows] == ["ok", "skipped"] and "are not here" in rows[1]["error"]


# ---------------------------------------------------------------------------------------------- what a person gives

def test_a_path_is_kept_under_its_hash(tmp_path, cache):
    mine = tmp_path / "mine.safetensors"
    save_file(tensors(), mine)                                        # no header of kvlab's: a person's own file
    table = kvlab.measure("naive", DECODE, data=mine, probes=["kernel_error"])
    (data,) = table["data"].unique()
    assert data.startswith("file:") and (cache / f"{data[5:]}.safetensors").read_bytes() == mine.read_bytes()
    mine.unlink()
    assert trial("naive", DECODE, data=data).why_not() is None
    assert sorted(p.name for p in cache.iterdir()) == [f"{data[5:]}.safetensors"], "nothing else is left there"


def test_a_path_is_copied_again_only_where_it_must_be(tmp_path, cache, monkeypatch):
    mine, copied, true = tmp_path / "mine.safetensors", [], _captured.shutil.copyfile
    monkeypatch.setattr(_captured.shutil, "copyfile", lambda *paths: copied.append(paths) or true(*paths))
    save_file(tensors(), mine)
    (data,) = {trial("naive", DECODE, data=mine, seed=seed).data for seed in range(3)}
    assert len(copied) == 1
    (kept_file,) = cache.iterdir()
    for harm in (kept_file.unlink, lambda: kept_file.write_bytes(b"damaged"),
                 lambda: monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "other"))):
        harm()
        one = trial("naive", DECODE, data=mine)
        assert one.data == data and one.why_not() is None
    assert len(copied) == 4
    save_file(tensors(seed=1), mine)
    assert trial("naive", DECODE, data=mine).data != data and len(copied) == 5


def test_the_command_line_takes_a_path_and_refuses_a_wrong_one(tmp_path, capsys, monkeypatch):
    save_file(tensors(shape=AttentionShape(4, 2, 8)), tmp_path / "fits.safetensors")

    monkeypatch.setattr("kvlab.studies._worker.worker_each", lambda patience_s: lambda job, cases: [
        replace(job, probes=("kernel_error",))(case) for case in cases])         # here, and one probe: in a moment

    def measured(name):
        return app(["measure", "--variant", "naive", "--kv-len", "40", "--q-heads", "4", "--kv-heads", "2",
                    "--head-dim", "8", "--data", str(tmp_path / name), "--json"], standalone_mode=False)
    with pytest.raises(ValueError, match="other.safetensors'; allowed: gaussian, .*there is no such file here"):
        measured("other.safetensors")
    assert measured("fits.safetensors") == 0
    assert json.loads(capsys.readouterr().out)[0]["data"].startswith("file:")


@pytest.mark.parametrize("made, sentence", [
    (dict(tensors(), q=None), "holds no tensor named q;"),
    (dict(weight=torch.ones(3)), "holds no tensor named k, q, v;"),
    (tensors(k=torch.ones(400, 2, 8, dtype=torch.int64)), "holds k as I64; allowed: F32, F16, BF16"),
    (tensors(v=torch.ones(400, 12)), r"holds v of size \(400, 12\); it must be \[tokens, heads, width\]"),
    (tensors(k=torch.ones(399, 2, 8)), "do not fit together"),
    (tensors(v=torch.ones(400, 1, 6)), "do not fit together"),
    (tensors(k=torch.ones(400, 2, 7)), "do not fit together"),
    (tensors(0), r"size \(0, 4, 8\).*none of them 0"),
    (tensors(k=torch.ones(400, 2, 8).index_fill(0, torch.tensor([7]), float("nan"))),
     "holds NaN or infinity in k, first at token 7 of 400"),
    (tensors(calibration_k=torch.ones(256, 2, 8)), "holds one of .* and no calibration_v"),
    (tensors(calibration_k=torch.ones(256, 2, 8), calibration_v=torch.ones(255, 2, 6)),
     "they must be those of k and v with 256 tokens"),
    (tensors(calibration_k=torch.ones(256, 2, 8), calibration_v=torch.full((256, 2, 6), float("nan"))),
     "holds NaN or infinity in calibration_v"),
    (tensors(q=torch.full((400, 4, 8), float("-inf"))), "holds NaN or infinity in q, first at token 0"),
], ids=lambda x: None if isinstance(x, dict) else x[:20])
def test_a_file_that_is_no_capture_is_refused(made, sentence, tmp_path, cache):
    path = tmp_path / "mine.safetensors"
    save_file({name: x for name, x in made.items() if x is not None}, path)
    with pytest.raises(ValueError, match=sentence):
        trial("naive", DECODE, data=path)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"no safetensors at all", b"\xff" * 64, b"\x80\x04K\x01."])
def test_a_file_of_another_sort_is_refused(content, tmp_path):
    path = tmp_path / "mine.pt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="mine.pt is no whole safetensors file"):
        trial("naive", DECODE, data=str(path))


def test_a_truncated_file_and_a_broken_header_are_refused(tmp_path):
    path = tmp_path / "mine.safetensors"
    save_file(tensors(), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="is no whole safetensors file"):
        trial("naive", DECODE, data=path)
    for header in ("[1]", "{", "[" * 100_000):
        save_file(tensors(), path, metadata={"kvlab": header})
        with pytest.raises(ValueError, match="has a header whose 'kvlab' is not a JSON object"):
            trial("naive", DECODE, data=path)


def test_a_tensor_that_is_not_finite_is_not_captured(cache):
    bad = tensors()
    bad["v"][11, 0, 3] = float("nan")
    with pytest.raises(ValueError, match="layer 3 cannot be captured: it holds NaN or infinity in v, .* token 11"):
        kept(bad)
    assert list(cache.iterdir()) == []


# ----------------------------------------------------------------------------------------------- why a trial cannot

def test_a_missing_file_is_a_skipped_row_that_says_where_to_put_it():
    one = trial("naive", DECODE, data="file:" + "0" * 64)
    assert "the captured tensors file:000000000000… are not here: put the file at" in one.why_not()
    (row,) = measure(Comparison((one,)), [KernelError()])
    assert row["status"] == "skipped" and row["error"] == one.why_not()


def test_a_damaged_file_is_found_out_also_after_it_was_used():
    data, path = kept()
    one = trial("naive", DECODE, data=data)
    assert one.why_not() is None
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    assert "is damaged: its SHA-256 is not its name" in one.why_not()
    with pytest.raises(ValueError, match="is damaged"):
        originals(one, 0)


def test_a_file_is_hashed_once_per_process(monkeypatch):
    data, _ = kept()
    seen, true = [], _captured_file.hashlib.file_digest
    monkeypatch.setattr(_captured_file.hashlib, "file_digest", lambda *args: seen.append(args) or true(*args))
    for seed in range(3):
        one = trial("naive", DECODE, data=data, seed=seed)
        assert one.why_not() is None
        Comparison((one,)).inputs(2)
    assert len(seen) == 1


@pytest.mark.parametrize("workload, sentence", [
    (Workload.decode(replace(SHAPE, num_q_heads=8), kv_len=9), "have num_q_heads=4, and"),
    (Workload.decode(replace(SHAPE, num_kv_heads=1), kv_len=9), "have num_kv_heads=2"),
    (Workload.decode(replace(SHAPE, head_dim=16), kv_len=9), "have head_dim=8"),
    (Workload.decode(replace(SHAPE, v_head_dim=None), kv_len=9), "have v_head_dim=6, and the workload's"),
    (Workload.decode(replace(SHAPE, v_in_k=True), kv_len=9), "hold K and V apart"),
    (Workload.decode(replace(SHAPE, window=16), kv_len=9), "has window=None, and the workload's shape window=16"),
    (Workload.decode(replace(SHAPE, softcap=20.0), kv_len=9), "has softcap=None"),
    (Workload.decode(SHAPE, batch_size=2, kv_len=401), "kv_len=401, and 400 tokens were captured"),
], ids=lambda x: "" if isinstance(x, Workload) else x[:24])
def test_a_workload_that_the_file_does_not_fit_is_refused(workload, sentence):
    assert sentence in trial("naive", workload, data=kept()[0]).why_not()


def test_values_beyond_the_dtype_are_refused():
    made = tensors()
    made["k"][3] = 1e5
    data, _ = kept(made)
    assert trial("naive", DECODE, data=data).why_not() is None
    assert trial("naive", DECODE, data=data, dtype="bf16").why_not() is None
    assert "the captured k reaches 1e+05, which dtype fp16 cannot hold" in trial("naive", DECODE, data=data,
                                                                                   dtype="fp16").why_not()


def test_without_safetensors_a_sentence_says_what_to_install(monkeypatch):
    data, _ = kept()
    monkeypatch.setitem(sys.modules, "safetensors", None)
    _captured_file._facts.cache_clear()
    assert "pip install 'kvlab[models]'" in trial("naive", DECODE, data=data).why_not()
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ValueError, match="kvlab.models"):
        kept()


def test_the_same_tensors_have_the_same_name():
    first, second = kept(model="m", tokens=400), kept(tokens=400, model="m")
    assert first == second and kept(model="other")[0] != first[0]


def test_reference_is_the_models_own_attention():
    """Over the whole window of a captured sequence: plain causal attention of the file's tensors."""
    made = tensors(60)
    one = trial("naive", Workload.prefill(SHAPE, q_len=60), data=kept(made)[0])
    inputs = Comparison((one,)).inputs(1)["fp32", one.layout][0]
    got = one.prepare([inputs])[0]()
    exact = reference(one.workload, [made["q"]], [made["k"]], [made["v"]])
    assert torch.allclose(got.double(), exact, atol=1e-5)
