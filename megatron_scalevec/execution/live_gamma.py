"""γ of norms, composed once per step instead of once per microbatch.

A γ that no weight absorbs stays with its norm. Where the optimizer folds, the norm takes it from a tensor
that is written when live weights are, from the masters as the model gets them. In the backward pass γ's
gradient goes out as the gradient of the one stored part that has γ's size. On its way to the optimizer it is
accumulated, reduced and scaled like any other, all of which is linear; there the chain rule makes of it the
parts' gradients, for all norms at once.

A model that is evaluated composes γ from its stored parts all the same: whoever puts other weights into
the parameters for a while (averages of weights, the best ones so far) tells nobody, and gets the function
of these. So does a copy of a model, which no optimizer writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.execution.folds import Vector
from megatron_scalevec.execution.members import Member
from megatron_scalevec.execution.vector_set import VectorSet, differ
from megatron_scalevec.reparam import get_reparameterization
from megatron_scalevec.vectors import compose_vector, vector_parts

__all__ = [
    "NormSet",
    "drop_live_gamma",
    "has_live_gamma",
    "live_gamma",
    "move_live_gamma",
    "renew_from_parts",
    "takes_live_gamma",
]

_ATTRIBUTE = "scalevec_live_gamma"


class NormSet(VectorSet):
    """Vectors of norms, stepped by one member, whose gradients are sums over one group.

    Args:
        vectors: One per norm.
        member: Who steps their stored parts.
        group: Tensor-parallel ranks each of which sees other heads, where nobody else sums; or None.
    """

    def __init__(self, vectors: Sequence[Vector], member: Member, group: Any) -> None:
        own = [(v, _carrier(v.owner, v.name)) for v in vectors]
        super().__init__(vectors, own[0][1].device, member)
        self.group = group
        self.live = torch.zeros_like(self.table.flat_gamma, dtype=own[0][1].dtype)
        held = [(self.table.begins[v], member.shards[part]) for v, part in own if part in member.shards]
        self._carried = [shard for _, shard in held]
        sums = self.table.flat_sums
        self._sums = [sums[begin + shard.start : begin + shard.stop] for begin, shard in held]
        self._given = {vector.owner: _LiveGamma(self._view(vector)) for vector in vectors}
        for norm, live in self._given.items():
            norm.__dict__[_ATTRIBUTE] = live

    def _view(self, vector: Vector) -> torch.Tensor:
        begin = self.table.begins[vector]
        return self.live[begin : begin + vector.size]

    def compose(self) -> None:
        """γ from the values as the model has them: what the norm would compose by itself."""
        if self.live.dtype != torch.float32:
            self.table.flat_values.copy_(self.table.flat_values.to(self.live.dtype))
        super().compose()

    def split(self) -> None:
        """What came as the gradient of one part is γ's: the masters get those of all parts.

        Raises:
            ScaleVecError: γ is not what the masters compose to.
        """
        self.gather()
        self.check()
        sums = self.table.flat_sums.zero_()
        if self._sums:
            torch._foreach_copy_(self._sums, [shard.gradient for shard in self._carried])
        self.complete(sums)
        self.hand_out()

    def complete(self, sums: torch.Tensor) -> None:
        """From shards, of which each element has one owner, and from the heads of other ranks."""
        for group in (self.vectors.group, self.group):
            if group is not None:
                dist.all_reduce(sums, group=group)

    def check(self) -> None:
        """Look whether γ is what its masters compose to, and the stored parts are the masters'.

        Raises:
            ScaleVecError: Somebody has changed one without the other, or moved a norm.
        """
        if any(norm.__dict__.get(_ATTRIBUTE) is not live for norm, live in self._given.items()):
            raise ScaleVecError(
                "a norm was moved to another device or dtype after the optimizer was set up, or another one "
                "was set up since, so its scale would not follow this one; set the optimizer up on the model "
                "as it is to be trained."
            )
        expected = self.table.flat_gamma.to(self.live.dtype)
        if torch.stack([differ(self.live, expected), self.stored_differ()]).any():
            raise ScaleVecError(
                "the scale of a norm is not what the optimizer's masters of its scale vector come to: "
                "something has changed a vector or the optimizer's state alone. After changing the model "
                "from outside call optimizer.reload_model_params()."
            )

    def write(self) -> None:
        """γ from the masters."""
        self.gather()
        self.live.copy_(self.table.flat_gamma)
        self.written = True


class _LiveGamma:
    """A norm's γ, where the norm holds it. In a copy of the norm, pickled or not, nothing is in its place."""

    def __init__(self, gamma: torch.Tensor, written: _LiveGamma | None = None) -> None:
        self.gamma = gamma
        self.written = written or self
        """What the optimizer writes: another one, where the norm was moved since."""

    def __deepcopy__(self, memo: dict) -> None:
        return None

    def __reduce__(self) -> tuple[type, tuple]:
        return type(None), ()


class _Carried(torch.autograd.Function):
    """γ forward; its gradient to the carrier, zeros to the other parts, which Megatron waits for."""

    @staticmethod
    def forward(ctx: Any, gamma: torch.Tensor, carrier: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.others = [other.shape for other in others]
        return gamma.view_as(gamma)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, gradient, *map(gradient.new_zeros, ctx.others)


def _carrier(owner: torch.nn.Module, name: str) -> torch.nn.Parameter:
    """The stored part with one entry per channel."""
    kind, parts = vector_parts(owner, name)
    [suffix] = [part.suffix for part in get_reparameterization(kind).parts if not part.scalar]
    return parts[suffix]


def has_live_gamma(norm: torch.nn.Module) -> bool:
    """Whether an optimizer composes the norm's γ."""
    return norm.__dict__.get(_ATTRIBUTE) is not None


def takes_live_gamma(norm: torch.nn.Module, name: str) -> bool:
    """Whether a forward pass takes it: in training, and where a gradient is to come, which must be γ's."""
    if not has_live_gamma(norm):
        return False
    if norm.training:
        return True
    return torch.is_grad_enabled() and any(
        part.requires_grad for part in vector_parts(norm, name)[1].values()
    )


def live_gamma(norm: torch.nn.Module, name: str) -> torch.Tensor:
    """γ [n] in the stored parts' dtype as last written; for a norm that :func:`has_live_gamma`."""
    carrier = _carrier(norm, name)
    others = [part for part in vector_parts(norm, name)[1].values() if part is not carrier]
    return _Carried.apply(norm.__dict__[_ATTRIBUTE].gamma, carrier, *others)


@torch.no_grad()
def renew_from_parts(norm: torch.nn.Module, name: str) -> None:
    """The stored parts have been loaded, without the optimizer's masters or before them."""
    if has_live_gamma(norm):
        norm.__dict__[_ATTRIBUTE].gamma.copy_(compose_vector(norm, name))


def move_live_gamma(norm: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The norm is moved or cast, as by ``Module._apply``. Where that changes γ, no optimizer writes it."""
    if has_live_gamma(norm):
        before = norm.__dict__[_ATTRIBUTE]
        moved = fn(before.gamma)
        if moved is not before.gamma:
            written = before.written
            back = (moved.dtype, moved.device) == (written.gamma.dtype, written.gamma.device)
            norm.__dict__[_ATTRIBUTE] = written if back else _LiveGamma(moved, written)


def drop_live_gamma(norm: torch.nn.Module) -> None:
    """The vector is taken away."""
    norm.__dict__.pop(_ATTRIBUTE, None)
