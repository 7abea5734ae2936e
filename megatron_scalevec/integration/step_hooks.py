"""Hooks on training steps: ``--scalevec-debug-replicas``, ``--scalevec-log-interval``.

Each function takes the session and Megatron's own function, and returns what stands in its place.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from megatron_scalevec.integration.session import Session

__all__ = ["telemetry", "train_step"]


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


def telemetry(current: Session, original):
    """Log every N-th step, counted over all runs since the first one."""
    telling = None

    def step_and_log(forward_step_func, data_iterator, model, optimizer, *args, **kwargs):
        nonlocal telling
        if not current.log_interval:
            return original(forward_step_func, data_iterator, model, optimizer, *args, **kwargs)
        from megatron.training import get_args

        step = get_args().curr_iteration + 1
        if telling is None:
            telling = _Telling(current, model, optimizer, step - 1)
        now = step % current.log_interval == 0
        if now:
            telling.telemetry.before_step()
        result = original(forward_step_func, data_iterator, model, optimizer, *args, **kwargs)
        if now:
            telling.tell(step, result)
        return result

    return step_and_log


class _Telling:
    """Telemetry of a run, and where it goes."""

    def __init__(self, current: Session, model: Any, optimizer: Any, resumed_at: int) -> None:
        from megatron_scalevec.telemetry import JsonLines, Telemetry

        self._strategy = current.config.strategy
        self.telemetry = Telemetry(model, optimizer)
        self._file = None
        if current.log_file is not None and _is_last_rank():
            self._file = JsonLines(current.log_file, resumed_at)
            for note in self._file.notes:
                print(f"[scalevec] {note}", flush=True)

    def tell(self, step: int, result: Any) -> None:
        """Log a step that ``train_step`` has taken with this result."""
        from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

        from megatron_scalevec.telemetry import write

        losses, skipped, *_ = result
        found = self.telemetry.after_step(bool(skipped))
        if found is None:
            return
        norm = result[5]
        more = {
            "strategy": self._strategy,
            "loss": _number(losses.get("lm loss")),
            "gradient_norm": _number(norm),
            "skipped": bool(skipped),
        }
        write(
            step,
            found,
            file=self._file,
            tensorboard=get_tensorboard_writer(),
            wandb=get_wandb_writer(),
            more=more,
        )


def _number(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _is_last_rank() -> bool:
    return torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
