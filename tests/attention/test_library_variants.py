"""Variants on other people's kernels: told apart, refused in words, and handed the right arguments.

No CUDA library runs here. Modules of the same names and signatures, written in plain torch, stand in for them: what a
variant passes is judged by the oracle, and what it would have to refuse by its sentence.
"""
import sys
import tomllib
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvlab.attention import Comparison, VariantRef, reference, trial
from kvlab.attention import _native as native
from kvlab.attention._matrix import WORKLOADS
from kvlab.attention.flash_attn import RELEASES, FlashAttn
from kvlab.attention.flashinfer import FlashInfer
from kvlab.attention.flex import Flex
from kvlab.attention.sdpa_math import SdpaMath
from kvlab.kv.cache import Layout
from kvlab.libraries import Library, library
from kvlab.probes import measure
from kvlab.probes.kernel_error import KernelError
from kvlab.shapes import AttentionShape, Workload

GQA = AttentionShape(8, 2, 64)
RAGGED = Workload(GQA, (1, 1, 1), (7, 300, 64))
MIXED = Workload(GQA, (1, 17, 40), (90, 33, 300))
WINDOW = Workload(replace(GQA, window=50), (1, 17), (30, 333))
SOFTCAP = Workload(replace(GQA, softcap=5.0), (4, 4), (30, 40))
BATCHES = {"ragged": RAGGED, "mixed": MIXED, "window": WINDOW, "soft-cap": SOFTCAP,
           "prefill": Workload.prefill(GQA, batch_size=2, q_len=20, kv_len=50)}


def judged(*trials):
    """The rows of kernel_error: the variant's output is held against fp64 attention, twice."""
    return measure(Comparison(trials), [KernelError()])


def attention(q_TQD, k_SKD, v_SKE, causal, window, softcap):
    """One sequence, in fp32, with FlashAttention's meaning of its arguments."""
    assert causal or q_TQD.shape[0] == 1
    shape = AttentionShape(q_TQD.shape[1], k_SKD.shape[1], q_TQD.shape[2], v_SKE.shape[2],
                           window=window[0] + 1 if window[0] is not None and window[0] >= 0 else None,
                           softcap=softcap or None)
    workload = Workload(shape, (q_TQD.shape[0],), (k_SKD.shape[0],))
    return reference(workload, [q_TQD], [k_SKD], [v_SKE], dtype=torch.float32).to(q_TQD.dtype)


def gathered(cache_NPKD, table, b, length):
    """The tokens of one sequence, paged or not."""
    if table is None:
        return cache_NPKD[b, :length]
    return cache_NPKD[table[b].long()].flatten(0, 1)[:length]


