"""Where NeMo's model and optimizer meet: the weight decay of a strategy, and the audit.

NeMo hands ``optim.no_weight_decay_cond`` to megatron-core's ``get_megatron_optimizer``, which it looks up
when it needs it. The hook here gives a model with scale vectors its strategy's condition, and leaves every
other model alone.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from megatron_scalevec.config import WEIGHT_DECAYS, choose
from megatron_scalevec.decay import no_weight_decay_cond
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.patching import PatchSet

__all__ = ["DoesNotDecay", "install", "uninstall"]

_patches = PatchSet()


class DoesNotDecay:
    """Says which parameters are left out of weight decay; an ``optim.no_weight_decay_cond``.

    Args:
        policy: A key of :data:`megatron_scalevec.config.WEIGHT_DECAYS`.

    Raises:
        ScaleVecError: There is no such policy.
    """

    def __init__(self, policy: str = "split") -> None:
        self.policy = choose("weight decay", policy, WEIGHT_DECAYS)
        # A model without vectors, which this would not fit, is noticed by the hook.
        install()

    def __call__(self, name: str, param: torch.nn.Parameter) -> bool:
        return no_weight_decay_cond(self.policy)(name, param)

    def __repr__(self) -> str:
        return f"megatron_scalevec.nemo.no_weight_decay(policy={self.policy!r})"


def install() -> None:
    """Put the hook in place; a second call changes nothing."""
    if not len(_patches):
        import megatron.core.optimizer

        _patches.wrap(megatron.core.optimizer, "get_megatron_optimizer", _get_megatron_optimizer)


def uninstall() -> None:
    """Take the hook out again."""
    _patches.undo()


def _get_megatron_optimizer(original):
    @functools.wraps(original)
    def get_megatron_optimizer(config, model_chunks, no_weight_decay_cond=None, *args, **kwargs):
        from megatron_scalevec.audit import audit
        from megatron_scalevec.convert import applied_config

        asked = applied_config(model_chunks[0])
        if asked is None:
            if isinstance(no_weight_decay_cond, DoesNotDecay):
                raise ScaleVecError(
                    "optim.no_weight_decay_cond asks for the weight decay of scale vectors, and the model "
                    "has none: set model.config.transformer_layer_spec to megatron_scalevec.nemo.unified, "
                    "for example, or drop it."
                )
            return original(config, model_chunks, no_weight_decay_cond, *args, **kwargs)
        _refuse(config, asked, no_weight_decay_cond)
        condition = DoesNotDecay(asked.weight_decay)
        optimizer = original(config, model_chunks, condition, *args, **kwargs)
        found = audit(model_chunks, optimizer, config=asked)
        if torch.distributed.get_rank() == 0:
            print(found.table(), flush=True)
        return optimizer

    return get_megatron_optimizer


def _refuse(optimizer_config: Any, asked: Any, condition: Any) -> None:
    from megatron_scalevec.support import refuse_unsupported
    from megatron_scalevec.versions import megatron_version

    refuse_unsupported(optimizer_config, asked, megatron_version())
    if condition is not None and getattr(condition, "policy", None) != asked.weight_decay:
        raise ScaleVecError(
            f"the model's strategy asks for weight decay {asked.weight_decay!r}, and "
            f"optim.no_weight_decay_cond is {condition!r}: drop it, the strategy brings its own."
        )
