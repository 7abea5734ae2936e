"""Leaves on TransformerEngine: linears that hand its kernels W_eff, and norms with a vector of ours.

Imported only once a model is made of TransformerEngine's modules (``layers.linear.leaf_class``).

Where the weight is taken: the forward pass of ``te.Linear`` and ``te.LayerNormLinear`` asks its own method
``_get_weight_and_bias_tensors`` once for what it multiplies by, and passes that into one autograd function
as a differentiable input. So W_eff in the weight's place is all there is to do: norm, product, collectives
and the gradient of W_eff are TransformerEngine's, and from there autograd goes on to ``weight`` and the
vectors.

FP8, which is refused for now: TransformerEngine quantizes what this method returns. With
``is_first_microbatch`` it keeps the quantized copy over the microbatches of a step, in which neither the
weight nor a vector changes, so the copy stays that of W_eff. Weights that are stored quantized are another
matter: W would have to be folded from its quantized form, and they stay refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformer_engine.pytorch as te
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TELinear,
    TENorm,
    TERowParallelLinear,
)

from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.layers.common import class_below
from megatron_scalevec.layers.linear import FoldedLinear
from megatron_scalevec.layers.norm import ScaledNorm
from megatron_scalevec.vectors import vector_info, was_added

__all__ = [
    "LEAVES",
    "OBSTACLES_OF_ANY_KIND",
    "HidesVectors",
    "ScaleVecTEColumnParallelLinear",
    "ScaleVecTELayerNormColumnParallelLinear",
    "ScaleVecTELinear",
    "ScaleVecTERowParallelLinear",
    "ScaledTENorm",
    "build_norm",
    "refuse_obstacles",
]

_TAKES_WEIGHT = "_get_weight_and_bias_tensors"


def _overlaps(linear: torch.nn.Module) -> bool:
    return any(
        value is True and name.startswith(("ub_overlap_", "ub_bulk_")) for name, value in vars(linear).items()
    )


def _delays_weight_gradient(linear: torch.nn.Module) -> bool:
    store = getattr(linear, "wgrad_store", None)
    return store is not None and bool(store.delay_wgrad_compute())


def _has_precision_recipe(linear: torch.nn.Module) -> bool:
    config = linear.config
    return any(getattr(config, name, None) for name in ("fp8", "fp4", "quant_recipe"))


OBSTACLES_OF_ANY_KIND: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (_has_precision_recipe, "is set to FP8, FP4 or a quantization recipe; train in bf16"),
    (
        _delays_weight_gradient,
        "computes its weight gradient outside of autograd (delay_wgrad_compute), where the scale vectors "
        "would get none",
    ),
)
"""What makes any module of TransformerEngine with weights unfit."""

_OBSTACLES: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        lambda linear: not callable(getattr(linear, _TAKES_WEIGHT, None)),
        f"has no method {_TAKES_WEIGHT}, through which scale vectors reach TransformerEngine's kernels; "
        "install transformer-engine 2.20, with which this was written",
    ),
    (
        lambda linear: getattr(linear, "weight_names", None) != ["weight"],
        "does not hold its weight as one parameter named 'weight'",
    ),
    (
        # Quantized weights are parameters of another class.
        lambda linear: type(linear.weight) is not torch.nn.Parameter,
        "holds a quantized weight; train with bf16 weights",
    ),
    *OBSTACLES_OF_ANY_KIND,
    (_overlaps, "overlaps communication with products (tp_comm_overlap), which is not proven yet"),
)
"""What makes a linear unfit, and what is said then."""


def refuse_obstacles(obstacles, path: str, linear: torch.nn.Module) -> None:
    """Raise for the first obstacle that applies.

    Raises:
        ScaleVecError: With the reason.
    """
    for applies, reason in obstacles:
        if applies(linear):
            raise ScaleVecError(
                f"{path} ({type(linear).__name__}) {reason}. Nothing was changed; run without "
                "--scalevec-strategy, or with --transformer-impl local."
            )


class HidesVectors:
    """Mixin: inside the forward pass the module shows TransformerEngine the parameters it knows.

    Its linears insist that all their parameters have the dtype of the input, which vectors kept in float32
    do not. Its norms are "operations" since TransformerEngine 2, run by an autograd function that takes all
    their parameters and expects as many gradients back from a kernel that knows of no others.
    """

    _in_forward = False

    def forward(self, *args, **kwargs):
        # Into __dict__, as TransformerEngine does it too: torch's __setattr__ costs time in every forward.
        self.__dict__["_in_forward"] = True
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.__dict__["_in_forward"] = False

    def named_parameters(self, *args, **kwargs):
        """As torch's, which ``parameters()`` goes through as well."""
        found = super().named_parameters(*args, **kwargs)
        if not self._in_forward:
            return found
        return ((n, p) for n, p in found if vector_info(p) is None or not was_added(p))


