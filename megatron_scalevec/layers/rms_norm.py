"""RMSNorm over the last axis on a CPU, in few passes over memory.

torch has a kernel for it on CUDA alone. Elsewhere it puts the norm together from a dozen operations, and the
backward pass from twice as many, each with a new tensor in float32. Here the operations go over some rows at
a time, in the same few pieces of memory, which stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

__all__ = ["rms_norm"]

_ELEMENTS = 1 << 17  # of a piece: as few calls as the cache allows


def rms_norm(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    """``scale ⊙ x / sqrt(mean(x²) + eps)``, computed at least in float32 and rounded once.

    As ``torch.nn.functional.rms_norm(x, scale.shape, scale, eps)``; can be differentiated once.

    Args:
        x: [..., n].
        scale: [n].
        eps: Added to the mean square.

    Returns:
        [..., n] in the dtype of ``x``.
    """
    return _RMSNorm.apply(x, scale, eps)


def _pieces(rows: int, size: int) -> Iterator[slice]:
    most = max(1, _ELEMENTS // size)
    return (slice(first, min(first + most, rows)) for first in range(0, rows, most))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
        size = x.shape[-1]
        flat = x.reshape(-1, size)
        rows, wide = len(flat), torch.promote_types(x.dtype, torch.float32)
        wide_scale = scale.to(wide)
        out = torch.empty_like(flat)
        inverse = torch.empty(rows, 1, dtype=wide)
        offset = torch.full((), eps, dtype=wide)
        scratch = torch.empty(min(rows, max(1, _ELEMENTS // size)), size, dtype=wide)
        for piece in _pieces(rows, size):
            own, factor = scratch[: piece.stop - piece.start], inverse[piece]
            own.copy_(flat[piece])
            torch.linalg.vector_norm(own, dim=-1, keepdim=True, out=factor)
            torch.addcmul(offset, factor, factor, value=1 / size, out=factor).rsqrt_()
            out[piece] = own.mul_(factor).mul_(wide_scale)
        ctx.save_for_backward(flat, scale, inverse)
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        # With r = 1 / sqrt(mean(x²) + eps) of each row, h = g ⊙ scale and means over the last axis:
        # dx = r h - x r³ mean(h x), dscale = Σ_rows g x r.
        flat, scale, inverse = ctx.saved_tensors
        rows, size = flat.shape
        wide_scale = scale.to(inverse.dtype)
        incoming = gradient.reshape(rows, size)
        into_x = torch.empty_like(incoming)
        into_scale = torch.zeros_like(wide_scale)
        weights = inverse.pow(3).div_(-size)
        room = (3, min(rows, max(1, _ELEMENTS // size)), size)
        scratch = torch.empty(room, dtype=inverse.dtype)
        for piece in _pieces(rows, size):
            x, g, product = scratch[:, : piece.stop - piece.start]
            x.copy_(flat[piece])
            g.copy_(incoming[piece])
            torch.mul(g, x, out=product)
            into_scale.addmv_(product.t(), inverse[piece, 0])
            share = torch.mv(product, wide_scale)[:, None].mul_(weights[piece])
            torch.mul(inverse[piece], wide_scale, out=product)
            into_x[piece] = g.mul_(product).addcmul_(x, share)
        return into_x.view(gradient.shape), into_scale.to(scale.dtype), None
