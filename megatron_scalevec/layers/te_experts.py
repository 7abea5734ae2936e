"""TransformerEngine's grouped linears: one module that multiplies for all local experts.

``weight0`` to ``weightN`` are the experts' weights. The forward pass asks ``_get_weight_tensors`` once for
what it multiplies by and passes the list into one autograd function, so W_eff of every expert in the
weights' places is all there is to do, as for the other linears (:mod:`megatron_scalevec.layers.te`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelGroupedLinear,
    TERowParallelGroupedLinear,
)
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)

from megatron_scalevec.fold import RowMap
from megatron_scalevec.layers import common, te
from megatron_scalevec.layers.linear import FoldedLinear, add_vectors
from megatron_scalevec.vectors import vector_info

__all__ = [
    "GROUPED_LEAVES",
    "ScaleVecTEColumnParallelGroupedLinear",
    "ScaleVecTERowParallelGroupedLinear",
    "grouped_leaf",
]

_TAKES_WEIGHTS = "_get_weight_tensors"

_OBSTACLES: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        lambda linear: not callable(getattr(linear, _TAKES_WEIGHTS, None)),
        f"has no method {_TAKES_WEIGHTS}, through which scale vectors reach TransformerEngine's kernels; "
        "install transformer-engine 2.20, with which this was written",
    ),
    (
        lambda linear: (
            getattr(linear, "weight0", None) is None or getattr(linear, "weight", None) is not None
        ),
        "holds the weights of all experts as one parameter; drop --moe-single-grouped-weight",
    ),
    (
        lambda linear: type(linear.weight0) is not torch.nn.Parameter,
        "holds quantized weights; train with bf16 weights",
    ),
    *te.OBSTACLES_OF_ANY_KIND,
)
"""What makes a grouped linear unfit, and what is said then."""


class _HoldsVectors(te.HidesVectors):
    """Mixin over a grouped linear that holds its experts' vectors, whoever forms W_eff. A vector of expert i
    is stored as ``<name>_<i>``, i counting from 0 on every rank."""

    class_prefix = "VectorHolding"

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Megatron's entries, which are the experts' weights one by one, and those of the vectors."""
        found = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        found.update(self._sharded_vectors(prefix, sharded_offsets, metadata))
        return found

    def _sharded_vectors(self, prefix: str, sharded_offsets: tuple, metadata: dict | None) -> dict[str, Any]:
        """Every expert's vectors with the expert axis that Megatron gives the weights, and without the
        expert's index in the key: as ``SequentialMLP`` has them."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        groups = self._pg_collection
        first = groups.ep.rank() * self.num_gemms
        number = groups.ep.size() * self.num_gemms
        own = {n: p for n, p in self.named_parameters(recurse=False) if vector_info(p) is not None}
        found = {}
        for name, parameter in own.items():
            local, key = _split_name(name)
            expert = first + local
            if metadata.get("singleton_local_shards", False):
                path, offsets = f"{expert}.{prefix}", sharded_offsets
            else:
                path, offsets = prefix, (*sharded_offsets, (len(sharded_offsets), expert, number))
            [entry] = make_sharded_tensors_for_checkpoint(
                {key: parameter},
                path,
                {},
                offsets,
                tp_group=self._tp_group,
                dp_cp_group=metadata["dp_cp_group"],
            ).values()
            entry.replica_id = (*entry.replica_id[:2], groups.expt_dp.rank())
            found[f"{prefix}{name}"] = entry
        return found


class _TEGroupedFolded(_HoldsVectors, FoldedLinear):
    """What the two have in common."""

    main_grad_flag = "fuse_wgrad_accumulation"
    _weights_were_taken = False

    @staticmethod
    def weights_of(linear):
        """As the base class says: a weight per local expert."""
        return {f"weight{expert}": f"_{expert}" for expert in range(linear.num_gemms)}

    @classmethod
    def _fold_in_optimizer(cls, linear, row_map, in_branches, out_branches, lender, groups):
        super()._fold_in_optimizer(linear, row_map, in_branches, out_branches, lender, groups)
        if lender is None:
            linear.__class__ = common.mixed_class(_HoldsVectors, type(linear))

    def scaled_weights(self) -> list[torch.nn.Parameter]:
        """One per local expert."""
        return [getattr(self, f"weight{expert}") for expert in range(self.num_gemms)]

    @staticmethod
    def group_of(linear):
        """Megatron's expert-tensor-parallel group; TransformerEngine is told of none."""
        return linear._tp_group

    @staticmethod
    def require_convertible(path, linear):
        """As the base class says; :data:`_OBSTACLES` lists what stands in the way."""
        te.refuse_obstacles(_OBSTACLES, path, linear)

    @staticmethod
    def _add_own(linear: torch.nn.Module, row_map: RowMap, **what: Any) -> None:
        for expert in range(linear.num_gemms):
            add_vectors(
                linear,
                row_map,
                like=getattr(linear, f"weight{expert}"),
                rename=lambda name, expert=expert: f"{name}_{expert}",
                **what,
            )

    def input_vectors(self) -> list[str | None]:
        """As the base class says, of every local expert."""
        return [
            None if name is None else f"{name}_{expert}"
            for name in super().input_vectors()
            for expert in range(self.num_gemms)
        ]

    def folded_weights(self) -> list[torch.Tensor]:
        """W_eff of every local expert."""
        names, weights = self.vector_names(), self.scaled_weights()
        if self.scalevec_borrows:
            return [self._fold(weight, self._vectors(names, names)) for weight in weights]
        keys = [(name, expert) for expert in range(self.num_gemms) for name in names]
        found = self._vectors(keys, [f"{name}_{expert}" for name, expert in keys])
        return [
            self._fold(weight, {name: found[name, expert] for name in names})
            for expert, weight in enumerate(weights)
        ]

    def _get_weight_tensors(self):
        self.__dict__["_weights_were_taken"] = True
        return self.folded_weights()

    def forward(self, *args, **kwargs):
        """As TransformerEngine's, multiplying by W_eff.

        Raises:
            RuntimeError: The forward pass did not take its weights where this class hands out W_eff.
        """
        self.__dict__["_weights_were_taken"] = False
        result = super().forward(*args, **kwargs)
        if not self._weights_were_taken:
            raise RuntimeError(
                f"the installed TransformerEngine does not take its weights through {_TAKES_WEIGHTS}, so the "
                "scale vectors had no effect; the run was stopped. Install transformer-engine 2.20, or drop "
                "--moe-grouped-gemm."
            )
        return result


