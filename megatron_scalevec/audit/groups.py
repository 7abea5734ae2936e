"""The optimizer's parameter groups, as the audit sees them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from megatron_scalevec.audit.chunks import unwrap
from megatron_scalevec.errors import ScaleVecError

__all__ = [
    "GroupOfParameter",
    "check_group",
    "check_identities",
    "check_same_groups",
    "groups_of_parameters",
    "identity_of",
    "members_of",
    "optimizer_kind",
]

# Class names of the optimizers that Megatron builds, under the names that its command line has for them.
# Names, because a class may come from torch, apex, TransformerEngine or emerging-optimizers.
_KINDS = {
    "Adam": "adam",
    "AdamW": "adam",
    "FusedAdam": "adam",
    "SGD": "sgd",
    "FusedSGD": "sgd",
    "Lion": "lion",
    "TensorParallelMuon": "muon",
    "TensorParallelAdaptiveMuon": "adaptive_muon",
    "SOAP": "soap",
}
_CODES = (*dict.fromkeys(_KINDS.values()), "unknown")
# Optimizers that treat every entry of a parameter by itself; the others are made for matrices.
ELEMENTWISE = ("adam", "sgd", "lion")


class GroupOfParameter(NamedTuple):
    """What the audit keeps of the group that a parameter is in."""

    weight_decay: float  # wd_mult
    learning_rate: float  # max_lr, 0 where the group has none
    optimizer: str  # as on Megatron's command line


def members_of(optimizer: Any) -> Iterator[Any]:
    """Megatron's single optimizers inside a chain, and chains inside of it."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        yield optimizer
    else:
        for member in chained:
            yield from members_of(member)


def _torch_optimizer(member: Any) -> Any:
    """The optimizer of torch's interface that does the work; None for a rank without parameters."""
    # The layer-wise optimizer holds torch's optimizers without Megatron's wrapper around them in fp32.
    return member if isinstance(member, torch.optim.Optimizer) else member.optimizer


def optimizer_kind(optimizer: torch.optim.Optimizer) -> str:
    """An optimizer's name on Megatron's command line, ``unknown`` for a class that is not Megatron's."""
    # Offloading splits the parameters between two optimizers of one kind.
    for part in getattr(optimizer, "sub_optimizers", ()):
        return optimizer_kind(part)
    return _KINDS.get(type(optimizer).__name__, "unknown")


def groups_of_parameters(chunks: list[torch.nn.Module], optimizer: Any) -> dict[int, GroupOfParameter]:
    """``id`` of every trainable model parameter to what is known of its group; none where it has none.

    Megatron's mixed-precision and distributed optimizers hold copies or shards in the groups, so the way
    from a model parameter to its group differs for each kind. Distributed and layer-wise optimizers know
    only the parameters that this rank updates: what the other data-parallel ranks know is added (experts
    have data-parallel ranks of their own), which makes this collective over them.
    """
    params = [p for chunk in chunks for p in unwrap(chunk).parameters() if p.requires_grad]
    found: dict[int, GroupOfParameter] = {}
    sharded = _is_layer_wise(optimizer)
    for member in members_of(optimizer):
        inner = _torch_optimizer(member)
        if inner is None:
            continue
        groups = inner.param_groups
        index_map = getattr(member, "model_param_group_index_map", None)
        if index_map is not None:
            sharded = True
            pairs = [(param, groups[index]) for param, (index, _) in index_map.items()]
        elif hasattr(member, "float16_groups"):
            lists = zip(groups, member.float16_groups, member.fp32_from_fp32_groups)
            pairs = [(param, group) for group, half, single in lists for param in [*half, *single]]
        else:
            pairs = [(param, group) for group in groups for param in group["params"]]
        kind = optimizer_kind(inner)
        for param, group in pairs:
            found[id(param)] = GroupOfParameter(
                float(group["wd_mult"]), float(group.get("max_lr") or 0.0), kind
            )
    if sharded:
        found |= _known_to_others(params, found)
    return {id(param): found[id(param)] for param in params if id(param) in found}


def _is_layer_wise(optimizer: Any) -> bool:
    """Whether some part of it gives whole parameters to single data-parallel ranks."""
    # By name, as not every version has it; of a subclass too, where the optimizer folds.
    if any(base.__name__ == "LayerWiseDistributedOptimizer" for base in type(optimizer).__mro__):
        return True
    return any(map(_is_layer_wise, getattr(optimizer, "chained_optimizers", ())))


