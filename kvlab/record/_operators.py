"""What an operator's name and recorded shapes say of it: its class, and the bytes it reads and writes at least."""
from __future__ import annotations

import math
from typing import NamedTuple

_ITEMSIZE = {"double": 8, "float": 4, "c10::Half": 2, "c10::BFloat16": 2, "long int": 8, "long": 8, "int": 4,
             "short int": 2, "short": 2, "signed char": 1, "unsigned char": 1, "bool": 1, "c10::complex<float>": 8,
             "c10::complex<double>": 16, "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1, "c10::Float8_e4m3fnuz": 1,
             "c10::Float8_e5m2fnuz": 1}
_WHOLE = {"long int", "long", "int", "short int", "short", "signed char", "unsigned char", "bool"}
_FLOATING = {"double", "float", "c10::Half", "c10::BFloat16"}
# What these copy, if anything, an operator inside them does.
VIEWS = {f"aten::{name}{in_place}" for in_place in ("", "_") for name in """view _unsafe_view view_as reshape
    _reshape_alias transpose permute movedim t expand expand_as as_strided slice select narrow unsqueeze squeeze split
    split_with_sizes unbind chunk unfold diagonal alias detach flatten unflatten resolve_conj resolve_neg lift_fresh
    contiguous to type_as empty empty_like empty_strided new_empty resize resize_as set requires_grad item
    _local_scalar_dense""".split()}
_GATHERS = {f"aten::{name}" for name in "index index_select gather embedding take take_along_dim masked_select".split()}
_SCATTERS = {f"aten::{name}_" for name in """index_put _index_put_impl index_copy index_add index_fill scatter
    scatter_add masked_scatter put""".split()}
_OVERWRITES = {f"aten::{name}_" for name in "copy fill zero normal uniform random bernoulli exponential".split()}
# elementwise operators by their operands: a tensor after these is an out= that is written
_OPERANDS = {f"aten::{name}": count for count, names in {
    1: """neg exp exp2 log sqrt rsqrt tanh sigmoid relu gelu silu softmax _softmax _log_softmax abs bitwise_not
        logical_not isnan isinf""",
    2: """add sub rsub mul div maximum minimum pow bitwise_and bitwise_or eq ne lt le gt ge logical_and logical_or
        logical_xor""",
    3: "where masked_fill clamp"}.items() for name in names.split()}
_MATMULS = {"aten::mm": 2, "aten::bmm": 2, "aten::addmm": 3, "aten::baddbmm": 3}
_BOOLEAN = {f"aten::{name}" for name in """eq ne lt le gt ge logical_and logical_or logical_xor logical_not isnan
    isinf""".split()}
_KEEP_INTEGERS = {f"aten::{name}" for name in """add sub mul neg abs relu maximum minimum where bitwise_and bitwise_or
    bitwise_not""".split()}
# they work themselves, beside what they call where that only copies (a bias, operands brought to one dtype)
WORKERS = {*_OPERANDS, *_MATMULS}
MAY_WIDEN = {"aten::_softmax", "aten::_log_softmax"}        # half in, float out, if their third argument is True
_CLASSES = (("attention", ("attention", "flash", "attn")), ("softmax", ("softmax", "logsumexp")),
            ("matmul", ("mm", "matmul", "gemm", "linear", "einsum", "::dot", "::mv")),
            ("copy", ("copy", "::cat", "clone", "index", "gather", "fill", "zero_", "repeat", "memcpy", "memset")))


class Moved(NamedTuple):
    """Bytes of one call of an operator: its inputs, its output (None where shapes do not tell it), or why neither."""
    inputs: int = 0
    output: int | None = None
    why_not: str = ""


def operator_class(name: str) -> str:
    """attention, softmax, matmul, copy or other, by the operator's name."""
    low = name.lower()
    return next((kind for kind, parts in _CLASSES if any(part in low for part in parts)), "other")


class _Tensor(NamedTuple):
    shape: list[int]
    dtype: str
    nbytes: int                     # a broadcast dimension (stride 0) lies in memory once


