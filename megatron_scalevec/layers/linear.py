"""A column-parallel linear whose rows and columns are scaled branch by branch."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.fold import RowMap, fold_weight
from megatron_scalevec.vectors import VectorInfo, add_vector

__all__ = ["ScaleVecColumnParallelLinear", "gamma_name", "sum_gradient_over_tensor_parallel"]


def gamma_name(side: str, branch: str) -> str:
    """Name of the parameter: ``gamma_in_q``, ``gamma_out_gate``."""
    return f"gamma_{side}_{branch}"


def sum_gradient_over_tensor_parallel(vectors: torch.Tensor, group) -> torch.Tensor:
    """Identity whose backward sums the gradient over the tensor-parallel group.

    Each rank folds a complete vector into its own rows, so each rank's gradient is a partial sum, with
    sequence parallelism and without. None of the attributes that Megatron offers for norms covers the
    case without.
    """
    return copy_to_tensor_model_parallel_region(vectors, group=group)


class ScaleVecColumnParallelLinear(ColumnParallelLinear):
    """``ColumnParallelLinear`` with scale vectors in its weight.

    ``weight`` keeps its name, shape and attributes; the vectors are further parameters
    (:func:`gamma_name`). A checkpoint holds them as replicated tensors through the inherited
    ``sharded_state_dict``. Never built directly: :meth:`convert` changes a built linear in place.
    """

    @classmethod
    def convert(
        cls,
        linear: ColumnParallelLinear,
        config: ScaleVecConfig,
        row_map: RowMap,
        *,
        site: str,
        layer: int,
        initial_gamma_in: torch.Tensor | None,
    ) -> None:
        """Give ``linear`` its scale vectors.

        Args:
            linear: A plain ``ColumnParallelLinear`` that owns its weight.
            config: What to build.
            row_map: For this rank's rows.
            site: ``attention`` or ``mlp``.
            layer: Megatron's layer number.
            initial_gamma_in: [hidden] start value of every branch's γ_in, None where γ_in stays in the
                norm. Output scales start at one.
        """
        linear.__class__ = cls
        # Its backward writes into ``weight.main_grad``, and W_eff is not the parameter.
        linear.gradient_accumulation_fusion = False
        linear.scalevec_branches = row_map.branches
        device = linear.weight.device
        for name in ("branch_of_row", "slot_of_row"):
            rows = getattr(row_map, name).to(device)
            linear.register_buffer(f"scalevec_{name}", rows, persistent=False)
        for branch, size in zip(row_map.branches, row_map.sizes):
            if initial_gamma_in is not None:
                info = VectorInfo(site, branch, "in", layer, "linear")
                add_vector(linear, gamma_name("in", branch), initial_gamma_in, info, "input")
            if config.has_output_scales:
                info = VectorInfo(site, branch, "out", layer, "linear")
                add_vector(linear, gamma_name("out", branch), torch.ones(size), info, "input")

    def folded_weight(self) -> torch.Tensor:
        """W_eff of this rank, [rows, hidden]; see :func:`megatron_scalevec.fold.fold_weight`."""
        sides = [side for side in ("in", "out") if self._gammas(side)]
        vectors = [gamma for side in sides for gamma in self._gammas(side)]
        # One reduction for all vectors of the linear.
        summed = sum_gradient_over_tensor_parallel(torch.cat(vectors), self.tp_group)
        parts = summed.split([sum(g.numel() for g in self._gammas(side)) for side in sides])
        gammas = dict(zip(sides, parts))
        gamma_in = gammas.get("in")
        if gamma_in is not None:
            gamma_in = gamma_in.view(len(self.scalevec_branches), -1)
        return fold_weight(
            self.weight,
            gamma_in,
            gammas.get("out"),
            self.scalevec_branch_of_row,
            self.scalevec_slot_of_row,
        )

    def _gammas(self, side: str) -> list[torch.nn.Parameter]:
        names = [gamma_name(side, branch) for branch in self.scalevec_branches]
        return [getattr(self, name) for name in names if hasattr(self, name)]

    def forward(self, input_, weight=None, runtime_gather_output=None):
        """As ``ColumnParallelLinear.forward``, multiplying by W_eff.

        Raises:
            RuntimeError: A weight is passed in; whose scale vectors would apply is undefined.
        """
        if weight is not None:
            raise RuntimeError(
                "a linear with scale vectors was called with a weight from outside, which its scale "
                "vectors do not belong to"
            )
        return super().forward(
            input_, weight=self.folded_weight(), runtime_gather_output=runtime_gather_output
        )