class Fakes:
    """Modules in the places of the libraries'; `found` says which of them import."""

    def __init__(self, monkeypatch):
        self.calls, self.patch = [], monkeypatch

    def install(self, *names, capability=(9, 0), version="9.9"):
        found = {name: Library(name, version, None) for name in names}

        def look(module, **_):
            return found.get(module, Library(module, None, f"{module} is not installed"))
        for home in ("flash_attn", "flashinfer"):
            self.patch.setattr(f"kvlab.attention.{home}.library", look)
        self.patch.setattr(native, "capability", lambda device: capability)
        makers = {"flash_attn": self._two, "flash_attn_interface": self._three, "flash_attn.cute": self._four,
                  "flashinfer": self._flashinfer}
        for name in names:
            module = types.ModuleType(name)
            makers[name](module)
            self.patch.setitem(sys.modules, name, module)

    def _with_kvcache(self, q, k_cache, v_cache, lens, table, causal, window_size, softcap, starts=None):
        assert lens.dtype == torch.int32 and (table is None or table.dtype == torch.int32)
        assert k_cache.stride(-1) == v_cache.stride(-1) == 1
        ends = [0, *(starts[1:].tolist())] if starts is not None else [n * q.shape[1] for n in range(len(q) + 1)]
        rows = q if starts is not None else q.flatten(0, 1)
        out = torch.cat([attention(rows[a:b], *(gathered(c, table, i, n) for c in (k_cache, v_cache)), causal,
                                   window_size, softcap)
                         for i, (a, b, n) in enumerate(zip(ends[:-1], ends[1:], lens.tolist(), strict=True))])
        return out if starts is not None else out.view(*q.shape[:2], *out.shape[1:])

    def _two(self, module):
        def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, block_table=None, causal=False,
                                    window_size=(-1, -1), softcap=0.0):
            self.calls.append("2")
            assert block_table is None or k_cache.shape[1] % 256 == 0
            return self._with_kvcache(q, k_cache, v_cache, cache_seqlens, block_table, causal, window_size, softcap)
        module.flash_attn_with_kvcache = flash_attn_with_kvcache

    def _three(self, module):
        def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, page_table=None, cu_seqlens_q=None,
                                    max_seqlen_q=None, causal=False, window_size=(-1, -1), softcap=0.0):
            self.calls.append("3")
            assert (max_seqlen_q is None) == (cu_seqlens_q is None)
            return self._with_kvcache(q, k_cache, v_cache, cache_seqlens, page_table, causal, window_size, softcap,
                                      cu_seqlens_q)
        module.flash_attn_with_kvcache = flash_attn_with_kvcache

    def _four(self, module):
        def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q, max_seqlen_q, seqused_k, page_table=None, causal=False,
                                   window_size=(None, None), softcap=0.0):
            self.calls.append("4")
            assert max_seqlen_q == max(cu_seqlens_q.diff().tolist()) and cu_seqlens_q.dtype == torch.int32
            return self._with_kvcache(q, k, v, seqused_k, page_table, causal, window_size, softcap, cu_seqlens_q), None
        module.flash_attn_varlen_func = flash_attn_varlen_func

    def _flashinfer(self, module):
        fakes = self

        class Wrapper:
            def __init__(self, space, layout, **options):
                assert space.dtype == torch.uint8 and layout in ("NHD", "HND")
                self.layout, self.spaces = layout, {space.data_ptr()}
                fakes.calls.append((type(self).__name__, layout, options))

            def reset_workspace_buffer(self, space, plan):
                assert {space.data_ptr()} == self.spaces and plan.dtype == torch.uint8

            def _plan(self, q_starts, starts, indices, last, heads, kv_heads, head_dim, page_size, *, causal=False,
                      logits_soft_cap, window_left, q_data_type, kv_data_type):
                assert {t.dtype for t in (q_starts, starts, indices, last)} == {torch.int32}
                lens = (starts.diff() - 1) * page_size + last
                assert len(indices) == starts[-1] and (last > 0).all() and (last <= page_size).all()
                self.planned = [(q_starts[i], q_starts[i + 1], indices[starts[i]:starts[i + 1]].long(), int(lens[i]))
                                for i in range(len(last))]
                self.rest = dict(causal=causal, window=(window_left, 0), softcap=logits_soft_cap)

            def run(self, q, k_and_v):
                k, v = (t if self.layout == "NHD" else t.transpose(1, 2) for t in k_and_v)
                return torch.cat([attention(q[a:b], k[pages].flatten(0, 1)[:n], v[pages].flatten(0, 1)[:n], **self.rest)
                                  for a, b, pages, n in self.planned])

        class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
            def plan(self, starts, *rest, **options):
                self._plan(torch.arange(len(starts), dtype=torch.int32), starts, *rest, **options)

        class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
            def plan(self, *rest, **options):
                self._plan(*rest, **options)
        module.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper
        module.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper


@pytest.fixture
def fakes(monkeypatch):
    return Fakes(monkeypatch)


def cells(variant, workload, page_sizes):
    """Trials of the variant on every page size and order, in bf16."""
    layouts = [Layout(size, "random" if size else "in_order", order) for size in page_sizes for order in
               ("token", "head")]
    return [trial(variant, workload, dtype="bf16", layout=layout) for layout in layouts]


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("version, module, capability, page_sizes", [
    (2, "flash_attn", (8, 0), (None, 256)), (3, "flash_attn_interface", (9, 0), (None, 1, 48)),
    (4, "flash_attn.cute", (10, 0), (None, 16))])
def test_flash_attn_is_handed_what_it_needs(fakes, version, module, capability, page_sizes, name):
    fakes.install(module, capability=capability)
    rows = judged(*cells("flash_attn", BATCHES[name], page_sizes))
    assert {(r["status"], r["error"]) for r in rows} == {("ok", "")}
    assert set(fakes.calls) == {str(version)}


def test_flash_attn_runs_a_batch_in_one_call_but_for_query_lengths_that_differ_in_2(fakes):
    for module, capability, wanted in (("flash_attn", (8, 0), 3), ("flash_attn_interface", (9, 0), 1)):
        fakes.install(module, capability=capability)
        for workload, calls in ((RAGGED, 1), (MIXED, wanted)):
            one = trial("flash_attn", workload, dtype="bf16")
            call = one.prepare(Comparison((one,)).inputs()["bf16", one.layout])[0]
            fakes.calls.clear()
            call()
            assert len(fakes.calls) == calls


@pytest.mark.parametrize("shape", [AttentionShape(16, 1, 64, 512), AttentionShape(4, 2, 192, 128),
                                   AttentionShape(16, 1, 64, 32, v_in_k=True)])