def moved(name: str, dims, types, strides, concrete=None) -> Moved | None:
    """Bytes by recorded shapes; None of a view, or of single numbers.

    In-place operators read and write their first tensor; those that only overwrite it (copy_, fill_) read the others.
    concrete: the arguments that are no tensors, as text. Wrong or missing shapes are None, never an error.
    """
    if name in VIEWS or not (isinstance(dims, list) and isinstance(types, list) and len(dims) == len(types)):
        return None
    if "TensorList" in types:
        return Moved(why_not="the dtype of tensor lists is not recorded")
    if not isinstance(strides, list) or len(strides) != len(dims):
        strides = [[]] * len(dims)
    operands = list(zip(dims, types, strides))[:_OPERANDS.get(name, _MATMULS.get(name))]
    tensors = [_Tensor(shape, kind, _elements(shape, stride) * _ITEMSIZE[kind]) for shape, kind, stride in operands
               if isinstance(kind, str) and kind in _ITEMSIZE and _is_shape(shape)]
    if all(math.prod(tensor.shape) <= 1 for tensor in tensors):     # numbers that became tensors; none is nothing too
        return None
    if name in _GATHERS:
        return Moved(why_not="it reads a part of its input that shapes do not tell")
    if name in _SCATTERS:
        return Moved(why_not="it writes a part of its output that shapes do not tell")
    inputs = sum(tensor.nbytes for tensor in tensors)
    if name.endswith("_") and not name.endswith("__"):
        written = tensors[0].nbytes
        return Moved(inputs - written if name in _OVERWRITES else inputs, written)
    return Moved(inputs, _output(name, tensors, concrete))


def _is_shape(shape) -> bool:
    return isinstance(shape, list) and len(shape) < 64 and all(type(d) is int and 0 <= d < 2**48 for d in shape)


def _elements(shape, stride) -> int:
    if not isinstance(stride, list) or 0 not in stride or len(stride) != len(shape):
        return math.prod(shape)
    return math.prod(d for d, step in zip(shape, stride) if step != 0 or d == 0)


def _output(name: str, tensors: list[_Tensor], concrete) -> int | None:
    """Bytes of the output; None where shape or dtype are not told by those of the inputs."""
    shapes, size = [tensor.shape for tensor in tensors], _ITEMSIZE[tensors[0].dtype]
    if name in _MATMULS and len(shapes) >= 2 and min(map(len, shapes[-2:])) >= 2:
        return size * math.prod(shapes[-2][:-1]) * shapes[-1][-1]
    if "attention" in name and len(shapes) >= 3 and shapes[0] and shapes[2]:
        return size * math.prod(shapes[0][:-1]) * shapes[2][-1]
    size = _result_size(name, tensors, concrete) if name in _OPERANDS else None
    if size is None:
        return None
    longest = max(map(len, shapes))
    padded = [[1] * (longest - len(shape)) + shape for shape in shapes]
    return size * math.prod(map(max, zip(*padded)))


def _result_size(name: str, tensors: list[_Tensor], concrete) -> int | None:
    """Itemsize of an elementwise result by torch's promotion; None where a number could change it."""
    if name in _BOOLEAN:
        return 1
    if name in MAY_WIDEN and isinstance(concrete, list) and concrete[2:3] == ["True"]:
        return _ITEMSIZE["float"]
    typed = tensors[:1] if name == "aten::masked_fill" else tensors[name == "aten::where":]
    kinds = {tensor.dtype for tensor in typed if tensor.shape} or {tensor.dtype for tensor in typed}
    if {"c10::Half", "c10::BFloat16"} <= kinds:
        kinds |= {"float"}
    if kinds & _FLOATING:
        return None if kinds - _FLOATING - _WHOLE else max(_ITEMSIZE[kind] for kind in kinds & _FLOATING)
    same = len({tensor.dtype for tensor in typed}) == 1 and (name in _KEEP_INTEGERS or name == "aten::masked_fill")
    return _ITEMSIZE[typed[0].dtype] if same else None
