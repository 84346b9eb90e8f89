"""Kernels with mistakes that only a compiler shows: the compile tests must turn red on each."""
import triton
import triton.language as tl


@triton.jit
def mixed_product(a_ptr, b_ptr, out_ptr):
    at = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)).to(tl.bfloat16))


@triton.jit
def crowding(x_ptr, out_ptr):
    at = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    x = tl.load(x_ptr + at).to(tl.float32)
    tl.store(out_ptr + at, (tl.exp2(x - tl.max(x, 1)[:, None]) + x / tl.sum(x, 0)[None, :]).to(tl.bfloat16))


@triton.jit
def copying(x_ptr, out_ptr, stride):
    at = tl.arange(0, 64)[:, None] * stride + tl.arange(0, 64)[None, :]
    tl.store(out_ptr + at, tl.load(x_ptr + at))
