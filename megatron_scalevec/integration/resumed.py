"""What the checkpoint that a run is about to load says, before anything is built."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megatron_scalevec.checkpoint.keys import saved_execution
from megatron_scalevec.checkpoint.layout import TRACKER_FILE, folder_to_load
from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.errors import ScaleVecError

__all__ = ["execution_to_keep"]

# All others get Megatron's layer-wise optimizer where there are data-parallel ranks to share the layers.
_NEVER_LAYER_WISE = ("adam", "sgd")


def execution_to_keep(args: Any) -> tuple[str, str] | None:
    """The mode of execution in which the run to be resumed was trained, and the folder that says so.

    A run that is resumed with its optimizer's state goes on bit by bit in its own mode only. With weights
    alone, either mode is as good, but for the layer-wise optimizer, which loads its own mode's.

    Args:
        args: Megatron's, validated.

    Returns:
        None where there is no such run: nothing is there, it is stock, or it does not say.
    """
    load, starts_anew = _load(args)
    folder = _folder(load, args)
    saved = None if folder is None else _saved_arguments(folder)
    if saved is None or not ScaleVecConfig.from_namespace(saved).active:
        return None
    if getattr(args, "optimizer", "adam") in _NEVER_LAYER_WISE:
        weights_alone = starts_anew or getattr(args, "no_load_optim", False)
        if weights_alone or getattr(saved, "scalevec_executed", None) is None:
            return None
    return saved_execution(saved), str(folder)


def _load(args: Any) -> tuple[str | None, bool]:
    """What Megatron will load from, and whether it will fine-tune: always from a pretrained checkpoint."""
    load, pretrained = (getattr(args, name, None) for name in ("load", "pretrained_checkpoint"))
    if pretrained and not (load and os.path.isfile(os.path.join(load, TRACKER_FILE))):
        return pretrained, True
    return load, bool(getattr(args, "finetune", False))


def _folder(load: str | None, args: Any) -> Path | None:
    """Of the iteration that Megatron will load."""
    if not load:
        return None
    try:
        folder = folder_to_load(load, args)
    except ScaleVecError:
        return None  # what is wrong with it is said when it is loaded
    return folder if folder is not None and folder.is_dir() else None


def _saved_arguments(folder: Path) -> Any:
    import torch
    from megatron.core import dist_checkpointing, safe_globals
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        safe_globals.register_safe_globals()
        # Of the format torch, which a run that goes on in torch_dist may load; tensors are not read.
        for file in sorted(folder.glob("mp_rank_*/model_optim_rng.pt")):
            return torch.load(file, map_location="cpu", mmap=True).get("args")
        return dist_checkpointing.load_common_state_dict(str(folder)).get("args")
    except (Exception, CheckpointException):  # which is no Exception
        # Of an unknown format, or not whole: the run stops when it loads it, with the reason.
        return None