def test_flash_attn_3_takes_a_v_of_another_width(fakes, shape):
    fakes.install("flash_attn_interface")
    (row,) = judged(trial("flash_attn", Workload(shape, (1, 1), (40, 33)), dtype="bf16"))
    assert (row["status"], row["error"]) == ("ok", "")


@pytest.mark.parametrize("there, capability, version, runs", [
    ("234", (9, 0), None, 4), ("23", (9, 0), None, 3), ("2", (9, 0), None, 2), ("234", (9, 0), 2, 2),
    ("234", (8, 6), None, 2), ("34", (8, 6), None, None), ("3", (10, 0), None, None), ("", (9, 0), None, None),
    ("34", (9, 0), 2, None)])
def test_the_newest_release_that_imports_and_suits_the_device_runs(fakes, there, capability, version, runs):
    fakes.install(*(RELEASES[int(v)].module for v in there), capability=capability)
    found, reasons = FlashAttn(version).resolved("cuda")
    assert found == runs
    if runs is None:
        one = trial(FlashAttn(version), RAGGED, dtype="bf16")
        why = one.why_not()
        assert why == reasons
        assert all(f"FlashAttention {v} cannot run: " in why for v in ((version,) if version else RELEASES))
        assert ("is not installed" in why) or ("no kernels for compute capability" in why)


@pytest.mark.parametrize("module, capability, workload, layout, sentence", [
    ("flash_attn", (8, 0), RAGGED, Layout(16), "blocks of a multiple of 256 tokens, got block_size=16"),
    ("flash_attn", (8, 0), Workload.decode(AttentionShape(4, 2, 64, 32), kv_len=9), None, "K and V of one width"),
    ("flash_attn", (8, 0), Workload.decode(AttentionShape(4, 2, 264), kv_len=9), None, "at most 256, got head_dim=264"),
    ("flash_attn", (8, 0), Workload.decode(AttentionShape(4, 2, 60), kv_len=9), None, "8 divides, got head_dim=60"),
    ("flash_attn_interface", (9, 0), WORKLOADS["decode, absorbed MLA"], None, "K of at most 64 with V of at most 512"),
    ("flash_attn.cute", (9, 0), RAGGED, Layout(16), "pages on compute capability 10.x only, and this device has 9.x"),
    ("flash_attn.cute", (9, 0), Workload.decode(AttentionShape(4, 2, 256), kv_len=9), None, "of at most 128"),
    ("flash_attn.cute", (9, 0), Workload.decode(AttentionShape(4, 2, 192, 128), kv_len=9), None, "192 with 128"),
    ("flashinfer", (7, 5), RAGGED, None, "needs compute capability 8.0"),
    ("flashinfer", (9, 0), Workload.decode(AttentionShape(4, 2, 96), kv_len=9), None, "width of 64, 128, 256"),
])
def test_what_a_library_has_no_kernel_for_is_refused_in_words(fakes, module, capability, workload, layout, sentence):
    fakes.install(module, capability=capability)
    one = trial("flashinfer" if module == "flashinfer" else "flash_attn", workload, dtype="bf16", layout=layout)
    assert sentence in one.why_not()
    (row,) = judged(one)
    assert (row["status"], row["error"]) == ("skipped", one.why_not())


def test_an_old_flash_attn_is_told_to_be_upgraded(fakes):
    for version, old in (("2.5.9", True), ("2.6.0", False), ("2.8.3.post2", False), ("1.0.9", True), ("2.10.0", False)):
        fakes.install("flash_attn", capability=(8, 0), version=version)
        why = trial("flash_attn", RAGGED, dtype="bf16").why_not()
        assert (why is not None and f"flash-attn {version} has neither" in why) == old, version


@pytest.mark.parametrize("name", ["flash_attn", "flashinfer"])
@pytest.mark.parametrize("change, sentence", [
    (dict(dtype="fp32"), "fp16 and bf16 only"), (dict(kv_format="int8/token"), "int8/token would have to be decoded"),
    (dict(dtype="fp16", kv_format="bf16"), "use sdpa, or kv_format fp16")])
def test_dtypes_and_formats_that_are_missing_are_refused(fakes, name, change, sentence):
    fakes.install("flash_attn", "flashinfer", capability=(8, 0))
    assert sentence in trial(name, RAGGED, **{"dtype": "bf16", **change}).why_not()


def test_on_a_cpu_no_library_is_looked_for(monkeypatch):
    for home in ("flash_attn", "flashinfer"):
        monkeypatch.setattr(f"kvlab.attention.{home}.library", lambda *a, **k: pytest.fail("a library was tried"))
    for name in ("flash_attn", "flashinfer"):
        assert "has CUDA kernels only, and this is device cpu" in trial(name, RAGGED, dtype="bf16").why_not()
    with pytest.raises(ValueError, match="version=5; allowed: 2, 3, 4, or None"):
        FlashAttn(5)


