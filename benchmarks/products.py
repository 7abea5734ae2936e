"""Products of bf16 matrices on processors without instructions for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

__all__ = ["float32_products"]


@contextlib.contextmanager
def float32_products() -> Iterator[None]:
    """Products of bf16 matrices on the CPU are computed in float32 here, and rounded to bf16.

    A processor with instructions for bf16 does the same; one without takes several times as long for a
    product in bf16 as in float32, and beside such a step nothing else shows.
    """
    library = torch.library.Library("aten", "IMPL")
    for name in ("mm", "bmm", "addmm", "baddbmm"):
        library.impl(name, _in_float32(getattr(torch, name)), "CPU")
    try:
        yield
    finally:
        del library  # with its last reference torch has its own again


def _in_float32(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Through ``out``, another operator and torch's own still; other dtypes than bf16 stay as they are."""

    def computed(*operands: torch.Tensor, **factors: float) -> torch.Tensor:
        dtype = operands[-1].dtype
        wide = torch.float32 if dtype == torch.bfloat16 else dtype
        out = torch.empty(0, dtype=wide)
        return product(*(operand.to(wide) for operand in operands), **factors, out=out).to(dtype)

    return computed
