"""Vectors whose masters lie in one member of an optimizer: their values, and the way back of gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_scalevec.execution.folds import Vector
from megatron_scalevec.execution.members import Member
from megatron_scalevec.execution.table import VectorTable

__all__ = ["VectorSet", "differ"]


def differ(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Whether values in the model's dtype are others than expected, as a bool []; NaN is equal to itself."""
    # Right is also what differs by the last digit: a vector alone may have its squares summed otherwise.
    tolerance = max(2 * torch.finfo(expected.dtype).eps, 1e-5)
    return ~torch.isclose(found, expected, rtol=tolerance, atol=0.0, equal_nan=True).all()


class VectorSet:
    """Vectors and the optimizers of their masters.

    Attributes:
        table: Values, γ and gradients of the vectors.
        vectors: Who steps them.
        written: Whether what the vectors lead to has been written since the step.
        waiting: Optimizers (by ``id``) that have not stepped yet.
    """

    def __init__(
        self, vectors: Sequence[Vector], device: torch.device, member: Member, *others: Member
    ) -> None:
        """``others``: who must have stepped as well before anything is written."""
        self.vectors = member
        self.table = VectorTable(vectors, device)
        self._stepping = [optimizer for each in (*others, member) for optimizer in each.optimizers]
        own = [(param, member.shards[param]) for param in self.table.values if param in member.shards]
        self._masters = [shard for _, shard in own]
        self._places = [self.table.values[param][shard.start : shard.stop] for param, shard in own]
        self._gradients = [self.table.gradients[param][shard.start : shard.stop] for param, shard in own]
        self._stored = torch.empty_like(self.table.flat_values, dtype=next(iter(self.table.values)).dtype)
        begins = [self.table.values[param].storage_offset() for param, _ in own]
        self._stored_here = [
            self._stored[begin + shard.start : begin + shard.stop] for begin, (_, shard) in zip(begins, own)
        ]
        self.written = False
        self.waiting: set[int] = set()
        self.expect_step()

    def expect_step(self) -> None:
        """The optimizers are about to step."""
        self.written = False
        self.waiting = {id(optimizer) for optimizer in self._stepping}

    def gather(self) -> None:
        """The vectors' values from their masters: nothing of an earlier gathering is used again."""
        if self.vectors.group is not None:
            self.table.flat_values.zero_()
        if self._places:
            torch._foreach_copy_(self._places, [shard.master for shard in self._masters])
        if self.vectors.group is not None:
            # Every element has one owner, so this sum adds zeros to it: it is exact.
            dist.all_reduce(self.table.flat_values, group=self.vectors.group)
        self.compose()

    def stored_differ(self) -> torch.Tensor:
        """Whether this rank's stored parts are not those of the gathered masters, as a bool []."""
        expected = self.table.flat_values.to(self._stored.dtype)
        self._stored.copy_(expected)
        if self._stored_here:  # on this rank; the others look at theirs
            torch._foreach_copy_(self._stored_here, [shard.live for shard in self._masters])
        return differ(self._stored, expected)

    def compose(self) -> None:
        """γ from the values."""
        self.table.compose()

    def hand_out(self) -> None:
        """Masters get the gradients of the stored parts, by the chain rule from those of γ in the table."""
        self.table.chain()
        if self._gradients:
            torch._foreach_copy_([shard.gradient for shard in self._masters], self._gradients)