def _split_name(name: str) -> tuple[int, str]:
    """``gamma_in_expert_up_12_alpha`` to (12, ``gamma_in_expert_up_alpha``)."""
    words = name.split("_")
    at = next(index for index, word in enumerate(words) if word.isdecimal())
    return int(words[at]), "_".join(words[:at] + words[at + 1 :])


class ScaleVecTEColumnParallelGroupedLinear(_TEGroupedFolded, TEColumnParallelGroupedLinear):
    """``TEColumnParallelGroupedLinear`` with scale vectors."""

    parallel = "column"


class ScaleVecTERowParallelGroupedLinear(_TEGroupedFolded, TERowParallelGroupedLinear):
    """``TERowParallelGroupedLinear`` with scale vectors."""

    parallel = "row"


GROUPED_LEAVES: dict[type, type[FoldedLinear]] = {
    TEColumnParallelGroupedLinear: ScaleVecTEColumnParallelGroupedLinear,
    TERowParallelGroupedLinear: ScaleVecTERowParallelGroupedLinear,
}
"""Megatron's grouped classes to ours."""


def grouped_leaf(linear: torch.nn.Module) -> type[FoldedLinear] | None:
    """Our class for a grouped linear, converted or not; None where there is none."""
    classes = type(linear).__mro__ if isinstance(linear, _HoldsVectors) else (type(linear),)
    return next((GROUPED_LEAVES[cls] for cls in classes if cls in GROUPED_LEAVES), None)