def _known_to_others(
    params: list[torch.nn.Parameter], found: dict[int, GroupOfParameter]
) -> dict[int, GroupOfParameter]:
    from megatron.core import parallel_state

    def row(param: torch.nn.Parameter) -> tuple[float, float, float]:
        group = found.get(id(param))
        if group is None:
            return (-1.0, -1.0, -1.0)
        return (group.weight_decay, group.learning_rate, float(_CODES.index(group.optimizer)))

    table = torch.tensor([row(param) for param in params], dtype=torch.float64, device=params[0].device)
    for ranks in (
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_expert_data_parallel_group(),
    ):
        torch.distributed.all_reduce(table, op=torch.distributed.ReduceOp.MAX, group=ranks)
    return {
        id(param): GroupOfParameter(decay, rate, _CODES[int(code)])
        for param, (decay, rate, code) in zip(params, table.tolist())
        if code >= 0
    }


def check_group(name: str, wanted: bool, group: GroupOfParameter | None) -> None:
    """Stop for a scale vector that is not where its class says.

    Raises:
        ScaleVecError: It is in no group, in one whose decay differs, or its optimizer is one for matrices.
    """
    if group is None:
        raise ScaleVecError(f"the scale vector {name} is in no parameter group, so it would never train.")
    if group.optimizer not in ELEMENTWISE:
        raise ScaleVecError(
            f"the scale vector {name} is updated by an optimizer that is not known to treat its entries one "
            f"by one ({group.optimizer}); give one-dimensional parameters to Adam (config_overrides)."
        )
    if (group.weight_decay != 0.0) != wanted:
        raise ScaleVecError(
            f"the scale vector {name} {'should' if wanted else 'should not'} decay, but the optimizer's "
            f"group has wd_mult {group.weight_decay:g}: another rule for weight decay is in the way "
            "(config_overrides). Remove it, or use --scalevec-weight-decay stock."
        )


def identity_of(group: dict[str, Any]) -> dict[str, Any]:
    """What Megatron tells a parameter group by when it loads an optimizer's state, key by key.

    The keys are ``megatron.core.optimizer.optimizer.param_group_identifier_keys`` of the version in use;
    NeMo writes some of them with ``pre_`` before the name.

    Raises:
        ScaleVecError: The group lacks a key that this version cannot do without.
    """
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    identity = {}
    for key in param_group_identifier_keys:
        if key not in group and f"pre_{key}" not in group and key in _STRUCTURAL_KEYS:
            raise ScaleVecError(
                f"a parameter group has no {key!r}, without which Megatron cannot load its state again; "
                "build groups with Megatron's get_megatron_optimizer."
            )
        identity[key] = group.get(key, group.get(f"pre_{key}"))
    return identity


# Up to 0.18 these are all; later versions add keys that a group may lack.
_STRUCTURAL_KEYS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")


def check_identities(optimizer: Any) -> None:
    """Stop for two groups that Megatron would take for one when it loads an optimizer's state.

    Raises:
        ScaleVecError: There are two, or a group lacks a key.
    """
    for member in members_of(optimizer):
        inner = _torch_optimizer(member)
        seen: dict[tuple[Any, ...], int] = {}
        for number, group in enumerate(inner.param_groups if inner is not None else ()):
            identity = identity_of(group)
            first = seen.setdefault(tuple(identity.values()), number)
            if first != number:
                known = ", ".join(f"{key} {value}" for key, value in identity.items() if value is not None)
                raise ScaleVecError(
                    f"parameter groups {first} and {number} of the {optimizer_kind(inner)} optimizer differ "
                    f"in nothing that Megatron compares when it loads their state ({known}), so one of them "
                    "would get the other's: drop what sets them apart (before megatron-core 0.19 that is "
                    "any learning rate of their own: --decoupled-lr, --use-mup), or do without scale vectors."
                )


def check_same_groups(current: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Stop for a checkpoint whose parameter groups are not those of the run.

    Args:
        current: ``param_groups`` of the optimizer that is there.
        saved: Those of the checkpoint, in any order.

    Raises:
        ScaleVecError: One has a group that the other has not; the message names the first of each.
    """
    ours, theirs = ([identity_of(group) for group in groups] for groups in (current, saved))
    here = next((identity for identity in ours if identity not in theirs), None)
    there = next((identity for identity in theirs if identity not in ours), None)
    if here is None and there is None:
        return
    differing = {key for key in (here or there) if here is None or there is None or here[key] != there[key]}
    if here and there and differing <= {"max_lr", "min_lr"}:
        way = (
            "megatron-core 0.19 knows a group by its learning rates as well, so give the checkpoint's --lr "
            "and --min-lr, or resume with --no-load-optim"
        )
    else:
        way = (
            "give the checkpoint's options for the optimizer, its learning rates and weight decay, or resume "
            "with --no-load-optim"
        )
    raise ScaleVecError(
        f"the optimizer's state in the checkpoint has {_described(there)}, and this run has "
        f"{_described(here)}: {way}."
    )


def _described(identity: dict[str, Any] | None) -> str:
    if identity is None:
        return "no parameter group for it"
    known = ", ".join(f"{key} {value}" for key, value in identity.items() if value not in (None, False))
    return f"a parameter group with {known}"
