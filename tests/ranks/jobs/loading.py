"""Checkpoints of small models with Megatron's own optimizers, saved in one mode of execution and loaded in
either, or by a stock model."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch

from ranks.jobs.executing import _build, _live_is_folded, _step

__all__ = ["load_between_steps", "load_in_both_modes", "revive_by_autograd"]


def load_in_both_modes(folder: str, cases: list[dict[str, Any]], **sizes: int) -> list[dict[str, Any]]:
    """Two steps, a checkpoint, two more; and the last two again, from the checkpoint, in each mode.

    Args:
        folder: For the checkpoints.
        cases: ``written_by``: a mode; ``form`` of the optimizer's state: the distributed optimizer's
            ``fully_reshardable`` or ``dp_reshardable``, or ``plain``; the rest as for ``_build``.
        sizes: Of Megatron's groups.

    Returns:
        Per case ``whole``: losses of all steps; by mode the losses of the last two, and ``live``: whether
        the live weights were cast(fold(masters)) right after loading; ``stock``: what a stock model with its
        optimizer says on loading it, by strictness, ``model``: the difference of its logits from those of
        the model that was saved where only the model's part is loaded.
    """
    from ranks.models import initialize_parallel

    initialize_parallel(**sizes)
    return [_load_in_both(os.path.join(folder, str(n)), sizes, **case) for n, case in enumerate(cases)]


def _load_in_both(
    folder: str, sizes: dict[str, int], *, written_by: str, form: str, **case: Any
) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint.api import CheckpointException

    from megatron_scalevec.checkpoint.other_execution import loading_other_execution
    from megatron_scalevec.execution.optimizer import engine_of

    case["distributed"] = form != "plain"
    gpt, wrapped, stepper = _ready(written_by, sizes, **case)
    result: dict[str, Any] = {"whole": [_step(wrapped, stepper, step)[0] for step in range(2)], "stock": {}}
    logits = _logits(gpt)
    _save(folder, gpt, stepper, form)
    result["whole"] += [_step(wrapped, stepper, step)[0] for step in (2, 3)]
    for mode in ("autograd", "optimizer"):
        again, wrapped, stepper = _ready(mode, sizes, **case)
        with contextlib.ExitStack() as stack:
            if mode != written_by:
                stack.enter_context(loading_other_execution(wrapped, stepper, written_by))
            _load(folder, again, stepper, form)
        engine = engine_of(stepper)
        result["live"] = _live_is_folded(engine) if engine is not None else result.get("live")
        result[mode] = [_step(wrapped, stepper, step)[0] for step in (2, 3)]
    if written_by == "optimizer":
        [stock], wrapped, stepper = _build("autograd", False, sizes, **{**case, "config": None})
        _load(folder, stock, None, form)
        result["model"] = float((_logits(stock) - logits).abs().max() / logits.abs().max())
        for strictness in ("raise_all", "log_all", "ignore_all"):
            try:
                _load(folder, stock, stepper, form, strictness)
                result["stock"][strictness] = "loaded"
            except (KeyError, CheckpointingException, CheckpointException) as error:
                result["stock"][strictness] = str(error)
    return result


def load_between_steps(folder: str, form: str) -> dict[str, Any]:
    """Load in the middle of a run: model and optimizer, and then the optimizer alone.

    Returns:
        ``whole``: losses of four steps; ``again``: those of the last two after loading what was saved behind
        the second; ``alone``: what the step after the last load says.
    """
    from megatron_scalevec import ScaleVecError
    from ranks.models import initialize_parallel

    initialize_parallel()
    config = {"strategy": "unified-foldable"}
    case = {"config": config, "precision": "bf16", "distributed": form != "plain"}
    gpt, wrapped, stepper = _ready("optimizer", {}, **case)
    found: dict[str, Any] = {"whole": [_step(wrapped, stepper, step)[0] for step in range(2)]}
    _save(folder, gpt, stepper, form)
    found["whole"] += [_step(wrapped, stepper, step)[0] for step in (2, 3)]
    _load(folder, gpt, stepper, form)
    found["again"] = [_step(wrapped, stepper, step)[0] for step in (2, 3)]
    live = {name: param.detach().clone() for name, param in gpt.named_parameters()}
    _load(folder, gpt, stepper, form)
    with torch.no_grad():
        for name, param in gpt.named_parameters():
            param.copy_(live[name])
    try:
        _step(wrapped, stepper, 2)
        found["alone"] = "went on"
    except ScaleVecError as error:
        found["alone"] = str(error)
    return found


def revive_by_autograd(folder: str, reparam: str) -> dict[str, bool]:
    """A run that folds has driven some entries of γ to zero; one by autograd starts from its model alone."""
    from megatron_scalevec.checkpoint.other_execution import loading_other_execution
    from ranks.models import initialize_parallel

    initialize_parallel()
    case = {"config": {"strategy": "dp", "reparam": reparam}}
    gpt, _, _ = _ready("optimizer", {}, **case)
    part = {"none": "", "product": "_alpha", "unit": "_direction"}[reparam]
    linear = gpt.decoder.layers[0].mlp.linear_fc1
    half = linear.weight.shape[0] // 2
    with torch.no_grad():
        getattr(linear, f"gamma_in_up{part}")[3] = 0
        getattr(linear, f"gamma_out_gate{part}")[5] = 0
        linear.weight[half:, 3] = 0
        linear.weight[5] = 0
    logits = _logits(gpt)
    _save(folder, gpt, None, "plain")
    again, wrapped, stepper = _ready("autograd", {}, **case)
    with loading_other_execution(wrapped, stepper, "optimizer"):
        _load(folder, again, None, "plain")
        stepper.reload_model_params()
    linear = again.decoder.layers[0].mlp.linear_fc1
    found = {
        "function_kept": float((_logits(again) - logits).abs().max() / logits.abs().max()) < 1e-6,
        "weights_at_zero": not bool(linear.weight[half:, 3].any() or linear.weight[5].any()),
    }
    for step in range(2):
        _step(wrapped, stepper, step)
    found["learns"] = bool(linear.weight[half:, 3].any()) and bool(linear.weight[5].any())
    return found


def _ready(mode: str, sizes: dict[str, int], **case: Any):
    from megatron_scalevec.execution.optimizer import execute_in_optimizer

    [gpt], wrapped, stepper = _build(mode, False, sizes, **case)
    if mode == "optimizer":
        execute_in_optimizer(stepper, wrapped)
        stepper.reload_model_params()
    return gpt, wrapped, stepper


def _logits(gpt: torch.nn.Module) -> torch.Tensor:
    from ranks.models import SIZES

    position = torch.arange(SIZES["sequence"])[None]
    gpt.eval()
    with torch.no_grad():
        found = gpt(position % SIZES["vocabulary"], position, None).double()
    gpt.train()
    return found


def _metadata(form: str) -> dict[str, Any]:
    from megatron.core import parallel_state

    kind = {} if form == "plain" else {"distrib_optim_sharding_type": form}
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {**kind, "chained_optim_avoid_prefix": True, "dp_cp_group": group}


def _state(gpt: torch.nn.Module, optimizer: Any, form: str, *, loading: bool) -> dict[str, Any]:
    metadata = _metadata(form)
    model = gpt.sharded_state_dict(metadata=metadata)
    if optimizer is None:
        return {"model": model}
    return {
        "model": model,
        "optimizer": optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata),
    }


def _save(folder: str, gpt: torch.nn.Module, optimizer: Any, form: str) -> None:
    from megatron.core import dist_checkpointing

    if torch.distributed.get_rank() == 0:
        os.makedirs(folder)
    torch.distributed.barrier()
    dist_checkpointing.save(_state(gpt, optimizer, form, loading=False), folder)


def _load(
    folder: str, gpt: torch.nn.Module, optimizer: Any, form: str, strict: str = "assume_ok_unexpected"
) -> None:
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load(_state(gpt, optimizer, form, loading=True), folder, strict=strict)
    gpt.load_state_dict(state["model"])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
