"""Hooks on training steps: ``--scalevec-debug-replicas``.

Each function takes the session and Megatron's own function, and returns what stands in its place.
"""

from __future__ import annotations

from typing import Any

from megatron_scalevec.integration.session import Session

__all__ = ["train_step"]


def train_step(current: Session, original):
    """Compare replicated parameters behind every N-th step."""
    steps = 0

    def step_then_check(forward_step_func, data_iterator, model, *args, **kwargs):
        nonlocal steps
        result = original(forward_step_func, data_iterator, model, *args, **kwargs)
        steps += 1
        if current.replicas_every and steps % current.replicas_every == 0:
            _check(model, steps)
        return result

    return step_then_check


def _check(model: Any, step: int) -> None:
    from megatron_scalevec.replicas import check_replicas

    # With overlap_param_gather a step ends before its parameters have been gathered: that happens in the
    # next forward pass. Taking its hooks away gathers them now, as Megatron does before it evaluates.
    gathering = [chunk for chunk in model if getattr(chunk, "remove_forward_pre_hook_handles", None)]
    for chunk in gathering:
        chunk.disable_forward_pre_hook()
    check_replicas(model, f"after step {step} of this run: ")
    for chunk in gathering:
        chunk.enable_forward_pre_hook()
