"""Loading what a run with the other mode of execution has saved.

The modes differ in what two tensors per linear are, and in their keys:

    ==============  ====================================  ==========================================
    saved by        ``weight``                            its fp32 master
    ==============  ====================================  ==========================================
    ``autograd``    raw W, as ``scalevec_weight``         raw W, with the key of the weight
    ``optimizer``   W_eff, as ``weight``                  raw W, as ``scalevec_raw...`` of that key
    ==============  ====================================  ==========================================

Masters, averages and vectors are the same numbers in both. So the tensors are asked for by the other mode's
keys, the masters are taken as they are, and the live weights follow from them. Without the optimizer's state
the weights themselves are folded or unfolded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

from megatron_scalevec.checkpoint.guard import Guarded, execution_of, scaled_weights
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.execution.engine import SMALLEST
from megatron_scalevec.execution.folds import fold_live_weights
from megatron_scalevec.execution.members import Member, is_layer_wise, leaves_of
from megatron_scalevec.execution.optimizer import engine_of
from megatron_scalevec.execution.resume import mark_raw_masters
from megatron_scalevec.layers.common import Folded
from megatron_scalevec.layers.experts import ScaleVecExperts
from megatron_scalevec.vectors import compose_vector, set_vector, vector_names

__all__ = ["adopt_weights", "loading_other_execution"]


@contextlib.contextmanager
def loading_other_execution(
    wrapped_chunks: Sequence[torch.nn.Module], optimizer: Any | None, execution: str
) -> Iterator[None]:
    """Within it, sharded state dicts have the keys of the other mode; at its end, live weights are in order.

    For a loop of one's own: build the sharded state dicts of model and optimizer in it, load, and call
    ``load_state_dict`` of the model and then of the optimizer, or its ``reload_model_params`` where its
    state is left behind. It is collective over all ranks.

    Args:
        wrapped_chunks: The model's chunks, wrapped for data parallelism or not.
        optimizer: Megatron's over them, if there is one.
        execution: The mode of the run that has saved, ``autograd`` or ``optimizer``.

    Raises:
        ScaleVecError: The optimizer is one whose masters are not on every rank that has the weight.
    """
    from megatron.core.utils import unwrap_model

    if any(is_layer_wise(o) for o in (optimizer, *getattr(optimizer, "chained_optimizers", ()))):
        raise ScaleVecError(
            "a checkpoint of the other mode of execution cannot be loaded with the layer-wise optimizer, "
            f"which keeps each master on one rank; give --scalevec-execution {execution}."
        )
    wrapped_chunks = list(wrapped_chunks)
    chunks = [chunk for chunk in unwrap_model(wrapped_chunks) if isinstance(chunk, Guarded)]
    leaves = [] if optimizer is None else [o for o in leaves_of(optimizer) if not _is_stub(o)]
    with contextlib.ExitStack() as stack:
        for chunk in chunks:
            if execution_of(chunk) != execution:
                chunk.scalevec_loads_execution = execution
                stack.callback(delattr, chunk, "scalevec_loads_execution")
        engine = None if optimizer is None else engine_of(optimizer)
        if engine is not None:
            engine.marks_masters = False
            stack.callback(setattr, engine, "marks_masters", True)
        elif execution == "optimizer":
            weights = _weights_of(chunks)
            for leaf in leaves:
                _mark_masters(leaf, weights)
                stack.callback(delattr, leaf, "sharded_state_dict")
        yield
    _follow_masters(wrapped_chunks, leaves, engine)


def _is_stub(optimizer: Any) -> bool:
    return getattr(optimizer, "is_stub_optimizer", False) or not isinstance(
        optimizer, MixedPrecisionOptimizer
    )


def _weights_of(chunks: Sequence[torch.nn.Module]) -> dict[torch.nn.Parameter, Any]:
    return {
        chunk.get_parameter(name): group for chunk in chunks for name, group in scaled_weights(chunk).items()
    }


def _mark_masters(leaf: Any, weights: dict[torch.nn.Parameter, Any]) -> None:
    """Have one optimizer of a run by autograd ask for its masters as a run that folds has saved them."""
    original = leaf.sharded_state_dict
    member = Member(leaf)
    own = {weight: group for weight, group in weights.items() if weight in member.params}

    def sharded_state_dict(*args: Any, **kwargs: Any) -> Any:
        state = original(*args, **kwargs)
        mark_raw_masters(state, own, leaf, *args, **kwargs)
        return state

    leaf.sharded_state_dict = sharded_state_dict


@torch.no_grad()
def _follow_masters(wrapped_chunks: Sequence[torch.nn.Module], leaves: Sequence[Any], engine: Any) -> None:
    """Live weights from the masters, as after a step."""
    if engine is not None:
        engine.expect_step()
    for leaf in leaves:
        leaf._copy_main_params_to_model_params()
    for chunk in wrapped_chunks if leaves else ():
        if getattr(getattr(chunk, "ddp_config", None), "use_distributed_optimizer", False):
            chunk.start_param_sync(force_sync=True)


def adopt_weights(model: torch.nn.Module) -> None:
    """Loaded weights are what they are in the other mode: make them what they are in the model's own."""
    if execution_of(model) == "optimizer":
        fold_live_weights(model)
        return
    for module in model.modules():
        if isinstance(module, ScaleVecExperts):
            _revive(module)
            with torch.no_grad(), module.lending():
                for linear in module.scalevec_borrowers:
                    _unfold(linear)
        elif isinstance(module, Folded) and not getattr(module, "scalevec_borrows", False):
            _revive(module)
            _unfold(module)


def _revive(owner: torch.nn.Module) -> None:
    """Where γ is nearly zero, W cannot be found, and would never get a gradient: γ starts again at one."""
    for name in vector_names(owner):
        gamma = compose_vector(owner, name).detach()
        dead = gamma.abs() < SMALLEST
        if bool(dead.any()):
            set_vector(owner, name, torch.where(dead, torch.ones_like(gamma), gamma))


@torch.no_grad()
def _unfold(module: Folded) -> None:
    """W := W_eff ⊘ (γ_out γ_inᵀ), the quotient in float32 and rounded once."""
    weights = module.scaled_weights()
    own = {name: weight for name, weight in module._parameters.items() if any(weight is w for w in weights)}
    try:
        for name, weight in own.items():
            # What the module makes of ones is the factor, which half precision would round. They stand in
            # the parameter's place: with data of another dtype it would lose the hook by which DDP gets its
            # gradient.
            wide = torch.promote_types(weight.dtype, torch.float32)
            module._parameters[name] = torch.nn.Parameter(
                torch.ones_like(weight, dtype=wide), requires_grad=False
            )
        factors = module.folded_weights()
    finally:
        module._parameters.update(own)
    for weight, factor in zip(weights, factors):
        weight.copy_(weight.to(factor.dtype) / factor)
