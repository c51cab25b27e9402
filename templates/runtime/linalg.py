"""Products of matrices and lookups of rows: hand-written kernels under the contract of all ops.

    from generated.runtime.linalg import linear

    y = linear(x, weight, bias)    # [..., I], [O, I], [O] -> [..., O]

Tensors may have any strides: a transposed or sliced view is read where it lies. Sums are taken in float32, of float64 in float64;
always in the same order, without atomics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .binding import call
from .linalg_ops import BatchedMatmul, Embedding, Linear

if TYPE_CHECKING:
    import torch

__all__ = ["BatchedMatmul", "Embedding", "Linear", "batched_matmul", "embedding", "linear"]


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, precision: str = "ieee"
) -> torch.Tensor:
    """x @ weight.T + bias, as torch.nn.functional.linear.

    Args:
        x: [..., I], f16, bf16, f32 or f64.
        weight: [O, I], of any of these dtypes: it is multiplied in the dtype of x.
        bias: [O], may be absent.
        precision: of products of float32: `ieee`, or `tf32`, which keeps 10 bits of each factor.

    Returns:
        [..., O], in the dtype of x; the gradients are in the dtypes of their tensors.

    Raises:
        TypeError, ValueError: on a wrong dtype, shape or device, naming the argument.
    """
    return call(Linear(precision=precision), {"x": x, "weight": weight, "bias": bias})


def batched_matmul(a: torch.Tensor, b: torch.Tensor, precision: str = "ieee") -> torch.Tensor:
    """a @ b for each matrix of a batch.

    Args:
        a: [..., M, K], f16, bf16, f32 or f64.
        b: [..., K, N], of the same dtype. The dims before the last two are those of `a`: expand what is to be broadcast.
        precision: of products of float32: `ieee`, or `tf32`, which keeps 10 bits of each factor.

    Returns:
        [..., M, N], in the dtype of the inputs.

    Raises:
        TypeError, ValueError: on a wrong dtype, shape or device, naming the argument.
    """
    return call(BatchedMatmul(precision=precision), {"a": a, "b": b})


def embedding(idx: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The rows of `weight` that `idx` names, as torch.nn.functional.embedding.

    Args:
        idx: [...], i32 or i64, each in 0 to V - 1. One that is out of range gives NaN and no gradient.
        weight: [V, D], f16, bf16, f32 or f64.

    Returns:
        [..., D], in the dtype of `weight`.

    Raises:
        TypeError, ValueError: on a wrong dtype, shape or device, naming the argument.
    """
    return call(Embedding(), {"idx": idx, "weight": weight})
