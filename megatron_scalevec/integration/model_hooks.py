"""Hooks on building the model and its optimizer, and the audit where the two meet.

Each function takes the session and Megatron's own function, and returns what stands in its place.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.integration.session import Session, say

__all__ = ["gpt_model", "group_ranges", "hybrid_model", "optimizer", "overrides", "setup"]


def gpt_model(current: Session, original):
    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if current.config.active:
            from megatron_scalevec.convert import applied_config, apply_scale_vectors

            # A layer spec may have brought the same strategy.
            if applied_config(self) != current.config:
                apply_scale_vectors(self, current.config)

    return init


def hybrid_model(current: Session, original):
    """The other kind of model that a run may build instead."""
    convert = gpt_model(current, original)

    def init(self, *args, **kwargs):
        current.called.add("model")
        convert(self, *args, **kwargs)

    return init


def overrides(current: Session, original):
    def get_standard_config_overrides(config):
        from megatron_scalevec.decay import with_decaying_vectors, with_learning_rates

        overrides = original(config)
        if not current.config.active:
            return overrides
        overrides = with_decaying_vectors(overrides, current.config.weight_decay)
        return with_learning_rates(overrides, current.config.lr_multipliers, config)

    return get_standard_config_overrides


def optimizer(current: Session, original):
    """Where model and optimizer meet, in Megatron's loop and in loops of a user's own."""

    def get_megatron_optimizer(config, model_chunks, *args, **kwargs):
        optimizer = original(config, model_chunks, *args, **kwargs)
        if current.config.active:
            from megatron_scalevec.execution.optimizer import execute_in_optimizer

            execute_in_optimizer(optimizer, model_chunks)
            _audit(current, model_chunks, optimizer)
        return optimizer

    return get_megatron_optimizer


def group_ranges(current: Session, original):
    """Put a group's float32 parameters first, which is where the distributed optimizer puts them itself.

    Megatron's index of a group's parameters follows the model, and its list of them has float32 before the
    rest. The two agree as long as a group is of one dtype, which vectors kept in float32 in a bf16 model
    are not; checkpoints would then hold one parameter's state under another's name.
    """

    def _build_optimizer_group_ranges(param_groups, gbuf_ranges):
        index_map, ranges = original(param_groups, gbuf_ranges)
        if current.config.active and current.config.vector_dtype == "fp32":
            for number, group in enumerate(ranges):
                group["params"].sort(key=lambda param: param.dtype != torch.float32)  # stable
                index_map.update({param: (number, order) for order, param in enumerate(group["params"])})
        return index_map, ranges

    return _build_optimizer_group_ranges


def setup(current: Session, original):
    """For runs without an optimizer: evaluation."""

    def setup_model_and_optimizer(*args, **kwargs):
        model, optimizer, scheduler = original(*args, **kwargs)
        if current.config.active and current.audit is None:
            _audit(current, model, optimizer)
        elif not current.config.active:
            _remove_stale_audit(current)
        return model, optimizer, scheduler

    return setup_model_and_optimizer


def _audit(current: Session, model: Any, optimizer: Any) -> None:
    from megatron_scalevec.audit import audit

    missing = current.never_called()
    if missing:
        where = ", ".join(missing)
        raise ScaleVecError(
            f"--scalevec-strategy {current.config.strategy}: the hook on {where} did not take part in "
            f"building the model (megatron-core {current.version}), so the strategy cannot be in it: a "
            f"{_kind(model)} was built, and scale vectors are built on GPTModel and hybrid models; the run "
            "was stopped before training."
        )
    current.audit = audit(model, optimizer, config=current.config, reason=current.execution_reason)
    if torch.distributed.get_rank() == 0:
        print(current.audit.table(), flush=True)
        for file in current.audit_files:
            current.audit.write(file)


def _kind(model: Any) -> str:
    from megatron.core.utils import unwrap_model

    chunk = model[0] if isinstance(model, (list, tuple)) else model
    return type(unwrap_model(chunk)).__name__


def _remove_stale_audit(current: Session) -> None:
    """A stock run about to save where an earlier run's audit lies, its checkpoints gone or not ours."""
    for file in current.audit_files:
        if torch.distributed.get_rank() == 0 and os.path.exists(file):
            os.remove(file)
            say(f"removed {file}: it spoke of an earlier run, and this one is stock")
