"""A model whose checkpoints stock Megatron refuses, because it would compute something else from them."""

from __future__ import annotations

from typing import Any

import torch

from megatron_scalevec.checkpoint.joined import parts_of_joined, store_joined
from megatron_scalevec.checkpoint.keys import GUARD, GUARD_SHAPE, WEIGHT, raw_key
from megatron_scalevec.execution.folds import folds_of, own_folds
from megatron_scalevec.layers.common import Folded, mixed_class
from megatron_scalevec.layers.linear import FoldedLinear, leaf_class
from megatron_scalevec.layers.norm import ScaledNorm
from megatron_scalevec.vectors import was_added

__all__ = ["Guarded", "execution_of", "foreign_weights", "guards_for", "protect", "scaled_weights"]


def execution_of(model: torch.nn.Module) -> str:
    """Where W_eff is formed: by ``autograd``, or in the ``optimizer``, whose model holds W_eff itself."""
    return "optimizer" if any(folds_of(model)) else "autograd"


def scaled_weights(model: torch.nn.Module) -> dict[str, Any]:
    """Weights that scale vectors act on, in either mode of execution.

    Returns:
        Name to the tensor-parallel group that shares the weight, None where every rank holds it whole.
    """
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, Folded):
            group = module.group_of(module) if isinstance(module, FoldedLinear) else None
            scaled = module.scaled_weights()
            for name, param in module.named_parameters(recurse=False):
                if any(param is weight for weight in scaled):
                    found[f"{path}.{name}"] = group
        for fold in own_folds(module):
            found[f"{path}.{fold.weight_name}"] = fold.tp_group
    return found


def foreign_weights(model: torch.nn.Module, execution: str) -> dict[str, Any]:
    """Weights that a stock model would take for something else, by name.

    These are the raw weights of everything with scale vectors (linears, every expert's, routers, the gates
    of shared experts), norms whose scale has moved into a vector of ours (what is left is one), and the
    q/k/v weight of an attention that has got norms on its heads. The strategies without any, ``none`` and
    mostly ``iwd``, leave a checkpoint that stock Megatron reads correctly. So do, as far as raw weights go,
    runs that fold inside the optimizer: their weights are W_eff.

    Args:
        model: With scale vectors.
        execution: Of the run that has written, or is to write, the checkpoint.

    Returns:
        As :func:`scaled_weights`.
    """
    found = scaled_weights(model) if execution == "autograd" else {}
    for path, module in model.named_modules():
        if isinstance(module, ScaledNorm):
            found[f"{path}.{WEIGHT}"] = None
        elif hasattr(module, "linear_qkv"):
            norms = (getattr(module, f"{branch}_layernorm", None) for branch in "qkv")
            weights = (getattr(norm, WEIGHT, None) for norm in norms)
            if any(weight is not None and was_added(weight) for weight in weights):
                linear = module.linear_qkv
                found[f"{path}.linear_qkv.{WEIGHT}"] = leaf_class(linear).group_of(linear)
    return found


class Guarded:
    """Mixin over ``GPTModel``: renames :func:`foreign_weights` on their way out, and back on their way in.

    In torch_dist checkpoints the weight's key is another, and the stock key holds a guard (see
    :mod:`megatron_scalevec.checkpoint.keys`); the optimizer's keys follow those of the model. In the format
    ``torch`` the weight gets one more axis of size one: when loading fails there, Megatron tries again
    without strictness, and only a wrong shape still fails then.
    """

    scalevec_starts_from_stock = False
    """Set while a stock checkpoint is loaded: the model then asks for a stock model's tensors."""

    scalevec_loads_execution: str | None = None
    """Set while a checkpoint of the other mode of execution is loaded: that mode, whose keys it has."""

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As the model's, with the keys of the class's description."""
        result = super().sharded_state_dict(prefix, *args, **kwargs)
        if self.scalevec_starts_from_stock:
            added = {prefix + name for name, param in self.named_parameters() if was_added(param)}
            return {name: entry for name, entry in result.items() if name not in added}
        execution = self.scalevec_loads_execution or execution_of(self)
        foreign = foreign_weights(self, execution).items()
        stored = [(part, group) for name, group in foreign for part in parts_of_joined(name)]
        for name, group in stored:
            entry = result[prefix + name]
            for number, guard in enumerate(guards_for(entry, group)):
                result[f"{prefix}{GUARD}.{name}" + (f".{number}" if number else "")] = guard
            entry.key = raw_key(entry.key)
        return result

    def state_dict_for_save_checkpoint(self, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As the model's, for the format ``torch``."""
        result = super().state_dict_for_save_checkpoint(prefix, *args, **kwargs)
        for name in foreign_weights(self, execution_of(self)):
            result[prefix + name] = result[prefix + name][None]
        return result

    def load_state_dict(self, state_dict, *args, **kwargs):
        """As the model's; from a stock checkpoint, the scales of norms move into the vectors, and from one
        of the other mode of execution weights become what they are in this one."""
        if not self.scalevec_starts_from_stock:
            result = super().load_state_dict(state_dict, *args, **kwargs)
            if self.scalevec_loads_execution is not None:
                from megatron_scalevec.checkpoint.other_execution import adopt_weights

                adopt_weights(self)
            return result
        from megatron_scalevec.checkpoint.from_stock import absorb_norms

        own = {name: param.detach() for name, param in self.named_parameters() if was_added(param)}
        result = super().load_state_dict({**own, **state_dict}, *args, **kwargs)
        absorb_norms(self)
        return result

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        for key in [key for key in state_dict if key.startswith(f"{prefix}{GUARD}.")]:
            del state_dict[key]
        for name in foreign_weights(self, self.scalevec_loads_execution or execution_of(self)):
            loaded = state_dict.get(prefix + name)
            if loaded is not None and loaded.dim() == self.get_parameter(name).dim() + 1:
                state_dict[prefix + name] = loaded.squeeze(0)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def protect(model: torch.nn.Module) -> None:
    """Make a converted model's checkpoints safe."""
    model.__class__ = mixed_class(Guarded, type(model))
    store_joined(model)


def guards_for(entry: Any, group: Any) -> list[Any]:
    """Guards for the places of a weight, stacked as the weight is over layers and experts.

    Args:
        entry: The weight's; a factory where gate and up, or the parts of an in-projection, are stored apart.
        group: Of the ranks that share the weight. All of them hold the guards, and one of them saves them.
    """
    from megatron.core.dist_checkpointing import ShardedTensor

    parts = [entry] if isinstance(entry, ShardedTensor) else entry.build()
    return [_guard(part, group) for part in {part.key: part for part in parts}.values()]


def _guard(near: Any, group: Any) -> Any:
    from megatron.core.dist_checkpointing import ShardedTensor

    stacked = near.prepend_axis_num
    pipeline, tensor, data = near.replica_id
    return ShardedTensor.from_rank_offsets(
        near.key,
        torch.zeros(GUARD_SHAPE, device=near.data.device if near.data is not None else None),
        *((axis, near.global_offset[axis], near.global_shape[axis]) for axis in range(stacked)),
        replica_id=(pipeline, tensor if group is None else group.rank(), data),
        prepend_axis_num=stacked,
    )
