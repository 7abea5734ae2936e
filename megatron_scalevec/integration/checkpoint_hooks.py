"""Hooks on loading: a checkpoint knows its strategy.

Each function takes the session and Megatron's own function, and returns what stands in its place.
"""

from __future__ import annotations

from typing import Any

from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.integration.arguments import MODEL_FLAGS
from megatron_scalevec.integration.session import Session

__all__ = ["base_checkpoint", "distributed_state", "group_order", "load_args"]


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
        result = original(load_dir, args, *rest, **kwargs)
        state = result[0] if result else None
        saved = state.get("args") if isinstance(state, dict) else None
        if saved is not None:
            if current.restoring:
                _restore(args, saved)
            else:
                _require_same(current.config, saved, load_dir)
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


def _require_same(config: ScaleVecConfig, saved: Any, load_dir: str) -> None:
    was = ScaleVecConfig.from_namespace(saved)
    if was != config:
        flags = " ".join(_flags_of(saved)) or "no --scalevec-* flag"
        # Only where one of the two is stock is there a way from the one to the other.
        way = ""
        if not was.active:
            way = ", make a checkpoint with scale vectors of it first (scalevec unfold)"
        elif not config.active:
            way = ", make a stock checkpoint of it first (scalevec fold)"
        raise ScaleVecError(
            f"the checkpoint in {load_dir} was trained with {was.describe()}, and this run asks for "
            f"{config.describe()}: give the checkpoint's strategy ({flags}, or --use-checkpoint-args){way}, "
            "or start without --load."
        )


def _flags_of(saved: Any) -> list[str]:
    found = []
    for name in MODEL_FLAGS:
        value = getattr(saved, f"scalevec_{name}", None)
        if value is not None:
            found.append(f"--scalevec-{name.replace('_', '-')} {value}")
    return found
