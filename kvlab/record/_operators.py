"""What an operator's name and recorded shapes say of it: its class, and the bytes it reads and writes at least."""
from __future__ import annotations

import math
from typing import NamedTuple

_ITEMSIZE = {"double": 8, "float": 4, "c10::Half": 2, "c10::BFloat16": 2, "long int": 8, "long": 8, "int": 4,
             "short int": 2, "short": 2, "signed char": 1, "unsigned char": 1, "bool": 1, "c10::complex<float>": 8,
             "c10::complex<double>": 16, "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1, "c10::Float8_e4m3fnuz": 1,
             "c10::Float8_e5m2fnuz": 1}
# What these copy, if anything, an operator inside them does.
VIEWS = {f"aten::{name}" for name in """view _unsafe_view view_as reshape _reshape_alias transpose permute movedim t
    expand expand_as as_strided slice select narrow unsqueeze squeeze split split_with_sizes unbind chunk unfold
    diagonal alias detach flatten unflatten resolve_conj resolve_neg lift_fresh contiguous to type_as empty empty_like
    empty_strided new_empty resize_ set_ item _local_scalar_dense""".split()}
_GATHERS = {f"aten::{name}" for name in "index index_select gather embedding take take_along_dim masked_select".split()}
_MATMULS = {f"aten::{name}" for name in "mm bmm addmm baddbmm".split()}
_ELEMENTWISE = {f"aten::{name}" for name in """add sub rsub mul div neg exp exp2 log sqrt rsqrt tanh sigmoid relu gelu
    silu where masked_fill softmax _softmax clamp maximum minimum pow abs logical_and bitwise_and""".split()}
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


def moved(name: str, dims, types, strides) -> Moved | None:
    """Bytes by recorded shapes, a broadcast dimension (stride 0) counted once; None of a view, or of single numbers.

    In-place operators have their output among the inputs. Wrong or missing shapes are None, never an error.
    """
    if name in VIEWS or not (isinstance(dims, list) and isinstance(types, list) and len(dims) == len(types)):
        return None
    if "TensorList" in types:
        return Moved(why_not="the dtype of tensor lists is not recorded")
    if not isinstance(strides, list) or len(strides) != len(dims):
        strides = [[]] * len(dims)
    tensors = [(shape, _ITEMSIZE[kind], stride) for shape, kind, stride in zip(dims, types, strides)
               if isinstance(kind, str) and kind in _ITEMSIZE and _is_shape(shape)]
    if all(math.prod(shape) <= 1 for shape, _, _ in tensors):       # numbers that became tensors; none is nothing too
        return None
    if name in _GATHERS:
        return Moved(why_not="it reads a part of its input that shapes do not tell")
    inputs = sum(_elements(shape, stride) * size for shape, size, stride in tensors)
    return Moved(inputs, 0 if name.endswith("_") else _output(name, tensors))


def _is_shape(shape) -> bool:
    return isinstance(shape, list) and len(shape) < 64 and all(type(d) is int and 0 <= d < 2**48 for d in shape)


def _elements(shape, stride) -> int:
    if not isinstance(stride, list) or len(stride) != len(shape):
        return math.prod(shape)
    return math.prod(d for d, step in zip(shape, stride) if step != 0 or d == 0)


def _output(name, tensors) -> int | None:
    """Bytes of the output, in the dtype of the first tensor."""
    shapes, size = [shape for shape, _, _ in tensors], tensors[0][1]
    if name in _MATMULS and len(shapes) >= 2 and min(map(len, shapes[-2:])) >= 2:
        return size * math.prod(shapes[-2][:-1]) * shapes[-1][-1]
    if "attention" in name and len(shapes) >= 3 and shapes[0] and shapes[2]:
        return size * math.prod(shapes[0][:-1]) * shapes[2][-1]
    if name in _ELEMENTWISE:
        longest = max(map(len, shapes))
        padded = [[1] * (longest - len(shape)) + shape for shape in shapes]
        return size * math.prod(map(max, zip(*padded))) if longest else size
    return None
