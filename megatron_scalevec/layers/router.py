"""Weights that every tensor-parallel rank holds whole: the router's, and the gate of shared experts.

They are plain parameters of a module that does more than one product, so W_eff stands in the parameter's
place for as long as the module's own code runs. What the ranks compute with them is the same on all of them,
or differs by the tokens (sequence parallelism); either way a vector's gradient is complete where the
weight's is, and the vectors copy the weight's ``sequence_parallel``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from megatron_scalevec.execution.folds import register_fold
from megatron_scalevec.fold import fold_weight, whole_row_map
from megatron_scalevec.layers import common
from megatron_scalevec.layers.linear import add_vectors, gamma_name
from megatron_scalevec.vectors import compose_vector, keep_dtype

__all__ = [
    "FoldedReplicated",
    "ScaleVecSharedExpertMLP",
    "ScaleVecTopKRouter",
    "VectorHoldingSharedExpertMLP",
]


class FoldedReplicated(common.Folded):
    """Mixin: a module with one replicated weight [rows, hidden] that is a branch of its own.

    Behind Megatron's class, which is an abstract base class: with another one in front, Python would not let
    a built object change its class. So the subclasses themselves override what they must.
    """

    scaled: ClassVar[str]  # the weight's name
    holder: ClassVar[type | None] = None  # the class of a module with vectors whose weight is W_eff already
    _scalevec_gammas: tuple[str | None, str | None] = (None, None)

    def scaled_weights(self) -> list[torch.nn.Parameter]:
        """As the base class says; W_eff may stand in the weight's place."""
        return [self._parameters[self.scaled]]

    @classmethod
    def convert(
        cls,
        module: torch.nn.Module,
        branch: str,
        *,
        site: str,
        layer: int,
        in_branches: list[str],
        out_branches: list[str],
        initial_gamma_in: torch.Tensor,
        reparam: str,
        dtype: torch.dtype | None,
        in_optimizer: bool = False,
    ) -> None:
        """Give ``module`` its scale vectors: γ_in [hidden], γ_out [rows], where the branch is listed.

        Arguments as of :meth:`megatron_scalevec.layers.linear.FoldedLinear.convert`.
        """
        weight = getattr(module, cls.scaled)
        row_map = whole_row_map(branch, weight.shape[0])
        what: dict[str, Any] = {
            "site": site,
            "layer": layer,
            "in_branches": in_branches,
            "out_branches": out_branches,
            "initial_gamma_in": initial_gamma_in,
            "reparam": reparam,
            "dtype": dtype,
            "like": weight,
            "holder": "replicated",
            "summed_by_megatron": True,
        }
        gammas = (
            gamma_name("in", branch) if in_branches else None,
            gamma_name("out", branch) if out_branches else None,
        )
        if in_optimizer:
            module.__class__ = cls.holder or type(module)
            add_vectors(module, row_map, **what)
            # Every rank has the whole gradient of the weight by the time of the step.
            register_fold(module, row_map, inner=gammas[:1], outer=gammas[1:], weight_name=cls.scaled)
            return
        module.__class__ = cls
        for name in ("branch_of_row", "slot_of_row"):
            module.register_buffer(
                f"scalevec_{name}", getattr(row_map, name).to(weight.device), persistent=False
            )
        module._scalevec_gammas = gammas
        add_vectors(module, row_map, **what)

    def input_vectors(self) -> list[str | None]:
        """As of :meth:`megatron_scalevec.layers.linear.FoldedLinear.input_vectors`."""
        return [self._scalevec_gammas[0]]

    def folded_weight(self) -> torch.Tensor:
        """W_eff, shaped as the weight."""
        gamma_in, gamma_out = (
            None if name is None else compose_vector(self, name) for name in self._scalevec_gammas
        )
        return fold_weight(
            self._parameters[self.scaled],
            None if gamma_in is None else gamma_in[None],
            gamma_out,
            self.scalevec_branch_of_row,
            self.scalevec_slot_of_row,
        )

    @contextlib.contextmanager
    def _folded(self) -> Iterator[None]:
        # An instance's own attributes come before torch's look-up of parameters.
        self.__dict__[self.scaled] = self.folded_weight()
        try:
            yield
        finally:
            del self.__dict__[self.scaled]


class ScaleVecTopKRouter(TopKRouter, FoldedReplicated):
    """``TopKRouter`` with scale vectors: γ_in on the tokens' channels, γ_out on the experts' logits."""

    scaled = "weight"

    def gating(self, input):
        """Logits, multiplying by W_eff; a bias is added after γ_out."""
        with self._folded():
            return super().gating(input)

    def _apply(self, fn, recurse=True):
        keep_dtype(self, lambda: super(ScaleVecTopKRouter, self)._apply(fn, recurse))
        return self


class VectorHoldingSharedExpertMLP(SharedExpertMLP):
    """``SharedExpertMLP`` that holds the vectors of its gate, whose weight is W_eff."""

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """The base class's and the gate's vectors."""
        return {
            **super().sharded_state_dict(prefix, sharded_offsets, metadata),
            **common.sharded_vectors(self, prefix, sharded_offsets, metadata, self.tp_group),
        }


class ScaleVecSharedExpertMLP(SharedExpertMLP, FoldedReplicated):
    """``SharedExpertMLP`` whose gate has scale vectors; those of its linears are the linears' own."""

    scaled = "gate_weight"
    holder = VectorHoldingSharedExpertMLP

    def forward(self, hidden_states):
        """As the base class's, with W_eff for the gate."""
        with self._folded():
            return super().forward(hidden_states)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """The base class's and the gate's vectors."""
        return {
            **super().sharded_state_dict(prefix, sharded_offsets, metadata),
            **common.sharded_vectors(self, prefix, sharded_offsets, metadata, self.tp_group),
        }

    def _apply(self, fn, recurse=True):
        keep_dtype(self, lambda: super(ScaleVecSharedExpertMLP, self)._apply(fn, recurse))
        return self