class _TEFolded(HidesVectors, FoldedLinear):
    """What the linears have in common."""

    # TransformerEngine would also keep a weak reference to the weight object, and W_eff lives for one
    # forward pass.
    main_grad_flag = "fuse_wgrad_accumulation"
    _weight_was_taken = False

    @staticmethod
    def group_of(linear):
        """Megatron's group; TransformerEngine's own attribute may be unset with a single rank."""
        return linear._tp_group

    @staticmethod
    def require_convertible(path, linear):
        """As the base class says; :data:`_OBSTACLES` lists what stands in the way."""
        refuse_obstacles(_OBSTACLES, path, linear)

    def _get_weight_and_bias_tensors(self):
        self.__dict__["_weight_was_taken"] = True
        _, bias = super()._get_weight_and_bias_tensors()
        return self.folded_weight(), bias

    def forward(self, *args, **kwargs):
        """As TransformerEngine's, multiplying by W_eff.

        Raises:
            RuntimeError: The forward pass did not take its weight where this class hands out W_eff.
        """
        self.__dict__["_weight_was_taken"] = False
        result = super().forward(*args, **kwargs)
        if not self._weight_was_taken:
            raise RuntimeError(
                f"the installed TransformerEngine does not take its weight through {_TAKES_WEIGHT}, so the "
                "scale vectors had no effect; the run was stopped. Install transformer-engine 2.20, or use "
                "--transformer-impl local."
            )
        return result


class ScaleVecTELayerNormColumnParallelLinear(_TEFolded, TELayerNormColumnParallelLinear):
    """Norm and column-parallel linear in one, with scale vectors on the linear."""

    parallel = "column"
    fused_norm = "layer_norm_"


class ScaleVecTEColumnParallelLinear(_TEFolded, TEColumnParallelLinear):
    """``TEColumnParallelLinear`` with scale vectors."""

    parallel = "column"


class ScaleVecTERowParallelLinear(_TEFolded, TERowParallelLinear):
    """``TERowParallelLinear`` with scale vectors."""

    parallel = "row"


class ScaleVecTELinear(_TEFolded, TELinear):
    """``TELinear`` in its duplicated form: every tensor-parallel rank holds the whole weight."""

    parallel = "replicated"


LEAVES: dict[type, type[FoldedLinear]] = {
    TELayerNormColumnParallelLinear: ScaleVecTELayerNormColumnParallelLinear,
    TEColumnParallelLinear: ScaleVecTEColumnParallelLinear,
    TELinear: ScaleVecTELinear,
    TERowParallelLinear: ScaleVecTERowParallelLinear,
}
"""Megatron's TransformerEngine classes to ours."""


class ScaledTENorm(HidesVectors, ScaledNorm):
    """``ScaledNorm`` over TransformerEngine's norms: their kernels multiply by γ.

    A norm looks its scale up in the forward pass and once more in the backward pass. So what computes is a
    copy of it, of this one forward pass, whose scale is γ; the module's own stays frozen at one. Fused
    residual norms keep other modules that share their scale: after them the product is taken.
    """

    def _scaled(self, gamma, *args, **kwargs):
        kind = class_below(type(self), ScaledNorm)
        if kind not in _TAKES_SCALE:
            return super()._scaled(gamma, *args, **kwargs)
        own = self._parameters
        given = {"weight": gamma.to(own["weight"].dtype)}
        if own.get("bias") is not None:
            given["bias"] = (own["bias"] * gamma).to(own["bias"].dtype)
        norm = kind.__new__(kind)
        # Rounding γ − 1 would take a small γ for zero.
        norm.__dict__.update(self.__dict__, _parameters=given, zero_centered_gamma=False)
        out = kind.forward(norm, *args, **kwargs)
        if torch.is_grad_enabled() and gamma.requires_grad:
            _require_gradient(out, given["weight"])
        return out


_TAKES_SCALE = (te.RMSNorm, te.LayerNorm)


def _require_gradient(out: torch.Tensor, scale: torch.Tensor) -> None:
    node = torch.autograd.graph.get_gradient_edge(scale).node
    if out.grad_fn is None or all(before is not node for before, _ in out.grad_fn.next_functions):
        raise RuntimeError(
            "the installed TransformerEngine's norms do not take their scale among their parameters, so a "
            "scale vector would get no gradient; the run was stopped. Install transformer-engine 2.20, or "
            "use --transformer-impl local."
        )


def build_norm(config, size: int, eps: float) -> torch.nn.Module:
    """A norm of the model's kind. ``TENorm`` is a factory: no built norm is of that class."""
    return TENorm(config=config, hidden_size=size, eps=eps)
