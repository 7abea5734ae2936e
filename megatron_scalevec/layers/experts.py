"""Routed experts whose scale vectors all experts of a layer have in common.

Where every expert has its own, they are the expert's linear's own and nothing here takes part. Shared ones
belong to the module that runs the local experts. Each rank's gradient is a part of the whole: it covers the
experts, rows and tokens of that rank. Expert-parallel and expert-tensor-parallel ranks are data- or
tensor-parallel ranks of the rest of the model, so the parts are complete after the sum over the
tensor-parallel group of the dense layers (here) and the ordinary data-parallel reduction (Megatron's): the
vectors are no expert parameters, and ``allreduce`` stays true.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from megatron_scalevec.layers import common
from megatron_scalevec.layers.linear import FoldedLinear
from megatron_scalevec.vectors import compose_vector, keep_dtype

__all__ = ["HoldsVectors", "ScaleVecExperts", "hold_vectors", "share_vectors"]


class HoldsVectors:
    """Mixin over ``SequentialMLP`` and ``TEGroupedMLP``: owns the vectors of its experts' linears."""

    class_prefix = "VectorHolding"
    scalevec_tp_group: Any  # of the dense layers

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """The base class's and the shared vectors, under the same keys for every kind of experts."""
        return {
            **super().sharded_state_dict(prefix, sharded_offsets, metadata),
            **common.sharded_vectors(self, prefix, sharded_offsets, metadata, self.scalevec_tp_group),
        }


class ScaleVecExperts(HoldsVectors):
    """Mixin over ``SequentialMLP`` and ``TEGroupedMLP``: lends its vectors to the experts' linears."""

    class_prefix = "ScaleVec"
    scalevec_borrowers: tuple[FoldedLinear, ...] = ()
    scalevec_lends: tuple[str, ...] = ()
    scalevec_fed: tuple[str | None, ...] = ()  # input vectors of those of its linears that a norm feeds

    def forward(self, *args, **kwargs):
        """As the base class's."""
        with self.lending():
            return super().forward(*args, **kwargs)

    @contextlib.contextmanager
    def lending(self) -> Iterator[None]:
        """Let the linears of the experts form W_eff meanwhile."""
        names = self.scalevec_lends
        vectors = [compose_vector(self, name) for name in names]
        summed = common.sum_gradient_over_tensor_parallel(torch.cat(vectors), self.scalevec_tp_group)
        gammas = dict(zip(names, summed.split([vector.numel() for vector in vectors])))
        for linear in self.scalevec_borrowers:
            linear.lend(gammas)
        try:
            yield
        finally:
            for linear in self.scalevec_borrowers:
                linear.lend(None)

    def input_vectors(self) -> list[str | None]:
        """As of :meth:`megatron_scalevec.layers.linear.FoldedLinear.input_vectors`."""
        return list(self.scalevec_fed)

    def _apply(self, fn, recurse=True):
        keep_dtype(self, lambda: super(ScaleVecExperts, self)._apply(fn, recurse))
        return self


def hold_vectors(experts: torch.nn.Module, tp_group: Any) -> None:
    """Let ``experts`` own vectors of its linears, whose weights the optimizer folds.

    Args:
        experts: A ``SequentialMLP`` or ``TEGroupedMLP``, made a :class:`HoldsVectors` or not.
        tp_group: Tensor-parallel group of the dense layers.
    """
    if not isinstance(experts, HoldsVectors):
        experts.__class__ = common.mixed_class(HoldsVectors, type(experts))
        experts.scalevec_tp_group = tp_group


def share_vectors(experts: torch.nn.Module, linears: list[FoldedLinear], tp_group: Any) -> None:
    """Make ``experts`` lend vectors to more of its linears.

    Args:
        experts: A ``SequentialMLP`` or ``TEGroupedMLP``, made a :class:`ScaleVecExperts` or not.
        linears: Its linears of one kind (all fc1, all fc2), converted with ``borrows``.
        tp_group: Tensor-parallel group of the dense layers.
    """
    if not isinstance(experts, ScaleVecExperts):
        experts.__class__ = common.mixed_class(ScaleVecExperts, type(experts))
        experts.scalevec_tp_group = tp_group
    experts.scalevec_borrowers = (*experts.scalevec_borrowers, *linears)
    experts.scalevec_lends = (*experts.scalevec_lends, *linears[0].vector_names())
