"""Products of bf16 matrices on processors without instructions for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["float32_products"]


@contextlib.contextmanager
def float32_products() -> Iterator[None]:
    """Products of bf16 matrices on the CPU are computed in float32 here, and rounded to bf16.

    A processor with instructions for bf16 does the same; one without takes several times as long for a
    product in bf16 as in float32, and beside such a step nothing else shows.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", _mm, "CPU")
    library.impl("bmm", _bmm, "CPU")
    library.impl("addmm", _addmm, "CPU")
    library.impl("baddbmm", _baddbmm, "CPU")
    try:
        yield
    finally:
        del library  # with its last reference torch has its own again


# Through `out`, whose operators are others and torch's own still. Other dtypes than bf16 stay as they are.


def _mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    product = _empty(left, left.shape[0], right.shape[1])
    return torch.mm(_wide(left), _wide(right), out=product).to(left.dtype)


def _bmm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    product = _empty(left, *left.shape[:2], right.shape[2])
    return torch.bmm(_wide(left), _wide(right), out=product).to(left.dtype)


def _addmm(added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, **factors: float) -> torch.Tensor:
    total = _empty(left, left.shape[0], right.shape[1])
    return torch.addmm(_wide(added), _wide(left), _wide(right), **factors, out=total).to(left.dtype)


def _baddbmm(added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, **factors: float) -> torch.Tensor:
    total = _empty(left, *left.shape[:2], right.shape[2])
    return torch.baddbmm(_wide(added), _wide(left), _wide(right), **factors, out=total).to(left.dtype)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def _empty(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return like.new_empty(shape, dtype=torch.float32 if like.dtype == torch.bfloat16 else like.dtype)
