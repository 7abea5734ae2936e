"""Names of a checkpoint's tensors, and those that stock Megatron must not find.

A stock model asks for ``linear_qkv.weight`` and nothing else, so a raw weight under that key would load
without a word and lose its scale vectors. It is therefore stored as ``linear_qkv.scalevec_weight``, and the
stock key holds a *guard*, an empty tensor of a shape that no weight has. Megatron compares shapes whatever
``--dist-ckpt-strictness`` says, while several of its values pass over keys that are missing.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = [
    "GUARD",
    "GUARD_SHAPE",
    "RAW_MASTER",
    "WEIGHT",
    "is_raw",
    "is_raw_master",
    "master_key",
    "raw_key",
    "raw_master_key",
    "saved_execution",
    "stacked_axes",
    "stock_key",
]

WEIGHT = "weight"
_RAW = "scalevec_"
RAW_MASTER = "scalevec_raw"
"""Part of the key of every raw master whose weight is W_eff."""
GUARD = "scalevec_guard"
GUARD_SHAPE = (1, 1, 1)
"""Behind the axes over which layers and experts are stacked. Weights have one or two of their own there."""


def raw_key(key: str) -> str:
    """``a.b.weight`` to ``a.b.scalevec_weight``, ``a.gate_weight`` to ``a.scalevec_gate_weight``,
    ``a.weight.z`` (a part of a weight) to ``a.scalevec_weight.z``. Keys of optimizer states end in the
    parameter's."""
    stem, last, part = _split(key)
    if not last.endswith(WEIGHT) or last.startswith(_RAW):
        raise ValueError(f"{key} is no weight's key")
    return f"{stem}{_RAW}{last}{part}"


def is_raw(key: str) -> bool:
    """Whether a key is one that :func:`raw_key` makes."""
    _, last, _ = _split(key)
    return last.startswith(_RAW) and last.endswith(WEIGHT)


def stock_key(key: str) -> str:
    """The inverse of :func:`raw_key`; any other key as it is."""
    stem, last, part = _split(key)
    return f"{stem}{last.removeprefix(_RAW)}{part}" if is_raw(key) else key


def _split(key: str) -> tuple[str, str, str]:
    """What is before the weight's name, that name, and the part of the weight behind it."""
    words = key.split(".")
    at = len(words) - (2 if len(words) > 1 and words[-2].endswith(WEIGHT) else 1)
    before, behind = words[:at], words[at + 1 :]
    return "".join(f"{word}." for word in before), words[at], "".join(f".{word}" for word in behind)


def stacked_axes(key: str) -> int:
    """Axes over which a tensor's layers and experts are stacked: their numbers are not in the key then."""
    return len(re.findall(r"\b(?:layers|experts\.experts)\.(?!\d)", key))


def raw_master_key(prefix: str, key: str) -> str:
    """Where a run that folds inside its optimizer keeps the master of a weight, which is raw.

    Args:
        prefix: Of the state that holds masters, up to the parameter's key.
        key: The weight's, in the model.
    """
    return f"{prefix}{RAW_MASTER}.{key}"


def is_raw_master(key: str) -> bool:
    """Whether a key is that of a raw master, of one weight or of a bucket of them."""
    return RAW_MASTER in key.split(".")


def master_key(key: str) -> str:
    """The key that a raw master would have if its weight were raw too."""
    return ".".join(word for word in key.split(".") if word != RAW_MASTER)


def saved_execution(args: Any) -> str:
    """The mode of execution of the run that wrote a checkpoint: ``autograd`` (its weights are raw W) or
    ``optimizer`` (they are W_eff).

    Args:
        args: The arguments stored in it.
    """
    return getattr(args, "scalevec_executed", None) or "autograd"
