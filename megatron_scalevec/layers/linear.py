"""Linears whose rows and columns are scaled branch by branch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from megatron_scalevec.decisions import SHARED
from megatron_scalevec.execution.folds import register_fold
from megatron_scalevec.fold import RowMap, fold_weight
from megatron_scalevec.layers import common
from megatron_scalevec.vectors import VectorInfo, add_vector, compose_vector, keep_dtype

__all__ = [
    "LEAVES",
    "SHARED",
    "FoldedLinear",
    "ScaleVecColumnParallelLinear",
    "ScaleVecRowParallelLinear",
    "add_vectors",
    "gamma_name",
    "leaf_class",
    "scale_of_all_channels",
    "sharding_of",
    "unsharded_sizes",
]


def gamma_name(side: str, branch: str) -> str:
    """Base name of a vector's parameters: ``gamma_in_q``, ``gamma_out_gate``."""
    return f"gamma_{side}_{branch}"


def add_vectors(
    owner: torch.nn.Module,
    row_map: RowMap,
    *,
    site: str,
    layer: int,
    in_branches: Sequence[str],
    out_branches: Sequence[str],
    initial_gamma_in: torch.Tensor,
    reparam: str,
    dtype: torch.dtype | None,
    like: torch.nn.Parameter,
    holder: Literal["linear", "replicated"] = "linear",
    summed_by_megatron: bool = False,
    rename: Callable[[str], str] = lambda name: name,
) -> None:
    """Register the vectors of one map on ``owner``; arguments as of :meth:`FoldedLinear.convert`.

    Args:
        holder: Whether the vectors are a linear's, or of a parameter that every rank holds whole.
        summed_by_megatron: Whether Megatron sums the weight's gradient where tensor-parallel ranks see
            different tokens, and is to sum that of the vectors as well.
        like: As :func:`~megatron_scalevec.vectors.add_vector` takes it.
        rename: From :func:`gamma_name` to the name on the owner, where it holds those of several maps.
    """

    def add(branch: str, side: str, initial: torch.Tensor) -> None:
        info = VectorInfo(site, branch, side, layer, holder, reparam)
        add_vector(owner, rename(gamma_name(side, branch)), initial, info, "input", like=like, dtype=dtype)

    before = set(owner._parameters)
    for branch in in_branches:
        add(branch, "in", initial_gamma_in)
    for branch, size in zip(row_map.branches, row_map.sizes):
        if branch in out_branches:
            add(branch, "out", torch.ones(size))
    if summed_by_megatron:
        for name in owner._parameters.keys() - before:
            owner._parameters[name].sequence_parallel = bool(getattr(like, "sequence_parallel", False))


