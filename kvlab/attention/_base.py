"""What a variant must answer, what a trial is, and the fp64 oracle by which every variant is judged.

Legend: B = sequence, T = query token, S = kv token, Q = query head, K = kv head, G = query heads per kv head,
D = head_dim, E = v_head_dim.
"""
from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvlab.kv.cache import KVCache, Layout, block_tables
from kvlab.kv.formats import KVFormat, kv_format
from kvlab.registry import Registry, load_file, no_such
from kvlab.shapes import Workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

DTYPES = {"fp32": ("float32", 4), "fp16": ("float16", 2), "bf16": ("bfloat16", 2)}


class Cost(NamedTuple):
    """What an algorithm must move to and from memory, and compute, at the least. Never a measurement."""
    read_bytes: int
    write_bytes: int
    executed_flops: int

    def plus(self, read: int = 0, write: int = 0, flops: int = 0) -> Cost:
        return Cost(self.read_bytes + read, self.write_bytes + write, self.executed_flops + flops)


class Variant(Protocol):
    """How attention is computed. A frozen dataclass in its own file; knobs are its fields."""
    name: str

    def why_not(self, trial: Trial) -> str | None:
        """One sentence on why this cannot run, or None."""

    def prepare(self, trial: Trial, inputs: Inputs) -> Callable[[], Tensor]:
        """Plan outside the clock; the call returns the output of all query tokens, [sum of q_lens, Q, E].

        The call reads q and the cache when it is called and keeps nothing derived from them between calls.
        """

    def cost(self, trial: Trial, cache_bytes: int = 0) -> Cost:
        """What this algorithm must move and do at the least.

        Intermediate arrays of at most cache_bytes stay in the last-level cache and cost nothing.
        """


variants = Registry("attention variant", "kvlab.attention", attribute="name")
_local: dict[str, type] = {}        # classes that exist only in this process (a notebook cell), by name


@dataclass(frozen=True)
class VariantRef:
    """How a variant is named in data: a registry name, "path/to/file.py:Class" or "cell:Class", and its knobs."""
    ref: str
    knobs: tuple[tuple[str, int | float | str | bool | None], ...] = ()

    @classmethod
    def of(cls, variant: VariantRef | Variant | str) -> VariantRef:
        """A reference to a name, a class or an instance; an unknown name raises KeyError with a near match."""
        if isinstance(variant, VariantRef):
            return variant
        if isinstance(variant, str):
            if ".py:" in variant:
                _class_in(variant)
            else:
                variants[variant]                       # raises for an unknown name, before anything is measured
            return cls(variant)
        kind = variant if isinstance(variant, type) else type(variant)
        knobs = () if kind is variant or not is_dataclass(variant) else tuple(
            (f.name, getattr(variant, f.name)) for f in fields(variant)
            if f.init and getattr(variant, f.name) != f.default)
        for knob, value in knobs:
            if not isinstance(value, int | float | str | bool | None):
                raise ValueError(f"{kind.__name__}({knob}={value!r}): a knob must be a number, a string, a bool or "
                                 "None, so that a row can be run again from its text")
        if kind.__module__.startswith("kvlab.attention."):
            return cls(kind.name, knobs)
        source = getattr(inspect.getmodule(kind), "__file__", None)
        if source and kind.__module__ != "__main__" and "." not in kind.__qualname__:
            return cls(f"{_relative(source)}:{kind.__qualname__}", knobs)
        _local[kind.__qualname__] = kind
        return cls(f"cell:{kind.__qualname__}", knobs)

    @property
    def in_process(self) -> bool:
        """Whether the class exists only in this process, so that no worker can load it."""
        return self.ref.startswith("cell:")

    @property
    def source_file(self) -> Path | None:
        return Path(self.ref.rpartition(":")[0]) if ".py:" in self.ref else None

    def load(self) -> Variant:
        """The variant itself. Runs the user's module where the reference names a file, anew when that file changed."""
        if self.in_process:
            return _made(self, _local[self.ref.removeprefix("cell:")])
        return _loaded(self, self.source_file.stat().st_mtime_ns if self.source_file else 0)

    @property
    def default_layout(self) -> Layout:
        """The layout that the variant's class names as default_layout, else contiguous. Runs none of a user's file."""
        if self.source_file is None:
            return getattr(self.load(), "default_layout", Layout())
        for line in _class_in(self.ref).body:
            targets = [line.target] if isinstance(line, ast.AnnAssign) else getattr(line, "targets", [])
            given = getattr(line, "value", None)
            if given is not None and any(getattr(t, "id", "") == "default_layout" for t in targets):
                try:
                    if not isinstance(given, ast.Call):
                        raise ValueError(f"got {ast.unparse(given)}")
                    return Layout(*map(ast.literal_eval, given.args),
                                  **{k.arg: ast.literal_eval(k.value) for k in given.keywords})
                except (ValueError, TypeError) as error:
                    raise ValueError(f"default_layout of {self.ref} must be a Layout of plain values: "
                                     f"{error}") from None
        return Layout()

    @property
    def label(self) -> str:
        """What tables and figures show: the registry name or the class's name, with the knobs that were changed."""
        name = self.ref.rpartition(":")[2].rpartition(".")[2]
        return name + (f"({', '.join(f'{k}={v}' for k, v in self.knobs)})" if self.knobs else "")


