"""RMSNorm over the last axis on a CPU, in few passes over memory.

torch has no kernel for it there: it puts the norm together from a dozen operations, and the backward pass
from twice as many, each with a new tensor in float32. Here the operations go over some rows at a time, in the
same few pieces of memory, which stay in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

__all__ = ["rms_norm"]

_ELEMENTS = 1 << 17  # of a piece, of which there are up to three in float32


def rms_norm(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    """``scale ⊙ x / sqrt(mean(x²) + eps)``, computed at least in float32 and rounded once.

    As ``torch.nn.functional.rms_norm(x, scale.shape, scale, eps)``; can be differentiated once.

    Args:
        x: [..., n].
        scale: [n], in any dtype.
        eps: Added to the mean square.

    Returns:
        [..., n] in the dtype of ``x``.
    """
    return _RMSNorm.apply(x, scale, eps)


def _rows_at_once(size: int) -> int:
    return max(1, _ELEMENTS // size)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
        size = x.shape[-1]
        flat, most = x.reshape(-1, size), _rows_at_once(size)
        wide_scale = scale.to(torch.promote_types(x.dtype, torch.float32))
        inverse, out = wide_scale.new_empty(len(flat), 1), x.new_empty(x.shape)
        offset = wide_scale.new_full((), eps)
        scratch = wide_scale.new_empty(min(len(flat), most), size)
        pieces = zip(*(tensor.split(most) for tensor in (flat, inverse, out.view(-1, size))))
        for given, factor, result in pieces:
            own = scratch[: len(given)].copy_(given)
            torch.linalg.vector_norm(own, dim=-1, keepdim=True, out=factor)
            torch.addcmul(offset, factor, factor, value=1 / size, out=factor).rsqrt_()
            result.copy_(own.mul_(factor).mul_(wide_scale))
        ctx.save_for_backward(flat, scale, inverse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        # With r = 1 / sqrt(mean(x²) + eps) of each row, h = g ⊙ scale and means over the last axis:
        # dx = r h - x r³ mean(h x), dscale = Σ_rows g x r.
        flat, scale, inverse = ctx.saved_tensors
        (rows, size), most = flat.shape, _rows_at_once(flat.shape[1])
        wide_scale = scale.to(inverse.dtype)
        incoming = gradient.reshape(rows, size)
        into_x, into_scale = incoming.new_empty(rows, size), torch.zeros_like(wide_scale)
        scratch = [inverse.new_empty(min(rows, most), size) for _ in range(3)]
        pieces = zip(*(tensor.split(most) for tensor in (flat, incoming, inverse, into_x)))
        for given, arriving, factor, result in pieces:
            x, g, product = (tensor[: len(given)] for tensor in scratch)
            x.copy_(given)
            g.copy_(arriving)
            torch.mul(g, x, out=product)
            into_scale.addmv_(product.t(), factor.view(-1))
            share = torch.mv(product, wide_scale).view(-1, 1).mul_(factor).mul_(factor).mul_(factor)
            torch.mul(factor, wide_scale, out=product)
            result.copy_(g.mul_(product).addcmul_(x, share, value=-1 / size))
        return into_x.view(gradient.shape), into_scale.to(scale.dtype), None