class FoldedLinear(common.Folded):
    """Mixin: a linear that multiplies by W_eff instead of its weight.

    ``weight`` keeps its name, shape and attributes; the vectors are further parameters
    (:func:`gamma_name`). A checkpoint holds them as replicated tensors through the inherited
    ``sharded_state_dict``. Never built directly: :meth:`convert` changes a built linear in place.

    Class attributes describe the linear: along which axis tensor-parallel ranks share the weight, the
    prefix of a fused norm's parameters (empty where none is fused), and the flag that lets the backward
    pass add to the weight's ``main_grad`` by itself. Of a ``replicated`` weight each rank has the whole, and
    Megatron sums its gradient where the ranks see different tokens; the same then holds for its vectors.
    """

    parallel: ClassVar[Literal["column", "row", "replicated"]]
    fused_norm: ClassVar[str] = ""
    main_grad_flag: ClassVar[str] = "gradient_accumulation_fusion"
    scalevec_borrows = False  # set where another module owns the vectors and lends them in its forward

    @staticmethod
    def group_of(linear: torch.nn.Module) -> Any:
        """The tensor-parallel group of a linear of the class below this one, converted or not."""
        return linear.tp_group

    @staticmethod
    def require_convertible(path: str, linear: torch.nn.Module) -> None:
        """Look at a linear before anything is changed.

        Raises:
            ScaleVecError: Something about this very linear stands in the way.
        """

    @classmethod
    def convert(
        cls,
        linear: torch.nn.Module,
        row_map: RowMap,
        *,
        site: str,
        layer: int,
        in_branches: Sequence[str],
        out_branches: Sequence[str],
        initial_gamma_in: torch.Tensor,
        reparam: str,
        dtype: torch.dtype | None,
        borrows: bool = False,
        in_optimizer: bool = False,
        lender: torch.nn.Module | None = None,
        groups: Sequence[Any] = (),
    ) -> None:
        """Give ``linear`` its scale vectors.

        Args:
            linear: A plain linear of the class below this one, which owns its weight.
            row_map: For this rank's rows.
            site: A key of ``config.SITES``.
            layer: Megatron's layer number.
            in_branches: Branches that get a γ_in; ``(SHARED,)`` for one γ_in over all of them.
            out_branches: Branches that get a γ_out. Output scales start at one.
            initial_gamma_in: [input channels of the unsharded weight] start value of every γ_in.
            reparam: How the vectors are stored.
            dtype: Storage dtype of the vectors, None for the weight's.
            borrows: Another module owns the vectors, see :meth:`lend`.
            in_optimizer: The optimizer folds: the linear computes what its own class does, and its weight
                becomes W_eff.
            lender: With both: the module that owns the vectors, which has them by now.
            groups: With both: over which the vectors' gradients are sums, besides the linear's own group.
        """
        shared = tuple(in_branches) == (SHARED,)
        if not in_optimizer:
            linear.scalevec_borrows = borrows
            cls._fold_in_forward(linear, row_map, shared, in_branches, out_branches, initial_gamma_in.numel())
        if not borrows:
            cls._add_own(
                linear,
                row_map,
                site=site,
                layer=layer,
                in_branches=in_branches,
                out_branches=out_branches,
                initial_gamma_in=initial_gamma_in,
                reparam=reparam,
                dtype=dtype,
            )
        if in_optimizer:
            cls._fold_in_optimizer(linear, row_map, in_branches, out_branches, lender, groups)

    @classmethod
    def _fold_in_forward(
        cls,
        linear: torch.nn.Module,
        row_map: RowMap,
        shared: bool,
        in_branches: Sequence[str],
        out_branches: Sequence[str],
        channels: int,
    ) -> None:
        linear.__class__ = cls
        # Its backward would write into ``weight.main_grad``, and W_eff is not the parameter.
        setattr(linear, cls.main_grad_flag, False)
        device = linear.scaled_weights()[0].device
        branch_of_row = torch.zeros_like(row_map.branch_of_row) if shared else row_map.branch_of_row
        linear.register_buffer("scalevec_branch_of_row", branch_of_row.to(device), persistent=False)
        linear.register_buffer("scalevec_slot_of_row", row_map.slot_of_row.to(device), persistent=False)
        # One entry per row of γ_in and per block of γ_out: name and size, a name of None for ones.
        linear.scalevec_in = tuple(
            (gamma_name("in", branch) if branch in in_branches else None, channels)
            for branch in ((SHARED,) if shared else row_map.branches)
        )
        linear.scalevec_out = tuple(
            (gamma_name("out", branch) if branch in out_branches else None, size)
            for branch, size in zip(row_map.branches, row_map.sizes)
        )

    @classmethod
    def _fold_in_optimizer(
        cls,
        linear: torch.nn.Module,
        row_map: RowMap,
        in_branches: Sequence[str],
        out_branches: Sequence[str],
        lender: torch.nn.Module | None,
        groups: Sequence[Any],
    ) -> None:
        if not (in_branches or out_branches):
            return
        own = None if cls.parallel == "replicated" else cls.group_of(linear)
        shared = tuple(in_branches) == (SHARED,)
        for weight_name, suffix in cls.weights_of(linear).items():
            weight = getattr(linear, weight_name)

            def name(side: str, branch: str, known: Sequence[str], suffix=suffix) -> str | None:
                if branch not in known:
                    return None
                return gamma_name(side, branch) + (suffix if lender is None else "")

            register_fold(
                linear,
                row_map,
                inner=[name("in", SHARED if shared else branch, in_branches) for branch in row_map.branches],
                outer=[name("out", branch, out_branches) for branch in row_map.branches],
                weight_name=weight_name,
                first_column=own.rank() * weight.shape[1] if cls.parallel == "row" else 0,
                tp_group=own,
                more_groups=groups,
                vectors_of=lender,
            )

    @staticmethod
    def weights_of(linear: torch.nn.Module) -> Mapping[str, str]:
        """Names of the weights of a linear of the class below this one, to what the names of a weight's own
        vectors end in."""
        return {"weight": ""}

    @classmethod
    def _add_own(cls, linear: torch.nn.Module, row_map: RowMap, **what: Any) -> None:
        whole = cls.parallel == "replicated"
        add_vectors(linear, row_map, like=linear.weight, summed_by_megatron=whole, **what)

    def lend(self, gammas: Mapping[str, torch.Tensor] | None) -> None:
        """Hand in the vectors of a linear that borrows them, for the forward passes to come.

        Args:
            gammas: Composed vectors by :func:`gamma_name`, whose gradients their owner sums over ranks; None
                takes them back.
        """
        self.__dict__["_scalevec_lent"] = gammas

    def _vectors(self, names: Sequence[Hashable], stored: Sequence[str]) -> Mapping[Any, torch.Tensor]:
        """Complete vectors by name, each rank's gradient summed over the tensor-parallel group."""
        if self.scalevec_borrows:
            lent = self.__dict__.get("_scalevec_lent")
            if lent is None:
                raise RuntimeError(
                    "a linear of an expert was called outside of the experts' forward pass, where the scale "
                    "vectors that it shares with the others are not at hand"
                )
            return lent
        vectors = [compose_vector(self, name) for name in stored]
        joined = torch.cat(vectors)
        if self.parallel != "replicated":
            # One reduction for all vectors of the linear.
            joined = common.sum_gradient_over_tensor_parallel(joined, self.group_of(self))
        return dict(zip(names, joined.split([vector.numel() for vector in vectors])))

    def folded_weight(self) -> torch.Tensor:
        """W_eff of this rank, shaped as the weight; see :func:`megatron_scalevec.fold.fold_weight`."""
        names = self.vector_names()
        return self._fold(self.weight, self._vectors(names, names))

    def vector_names(self) -> list[str]:
        """:func:`gamma_name` of the vectors that W_eff is formed with."""
        return [name for name, _ in (*self.scalevec_in, *self.scalevec_out) if name is not None]

    def input_vectors(self) -> list[str | None]:
        """Names of the input scales, one per branch or one for all; None where a branch has none."""
        return [name for name, _ in self.scalevec_in]

    def _fold(self, weight: torch.Tensor, gammas: Mapping[str, torch.Tensor]) -> torch.Tensor:
        gamma_in = self._joined(self.scalevec_in, gammas)
        if gamma_in is not None:
            gamma_in = gamma_in.view(len(self.scalevec_in), -1)
            if self.parallel == "row":
                own = weight.shape[1]
                start = self.group_of(self).rank() * own
                gamma_in = gamma_in[:, start : start + own]
        return fold_weight(
            weight,
            gamma_in,
            self._joined(self.scalevec_out, gammas),
            self.scalevec_branch_of_row,
            self.scalevec_slot_of_row,
        )

    @staticmethod
    def _joined(
        blocks: Sequence[tuple[str | None, int]], gammas: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        if all(name is None for name, _ in blocks):
            return None
        like = next(iter(gammas.values()))
        return torch.cat([like.new_ones(size) if name is None else gammas[name] for name, size in blocks])

    def _apply(self, fn, recurse=True):
        keep_dtype(self, lambda: super(FoldedLinear, self)._apply(fn, recurse))
        return self


class ScaleVecColumnParallelLinear(FoldedLinear, ColumnParallelLinear):
    """``ColumnParallelLinear`` with scale vectors: each rank holds some of the rows."""

    parallel = "column"

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


class ScaleVecRowParallelLinear(FoldedLinear, RowParallelLinear):
    """``RowParallelLinear`` with scale vectors: each rank holds some of the columns."""

    parallel = "row"

    def _forward_impl(self, input, weight, *args, **kwargs):
        # The one place through which every Megatron of the window passes the weight.
        return super()._forward_impl(input, self.folded_weight(), *args, **kwargs)


LEAVES: dict[type, type[FoldedLinear]] = {
    ColumnParallelLinear: ScaleVecColumnParallelLinear,
    RowParallelLinear: ScaleVecRowParallelLinear,
}
"""Megatron's local classes to ours; :func:`leaf_class` knows TransformerEngine's as well."""


def leaf_class(linear: torch.nn.Module) -> type[FoldedLinear] | None:
    """Our class for a linear, converted or not; None where there is none. Subclasses count as unknown."""
    if isinstance(linear, FoldedLinear):
        return type(linear)
    if common.is_transformer_engine(linear):
        # Here and not above: TransformerEngine is there only where a model is made of it.
        from megatron_scalevec.layers import te

        return te.LEAVES.get(type(linear))
    return LEAVES.get(type(linear))


def sharding_of(linear: torch.nn.Module) -> tuple[int, int]:
    """(rank, number of ranks) that share the weight of a linear that :func:`leaf_class` knows."""
    leaf = leaf_class(linear)
    if leaf.parallel == "replicated":
        return 0, 1
    group = leaf.group_of(linear)
    return group.rank(), group.size()


def scale_of_all_channels(linear: torch.nn.Module, scale: torch.Tensor, channels: int) -> torch.Tensor:
    """The scale of all input channels of a linear, where ranks may have a norm over their own (Mamba's
    gated norm).

    Args:
        linear: One that :func:`leaf_class` knows, or any other where every rank has the whole scale.
        scale: The norm's on this rank, [channels] or this rank's share.
        channels: Of the whole weight.

    Returns:
        [channels]; ones on the meta device.
    """
    if scale.is_meta:
        return scale.new_ones(channels)
    if scale.numel() == channels:
        return scale
    _, ranks = sharding_of(linear)
    parts = [torch.empty_like(scale) for _ in range(ranks)]
    torch.distributed.all_gather(parts, scale.contiguous(), group=leaf_class(linear).group_of(linear))
    return torch.cat(parts)


def unsharded_sizes(linear: torch.nn.Module) -> tuple[int, int]:
    """(rows, columns) of the whole weight of a linear that :func:`leaf_class` knows."""
    rows, columns = linear.weight.shape
    _, ranks = sharding_of(linear)
    return (rows, columns * ranks) if leaf_class(linear).parallel == "row" else (rows * ranks, columns)
