"""Hooks on saving and loading: a checkpoint knows its strategy, and is whole.

Each function takes the session and Megatron's own function, and returns what stands in its place.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch

from megatron_scalevec.checkpoint.keys import saved_execution
from megatron_scalevec.checkpoint.layout import (
    CONFIG_FILE,
    folder_to_load,
    missing_parts,
    not_whole,
)
from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.integration.arguments import MODEL_FLAGS
from megatron_scalevec.integration.session import Loading, Session, say

_FROM_STOCK = "scalevec_starts_from_stock"

__all__ = ["base_checkpoint", "distributed_state", "group_order", "load", "load_args", "save"]


def load(current: Session, original):
    """Tells the other hooks which model and optimizer are being loaded into."""

    def load_checkpoint(ddp_model, optimizer, *args, **kwargs):
        from megatron.core.utils import unwrap_model

        with contextlib.ExitStack() as meanwhile:
            current.loading = Loading(unwrap_model(ddp_model), ddp_model, optimizer, meanwhile)
            try:
                return original(ddp_model, optimizer, *args, **kwargs)
            finally:
                for chunk in current.loading.chunks:
                    if isinstance(chunk, torch.nn.Module) and hasattr(chunk, _FROM_STOCK):
                        setattr(chunk, _FROM_STOCK, False)
                current.loading = None

    return load_checkpoint


def save(current: Session, original):
    """A checkpoint that is being overwritten is not whole until the save has ended.

    Megatron saves into an existing folder of the same iteration, whose ``metadata.json`` says "complete" all
    the while; a run killed in between would leave a mixture that the next one takes for a checkpoint.
    """

    def dist_save(sharded_state_dict, checkpoint_dir, *args, **kwargs):
        if current.config.active:
            if torch.distributed.get_rank() == 0:
                with contextlib.suppress(FileNotFoundError):
                    os.remove(os.path.join(checkpoint_dir, CONFIG_FILE))
            torch.distributed.barrier()
        return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)

    return dist_save


def load_args(current: Session, original):
    def load_args_from_checkpoint(args, *rest, **kwargs):
        current.restoring = True
        spec = getattr(args, "spec", None)
        try:
            result = original(args, *rest, **kwargs)
        finally:
            current.restoring = False
        # Megatron takes the checkpoint's spec, whatever the command line says.
        if spec and spec[0] == "megatron_scalevec.specs" and args.spec != spec:
            raise ScaleVecError(
                f"--spec {' '.join(spec)} was given, and --use-checkpoint-args brings the checkpoint's "
                f"(--spec {' '.join(args.spec or ['none'])}): drop one of the two."
            )
        return result

    return load_args_from_checkpoint


def base_checkpoint(current: Session, original):
    def _load_base_checkpoint(load_dir, args, *rest, **kwargs):
        if current.config.active:
            _require_whole(load_dir, args)
        result = original(load_dir, args, *rest, **kwargs)
        state = result[0] if result else None
        saved = state.get("args") if isinstance(state, dict) else None
        if saved is not None:
            if current.restoring:
                _restore(args, saved)
            else:
                _require_same(current, args, saved, load_dir)
                if current.config.active:
                    _require_same_optimizers(args, saved, load_dir)
        return result

    return _load_base_checkpoint


def group_order(current: Session, original):
    """Where the plain optimizers look up the checkpoint's parameter groups."""

    def _filter_and_reorder_param_groups(current_groups, state_dict_groups):
        if current.config.active:
            from megatron_scalevec.audit.groups import check_same_groups

            check_same_groups(current_groups, state_dict_groups)
        return original(current_groups, state_dict_groups)

    return _filter_and_reorder_param_groups


def distributed_state(current: Session, original):
    """Where the distributed optimizer does."""

    def load_state_dict(self, state_dict):
        inner = self.optimizer
        if current.config.active and inner is not None:
            from megatron_scalevec.audit.groups import check_same_groups

            check_same_groups(inner.param_groups, state_dict["optimizer"]["param_groups"])
        return original(self, state_dict)

    return load_state_dict