@cache
def _loaded(ref: VariantRef, changed_ns: int) -> Variant:
    if not ref.source_file:
        return _made(ref, variants[ref.ref])
    module, name = load_file(ref.source_file), ref.ref.rpartition(":")[2]
    if not isinstance(getattr(module, name, None), type):
        raise KeyError(f"no class {name!r} in {ref.source_file}")
    return _made(ref, getattr(module, name))


def _made(ref: VariantRef, kind: type) -> Variant:
    variant = kind(**dict(ref.knobs))
    missing = [m for m in ("why_not", "prepare", "cost") if not callable(getattr(variant, m, None))]
    if missing or not isinstance(getattr(variant, "name", None), str):
        raise TypeError(f"{ref.ref} is not a variant: it needs a name and the methods why_not, prepare, cost "
                        f"(missing: {', '.join(missing) or 'name'})")
    return variant


def _class_in(ref: str) -> ast.ClassDef:
    """The class that "path.py:Class" names, read but not run: a user's file is only ever run by a worker."""
    path, _, name = ref.rpartition(":")
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise KeyError(f"cannot read {path!r} ({error.strerror}); give the path of a Python file, ':' and the class "
                       "in it") from None
    except SyntaxError as error:
        raise ValueError(f"{path} is not valid Python: {error}") from None
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if name not in classes:
        raise no_such(f"class in {path}", name, classes)
    return classes[name]


def _relative(path: str) -> str:
    try:
        return str(Path(path).resolve().relative_to(Path.cwd()))
    except ValueError:
        return path


@dataclass(frozen=True)
class Trial:
    """One cell of an experiment, as pure data: any row can be run again from it.

    dtype is that of q, of the arithmetic's inputs and of the output. data: "gaussian", or "outlier" (two channels
    of K fifteen times as large, as real models have). replica tells the two halves of an A/A pair apart.
    """
    variant: VariantRef
    workload: Workload
    kv_format: str = "fp32"
    layout: Layout = field(default_factory=Layout)
    dtype: str = "fp32"
    data: str = "gaussian"
    device: str = "cpu"
    threads: int = 1
    seed: int = 0
    replica: int = 0

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}; allowed: {', '.join(DTYPES)}")
        kv_format(self.kv_format)                                    # raises for an unknown format, by name
        if self.data not in ("gaussian", "outlier"):
            raise ValueError(f"data={self.data!r}; allowed: gaussian, outlier")
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device={self.device!r}; allowed: cpu, cuda, cuda:0, cuda:1, …")
        if type(self.threads) is not int or self.threads < 1:
            raise ValueError(f"threads={self.threads!r} must be a whole number of at least 1")

    @property
    def format(self) -> KVFormat:
        return kv_format(self.kv_format)

    @property
    def torch_dtype(self):
        import torch
        return getattr(torch, DTYPES[self.dtype][0])

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype][1]

    @cached_property
    def case_id(self) -> str:
        return digest(asdict(self))

    def why_not(self) -> str | None:
        """Why this trial cannot run here, in one sentence: the device's, the layout's, then the variant's reason."""
        import torch
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            return "torch sees no CUDA device; use device cpu, or install a CUDA build of torch beside an NVIDIA driver"
        return self.layout.why_not(self.workload, self.format) or self.variant.load().why_not(self)

    def prepare(self, inputs: list[Inputs]) -> list[Callable[[], Tensor]]:
        """One call per input copy, planned outside the clock."""
        variant = self.variant.load()
        return [variant.prepare(self, one) for one in inputs]

    @property
    def format_path(self) -> str:
        """native: the format is read as it is; decoded: it is turned into floats inside the call, before use."""
        native = self.kv_format == self.dtype or self.kv_format in getattr(self.variant.load(), "native_formats", ())
        return "native" if native else "decoded"

    def columns(self) -> dict:
        """The result table's columns about this trial."""
        return dict(variant=self.variant.label, device=self.device, dtype=self.dtype, kv_format=self.kv_format,
                    block_size=self.layout.block_size, page_order=self.layout.page_order, data=self.data,
                    threads=self.threads, seed=self.seed, replica=self.replica, **self.workload.columns(),
                    case=json.dumps(asdict(self), sort_keys=True))


