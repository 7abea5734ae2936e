"""Saving and loading the distributed optimizer when its inner optimizer is torch's Adam.

Without TransformerEngine and apex Megatron uses :class:`torch.optim.AdamW`, which keeps a tensor
``step`` per parameter where theirs keep one number per group. Three places in
``DistributedOptimizer`` do not expect what follows from that. A fourth fails in fp32 on any device,
which is what one runs on a CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_scalevec.patching import PatchSet

__all__ = ["patch_distributed_optimizer"]


def patch_distributed_optimizer(patches: PatchSet) -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    patches.wrap(DistributedOptimizer, "state_dict", _make_state_dict)
    patches.wrap(DistributedOptimizer, "load_state_dict", _make_load_state_dict)
    patches.wrap(DistributedOptimizer, "_set_main_param_and_optimizer_states", _make_set_parameter_states)


def _make_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Upstream reads the one step count that all states agree on. An optimizer that has not
        # stepped has no states; loading asks it for its state dict all the same.
        _create_states(getattr(self, "optimizer", None))
        return original(self, *args, **kwargs)

    return state_dict


def _create_states(optimizer: Any) -> None:
    offloading = getattr(optimizer, "sub_optimizers", None)  # HybridDeviceOptimizer
    if offloading is not None and not optimizer.state:
        for part in offloading:
            _create_states(part)
        optimizer._sync_sub_optimizers_state_to_hdo()
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)) or optimizer.state:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def _make_load_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        # Upstream puts one step tensor into all states. Adam increments it in place, once for every
        # parameter, so after loading each state gets its own.
        for state in getattr(getattr(self, "optimizer", None), "state", {}).values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()
        return result

    return load_state_dict


def _make_set_parameter_states(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        # The step has been loaded already, from the parameter groups. Upstream copies every tensor
        # that Adam's state has, but what comes with a parameter's tensors is no step (fully
        # reshardable) or that of the fresh optimizer (default). Offer it its own, a copy onto
        # itself.
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state:
            tensors = {**tensors, "step": state["step"]}
        # In fp32 the main parameter is a view of the model's, which autograd does not let be
        # written to; loading in the default sharding does not turn autograd off.
        with torch.no_grad():
            return original(self, model_param, tensors)

    return set_states
