"""What is said of a module that scale vectors cannot be built on."""

from __future__ import annotations

import torch

from megatron_scalevec.errors import ScaleVecError

__all__ = ["unknown_class"]


def unknown_class(path: str, module: torch.nn.Module, expected: str) -> ScaleVecError:
    """The error for a module of a class that this version does not know.

    Args:
        path: Its name in the model.
        module: The module.
        expected: What would have been fine there.
    """
    return ScaleVecError(
        f"{path} is a {type(module).__module__}.{type(module).__name__}, where this version builds scale "
        f"vectors on {expected} only; nothing was changed. Run without --scalevec-strategy, or with a "
        "model of that kind."
    )