def trial(variant, workload: Workload, *, kv_format: str | None = None, layout: Layout | None = None,
          dtype: str | None = None, device: str = "cpu", **rest) -> Trial:
    """A trial with the usual defaults: fp32 on a CPU, bf16 on CUDA, K/V in that dtype, the variant's own layout."""
    ref = VariantRef.of(variant)
    dtype = dtype or ("bf16" if device.startswith("cuda") else "fp32")
    if layout is None:
        layout = ref.default_layout
    return Trial(ref, workload, kv_format or dtype, layout, dtype, device=device, **rest)


@dataclass(eq=False)
class Inputs:
    """One copy of a trial's tensors: q of the whole batch [sum of q_lens, Q, D], the encoded cache, its block table.

    k, v: the originals before encoding, one [S, K, D] and [S, K, E] per sequence; kept for copy 0 only.
    block_table: [B, most blocks of a sequence], filled up with block 0.
    """
    q_TQD: Tensor
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    cache: KVCache
    block_table: Tensor
    seed: int
    k: list[Tensor] | None = None
    v: list[Tensor] | None = None

    @property
    def q_BTQD(self) -> list[Tensor]:
        """q of each sequence, as views."""
        return list(self.q_TQD.split(self.q_lens))

    def stored(self, sequence: int):
        """One contiguous sequence's arrays of K and of V, as [K, R, W] views of its only block."""
        cache = self.cache
        return tuple(tuple(a[sequence] for a in cache.by_head(side)) for side in (cache.k_arrays, cache.v_arrays))

    def decode(self, arrays_k, arrays_v, kv_len: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """(k, v) as floats of q's dtype, tokens first … kv_len; a view where they are stored in that dtype."""
        fmt, shape, dtype = self.cache.format, self.cache.shape, self.q_TQD.dtype
        k_parts, v_parts = fmt.components(shape)
        base = first - first % fmt.token_group(shape)                # what lies before is hidden, and is not touched

        def side(codec, arrays, components):
            rows = tuple(a[..., base // c.tokens:, :] for a, c in zip(arrays, components))
            return codec.decode(rows, kv_len - base, dtype)[..., first - base:, :]
        k = side(fmt.k, arrays_k, k_parts)
        return k, k[..., :shape.v_dim] if shape.v_in_k else side(fmt.v, arrays_v, v_parts)


@dataclass(frozen=True)
class Comparison:
    """Trials of one workload that differ only in variant, format or layout, measured interleaved on one device."""
    trials: tuple[Trial, ...]

    def __post_init__(self):
        if not self.trials:
            raise ValueError("a comparison needs at least one trial")
        if len(set(self.trials)) != len(self.trials):
            raise ValueError("a comparison's trials must differ; give an A/A pair different replicas")
        common = {(t.workload, t.dtype, t.data, t.device, t.threads, t.seed) for t in self.trials}
        if len(common) != 1:
            raise ValueError("trials of a comparison may differ only in variant, kv_format, layout and replica")

    @property
    def workload(self) -> Workload:
        return self.trials[0].workload

    @property
    def device(self) -> str:
        return self.trials[0].device

    @cached_property
    def comparison_id(self) -> str:
        return digest(asdict(self))

    def columns(self) -> dict:
        """Columns of a row about the whole comparison: those in which all trials agree, and no variant."""
        all_of = [t.columns() for t in self.trials]
        same = {k: v for k, v in all_of[0].items() if all(c[k] == v for c in all_of)}
        return {**same, "variant": "", "case": json.dumps(asdict(self), sort_keys=True)}

    def cache_bytes(self) -> dict[tuple[str, Layout], int]:
        """Bytes of one copy's K/V in each (kv_format, layout), the sequences' own."""
        w = self.workload
        return {(t.kv_format, t.layout): sum(t.format.nbytes(n, w.shape) for n in w.kv_lens) for t in self.trials}

    def nbytes(self, copies: int) -> int:
        """Bytes that inputs(copies) will allocate, with the originals of copy 0 and what the oracle needs in fp64."""
        w, s, stored = self.workload, self.workload.shape, 0
        for name, layout in self.cache_bytes():
            fmt = kv_format(name)
            block_size = layout.block_size or _longest_block(w, fmt)
            blocks = sum(-(-n // block_size) for n in w.kv_lens) + (layout.block_size is not None)      # the null block
            stored += blocks * fmt.nbytes(block_size, s)
        q = sum(w.q_lens) * s.num_q_heads * s.head_dim * self.trials[0].itemsize
        fp32 = 4 * sum(w.kv_lens) * s.num_kv_heads * (s.head_dim + s.v_dim)
        scores = 3 * 8 * s.num_q_heads * min(sum(w.q_lens), 256) * max(w.kv_lens)       # of the oracle, in fp64
        return copies * (stored + q) + 4 * fp32 + scores

    def inputs(self, copies: int = 1) -> dict[tuple[str, Layout], list[Inputs]]:
        """The tensors of every (kv_format, layout), built once and shared by the variants; copy i has seed + i."""
        made: dict[tuple[str, Layout], list[Inputs]] = {(t.kv_format, t.layout): [] for t in self.trials}
        for i in range(copies):
            q_TQD, k, v = originals(self.trials[0], self.trials[0].seed + i)
            for (fmt, layout), copies_so_far in made.items():
                one = _encode(self.trials[0], kv_format(fmt), layout, q_TQD, k, v, self.trials[0].seed + i)
                if i == 0:
                    one.k, one.v = k, v
                copies_so_far.append(one)
        return made


def originals(trial: Trial, seed: int) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    """q of the batch, and k, v of each sequence before encoding, in the trial's dtype; v is None if a view of k."""
    import torch
    w, s = trial.workload, trial.workload.shape
    generator = torch.Generator(trial.device).manual_seed(seed)

    def gaussian(*size):
        return torch.randn(*size, generator=generator, device=trial.device).to(trial.torch_dtype)

    q_TQD = gaussian(sum(w.q_lens), s.num_q_heads, s.head_dim)
    k = [gaussian(n, s.num_kv_heads, s.head_dim) for n in w.kv_lens]
    v = [None if s.v_in_k else gaussian(n, s.num_kv_heads, s.v_dim) for n in w.kv_lens]
    if trial.data == "outlier":
        for k_SKD in k:
            k_SKD[..., :2] *= 15
    for b in range(1, w.batch_size):
        k[b][:w.shared_prefix] = k[0][:w.shared_prefix]
        if not s.v_in_k:
            v[b][:w.shared_prefix] = v[0][:w.shared_prefix]
    return q_TQD, k, v


def _longest_block(workload: Workload, fmt: KVFormat) -> int:
    """Slots of the one block that a contiguous layout gives each sequence: room for the longest, in whole groups."""
    group = fmt.token_group(workload.shape)
    return -(-max(workload.kv_lens) // group) * group


def _encode(trial: Trial, fmt: KVFormat, layout: Layout, q_TQD, k, v, seed: int) -> Inputs:
    import torch
    w = trial.workload
    tables, num_blocks = block_tables(w, layout, seed)
    block_size = layout.block_size or _longest_block(w, fmt)
    cache = KVCache(w.shape, fmt, num_blocks, block_size, order=layout.order, device=trial.device)
    for table, k_SKD, v_SKD in zip(tables, k, v):
        cache.write(fmt.encode(k_SKD, v_SKD), table)
    longest = max(map(len, tables))
    block_table = torch.tensor([t + [0] * (longest - len(t)) for t in tables], device=trial.device)
    return Inputs(q_TQD, w.q_lens, w.kv_lens, cache, block_table, seed)


def reference(workload: Workload, q_BTQD: list[Tensor], k: list[Tensor], v: list[Tensor],
              rows: list[Tensor] | None = None, dtype=None) -> Tensor:
    """Causal softmax attention in fp64, written for reading: the oracle for every variant and format.

    q [T, Q, D], k [S, K, D], v [S, K, E] per sequence; v may be None where it is a view of k. rows: which query
    tokens of each sequence to compute (default all). dtype: that of the arithmetic; a lower one than fp64 gives the
    plain attention whose error sets the tolerance. Returns [rows, Q, E], sequence after sequence.
    """
    import torch
    dtype = dtype or torch.float64
    shape, out = workload.shape, []
    for b, (q_TQD, k_SKD) in enumerate(zip(q_BTQD, k)):
        T, S, K, G = q_TQD.shape[0], k_SKD.shape[0], shape.num_kv_heads, shape.group_ratio
        row_T = torch.arange(T, device=q_TQD.device) if rows is None else rows[b]
        k_SKD = k_SKD.to(dtype)
        v_SKE = k_SKD[..., :shape.v_dim] if shape.v_in_k else v[b].to(dtype)
        q_TKGD = q_TQD[row_T].to(dtype).reshape(len(row_T), K, G, shape.head_dim)
        score_KGTS = torch.einsum("tkgd,skd->kgts", q_TKGD, k_SKD) / shape.head_dim**0.5
        if shape.softcap is not None:
            score_KGTS = shape.softcap * torch.tanh(score_KGTS / shape.softcap)
        position_T1 = (S - T + row_T)[:, None]                       # where each query token itself stands
        token_S = torch.arange(S, device=q_TQD.device)
        hidden_TS = token_S > position_T1
        if shape.window is not None:
            hidden_TS |= token_S <= position_T1 - shape.window
        weight_KGTS = score_KGTS.masked_fill(hidden_TS, float("-inf")).softmax(-1)
        out.append(torch.einsum("kgts,ske->tkge", weight_KGTS, v_SKE).reshape(len(row_T), K * G, shape.v_dim))
    return torch.cat(out)


def useful_flops(workload: Workload) -> int:
    """2 · query heads · (head_dim + v_head_dim) · visible (query, token) pairs: no algorithm can do with less."""
    s = workload.shape
    return 2 * s.num_q_heads * (s.head_dim + s.v_dim) * workload.visible_pairs()


def ideal_traffic(workload: Workload, fmt: KVFormat, itemsize: int) -> Cost:
    """Read q and each unique stored K/V byte that some query may see once, write the output once.

    Independent of variant and layout: a shared prefix counts once, scales count, tokens outside the window do not.
    """
    s = workload.shape
    tokens = sum(workload.q_lens)
    # only whole groups are shared: one that holds a sequence's own tokens has its own scale, and so its own codes
    prefix = workload.shared_prefix - workload.shared_prefix % fmt.token_group(s)
    firsts = [workload.first_visible(b) for b in range(workload.batch_size)]
    kv = sum(fmt.nbytes(n, s, first=min(n, max(first, prefix))) for n, first in zip(workload.kv_lens, firsts))
    if prefix > min(firsts):
        kv += fmt.nbytes(prefix, s, first=min(firsts))
    return Cost(tokens * s.num_q_heads * s.head_dim * itemsize + kv,
                tokens * s.num_q_heads * s.v_dim * itemsize, useful_flops(workload))


def least_cost(trial: Trial, cache_bytes: int = 0) -> Cost:
    """The cost that all variants share: ideal traffic, a layout that stores a shared prefix per sequence, decoding."""
    w, s, fmt = trial.workload, trial.workload.shape, trial.format
    cost = ideal_traffic(w, fmt, trial.itemsize)
    if w.shared_prefix and not trial.layout.share_prefix:
        cost = ideal_traffic(replace(w, shared_prefix=0), fmt, trial.itemsize)
    if trial.format_path == "decoded":
        visible = sum(n - w.first_visible(b) for b, n in enumerate(w.kv_lens))
        width = s.head_dim + (0 if s.v_in_k else s.v_dim)
        decoded = visible * s.num_kv_heads * width * trial.itemsize
        if decoded > cache_bytes:
            cost = cost.plus(read=decoded, write=decoded)
    return cost


def contiguous_only(trial: Trial) -> str | None:
    """Why a variant that walks K and V as one array cannot read this trial's cache."""
    if trial.layout.block_size is not None:
        return "reads contiguous caches only; use the variant paged, or a layout without block_size"
    return None


def score_matrix_bytes(trial: Trial) -> int:
    """Bytes of one score matrix in the trial's dtype: query heads x query tokens x the tokens that some query sees."""
    w = trial.workload
    cells = sum(q_len * (kv_len - w.first_visible(b)) for b, (q_len, kv_len) in enumerate(zip(w.q_lens, w.kv_lens)))
    return w.shape.num_q_heads * cells * trial.itemsize


def digest(data: dict) -> str:
    """Twelve hex digits that name this data."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]
