"""Layers that a spec has built and that still wait for their scale vectors.

A layer spec reaches single layers, while a strategy is a property of the whole model: its final norm, its
multi-token-prediction block, its weight decay. So a spec only marks the attention of its layers, and the
marked model is converted as a whole, by the same call as everywhere else. A mark that nobody took off is
never silent: the attention refuses to run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.errors import ScaleVecError

__all__ = ["MARK", "pending_class", "pending_config", "released"]

MARK = "scalevec_config"
"""The parameter of a marked attention's spec, which specs carry through copies."""

_WAITING = "scalevec_pending"


class _Pending:
    """Mixed into a marked attention class; taken off again when the vectors are there."""

    def __init__(self, *args: Any, scalevec_config: ScaleVecConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        setattr(self, _WAITING, scalevec_config)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ScaleVecError(
            f"the layer spec asks for scale vectors ({getattr(self, _WAITING).describe()}), and nothing has "
            "built them: that happens at the end of GPTModel's construction, so use the spec in a GPTModel."
        )


@functools.cache
def pending_class(attention: type) -> type:
    """The marked form of an attention class. It takes the configuration as ``scalevec_config``."""
    return type(f"Pending{attention.__name__}", (_Pending, attention), {"__doc__": _Pending.__doc__})


def _waiting(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if isinstance(module, _Pending)]


def pending_config(model: torch.nn.Module) -> ScaleVecConfig | None:
    """What the model's layers wait for, None where none does."""
    for module in _waiting(model):
        return getattr(module, _WAITING)
    return None


@contextmanager
def released(model: torch.nn.Module, config: ScaleVecConfig) -> Iterator[None]:
    """Take the marks off while the model is converted; they are back if that fails.

    Raises:
        ScaleVecError: The spec asked for something else than ``config``.
    """
    waiting = _waiting(model)
    for module in waiting:
        wanted = getattr(module, _WAITING)
        if wanted != config:
            raise ScaleVecError(
                f"the model's layer spec asks for {wanted.describe()}, and {config.describe()} was asked for "
                "as well; drop one of the two."
            )
    marked = [(module, type(module)) for module in waiting]
    for module, kind in marked:
        module.__class__ = kind.__bases__[1]
    try:
        yield
    except BaseException:
        for module, kind in marked:
            module.__class__ = kind
        raise
    for module in waiting:
        delattr(module, _WAITING)
