"""Kernels that apply one function of the runtime: what measures and tests run (Triton reads kernels from files)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unary(x, out, n, F: tl.constexpr, SHORT: tl.constexpr, BLOCK: tl.constexpr):
    """out = F(x); SHORT asks for the form whose results are stored in 16 bits."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i, mask=i < n, other=0.0)
    if SHORT:
        tl.store(out + i, F(a, True), mask=i < n)
    else:
        tl.store(out + i, F(a), mask=i < n)


@triton.jit
def binary(x, y, out, n, F: tl.constexpr, SHORT: tl.constexpr, BLOCK: tl.constexpr):
    """out = F(x, y)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i, mask=i < n, other=0.0)
    b = tl.load(y + i, mask=i < n, other=1.0)
    if SHORT:
        tl.store(out + i, F(a, b, True), mask=i < n)
    else:
        tl.store(out + i, F(a, b), mask=i < n)


@triton.jit
def single(x, out, F: tl.constexpr, ARITY: tl.constexpr):
    """One scalar: a value that is no block."""
    a = tl.load(x)
    if ARITY == 2:
        tl.store(out, F(a, tl.load(x + 1)))
    else:
        tl.store(out, F(a))


@triton.jit
def square_block(x, out, F: tl.constexpr, ARITY: tl.constexpr, SIDE: tl.constexpr):
    """A block of two dimensions; the second operand is a row that broadcasts."""
    row = tl.arange(0, SIDE)
    i = row[:, None] * SIDE + row[None, :]
    a = tl.load(x + i)
    if ARITY == 2:
        tl.store(out + i, F(a, tl.load(x + row)[None, :]))
    else:
        tl.store(out + i, F(a))


@triton.jit
def clamps(x, low, high, out, n, F: tl.constexpr, BLOCK: tl.constexpr):
    """out = F(x, low, high)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i, mask=i < n, other=0.0)
    b = tl.load(low + i, mask=i < n, other=0.0)
    c = tl.load(high + i, mask=i < n, other=0.0)
    tl.store(out + i, F(a, b, c), mask=i < n)


@triton.jit
def beside_number(x, out, F: tl.constexpr, FIRST: tl.constexpr, SIDE: tl.constexpr):
    """out = F(x, 2.5), or F(2.5, x): a number in the text of a kernel."""
    i = tl.arange(0, SIDE)
    if FIRST:
        tl.store(out + i, F(2.5, tl.load(x + i)))
    else:
        tl.store(out + i, F(tl.load(x + i), 2.5))