@pytest.fixture
def on_path(tmp_path, monkeypatch):
    """Files of made-up packages on sys.path, looked for anew."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(native, "capability", lambda device: (9, 0))
    library.cache_clear()

    def write(path, text=""):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    yield write
    library.cache_clear()


def test_flash_attention_4_alone_is_not_taken_for_2(on_path):
    on_path("flash_attn/cute/__init__.py", "def flash_attn_varlen_func(): ...")
    assert FlashAttn().resolved("cuda") == (4, "")
    assert FlashAttn(2).resolved("cuda") == (None, "FlashAttention 2 cannot run: flash_attn is not installed")


def test_flash_attention_2_that_was_built_for_another_torch_gives_its_reason(on_path):
    on_path("flash_attn/__init__.py", "raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2')")
    version, reasons = FlashAttn().resolved("cuda")
    assert version is None and "flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2" in reasons
    assert "FlashAttention 3 cannot run: flash_attn_interface is not installed" in reasons


@pytest.mark.parametrize("name", BATCHES)
def test_flashinfer_is_planned_from_the_block_table(fakes, name):
    fakes.install("flashinfer")
    rows = judged(*cells("flashinfer", BATCHES[name], (None, 16, 48)))
    assert {(r["status"], r["error"]) for r in rows} == {("ok", "")}
    made = "BatchDecodeWithPagedKVCacheWrapper" if name == "ragged" else "BatchPrefillWithPagedKVCacheWrapper"
    assert {call[:2] for call in fakes.calls} == {(made, "NHD"), (made, "HND")}
    assert {call[2].get("use_tensor_cores") for call in fakes.calls} == {True if name == "ragged" else None}


def test_flashinfer_plans_outside_the_call_and_shares_its_workspace(fakes):
    fakes.install("flashinfer")
    one = trial("flashinfer", RAGGED, dtype="bf16")
    inputs = Comparison((one,)).inputs(3)["bf16", one.layout]
    spaces = []
    original = type(inputs[0]).workspace
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(inputs[0]), "workspace", lambda self, *a, **k: spaces.append(original(self, *a, **k)) or
                      spaces[-1])
        calls = one.prepare(inputs)
    assert len(calls) == 3 and len(spaces) == 6 and len({space.data_ptr() for space in spaces}) == 2
    fakes.calls.clear()
    outputs = [call() for call in calls]
    assert fakes.calls == [] and not torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("name, torch_says", [
    ("sdpa_efficient", "No viable backend for scaled_dot_product_attention"),
    ("sdpa_cudnn", "No viable backend for scaled_dot_product_attention")])
def test_a_back_end_that_torch_lacks_here_is_refused_in_torch_s_words(name, torch_says):
    assert torch_says in trial(name, RAGGED).why_not()


def test_the_flash_back_end_refuses_what_sdpa_silently_computes_another_way():
    odd = WORKLOADS["decode, K wider than V"]
    assert trial("sdpa", odd).why_not() is None and trial("sdpa_math", odd).why_not() is None
    assert "same last dimension" in trial("sdpa_flash", odd).why_not()


@pytest.mark.parametrize("name, operator", [("sdpa_math", "bmm"),
                                            ("sdpa_flash", "_scaled_dot_product_flash_attention_for_cpu")])
def test_a_named_back_end_is_the_one_that_runs(name, operator):
    for workload in (RAGGED, WORKLOADS["prefill, MHA"], WORKLOADS["prefill after a cache"]):
        (row,) = judged(trial(name, workload))
        assert row["status"] == "ok" and operator in row["note"].partition("operators: ")[2].split(", ")


def test_the_math_back_end_is_refused_where_its_scores_do_not_fit(monkeypatch):
    import psutil
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=1000))
    assert "score matrix needs" in SdpaMath().why_not(trial("sdpa_math", MIXED))


def test_variants_on_libraries_are_named_as_data_and_made_again():
    for one in (FlashAttn(3), FlashInfer(), Flex(), SdpaMath()):
        assert VariantRef.of(one).load() == one
    assert VariantRef.of(FlashAttn(3)).label == "flash_attn(version=3)"


def test_no_install_brings_a_cuda_library_that_was_not_asked_for():
    """They are built for the torch and the GPU that are there: on a laptop the whole install would fail with them."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert [name for name, needed in {"": project["dependencies"], **extras}.items()
            if any("flash" in requirement for requirement in needed)] == ["flash", "flashinfer"]
    assert len(extras["flash"]) == len(extras["flashinfer"]) == 1
    assert not any("kvlab[" in requirement for needed in extras.values() for requirement in needed)