def _restore(args: Any, saved: Any) -> None:
    """``--use-checkpoint-args``: what the command line leaves open comes from the checkpoint.

    All or nothing: a component of the checkpoint next to a strategy of the command line would be a
    strategy that neither asked for.
    """
    keys = [f"scalevec_{name}" for name in MODEL_FLAGS]
    if all(getattr(args, key, None) is None for key in keys):
        for key in keys:
            setattr(args, key, getattr(saved, key, None))


def _require_whole(load_dir: str | None, args: Any) -> None:
    """Stop before a checkpoint that a killed run, or a full disk, has left incomplete is loaded.

    One rank looks; a rank that leaves takes the others with it.
    """
    initialized = torch.distributed.is_initialized()
    if load_dir is None or (initialized and torch.distributed.get_rank() != 0):
        return
    folder = folder_to_load(load_dir, args)
    if folder is None:
        return  # a first start: Megatron says so, and whether that is an error is its option
    if not folder.is_dir() or any(name.startswith("mp_rank_") for name in os.listdir(folder)):
        return
    problem = missing_parts(folder)
    if problem:
        raise ScaleVecError(not_whole(folder, problem, load_dir))


def _require_same(current: Session, args: Any, saved: Any, load_dir: str) -> None:
    config, was = current.config, ScaleVecConfig.from_namespace(saved)
    if was == config:
        _prepare_for_execution(current, saved, load_dir)
        return
    if was.active or not getattr(args, "finetune", False):
        flags = " ".join(_flags_of(saved)) or "no --scalevec-* flag"
        # Only where one of the two is stock is there a way from the one to the other.
        way = ""
        if not was.active:
            way = ", make a start for it with scalevec unfold, load with --finetune"
        elif not config.active:
            way = ", make a stock checkpoint of it with scalevec fold"
        raise ScaleVecError(
            f"the checkpoint in {load_dir} was trained with {was.describe()}, and this run asks for "
            f"{config.describe()}: give the checkpoint's strategy ({flags}, or --use-checkpoint-args){way}, "
            "or start without --load."
        )
    if config.placement is None:
        raise ScaleVecError(
            f"--finetune from the stock checkpoint in {load_dir}: {config.strategy!r} would drop the trained "
            "scales of its norms; use another strategy, or start without --load."
        )
    say(f"starting from the stock checkpoint in {load_dir}: its norms' scales move into the scale vectors")
    for chunk in current.loading.chunks:
        setattr(chunk, _FROM_STOCK, True)


def _prepare_for_execution(current: Session, saved: Any, load_dir: str) -> None:
    """Have model and optimizer ask for what the other mode of execution has saved."""
    executed, loading = saved_execution(saved), current.loading
    if not current.config.active or executed == current.config.execution or loading is None:
        return
    if loading.execution is None:  # Megatron looks at a checkpoint twice
        from megatron_scalevec.checkpoint.other_execution import loading_other_execution

        say(
            f"the checkpoint in {load_dir} was written with execution {executed}; this run goes on with "
            f"execution {current.config.execution}"
        )
        loading.execution = executed
        loading.meanwhile.enter_context(
            loading_other_execution(loading.wrapped_chunks, loading.optimizer, executed)
        )


def _require_same_optimizers(args: Any, saved: Any, load_dir: str) -> None:
    """Megatron has an optimizer of their own for experts that are spread over ranks, and its loading of the
    optimizer's state ends in a KeyError or in "Expected 2 entries in state dict" between one and two."""
    left_out = ("finetune", "no_load_optim")
    if any(getattr(args, name, False) for name in left_out) or getattr(saved, "no_save_optim", False):
        return
    was, now = (int(getattr(of, "expert_model_parallel_size", None) or 1) for of in (saved, args))
    if getattr(args, "num_experts", None) and (was == 1) != (now == 1):
        raise ScaleVecError(
            f"the checkpoint in {load_dir} was saved with --expert-model-parallel-size {was}, this run asks "
            f"for {now}, and Megatron loads no optimizer state across the step from one expert-parallel rank "
            "to several or back: keep one rank or several, or leave the state behind with --no-load-optim."
        )


def _flags_of(saved: Any) -> list[str]:
    found = []
    for name in MODEL_FLAGS:
        value = getattr(saved, f"scalevec_{name}", None)
        if value is not None:
            found.append(f"--scalevec-{name.replace('_', '-')} {value}")
    return found
