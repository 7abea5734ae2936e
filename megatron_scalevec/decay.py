"""Split weight decay: scale vectors of Input-Norms decay, those of Output-Norms do not.

Megatron (0.16 and later) decides weight decay by ``config_overrides``, a mapping from parameter keys to
settings. Its standard rule, "one-dimensional parameters get wd_mult 0", is replaced here by the same rule
minus the vectors that decay. A second rule next to it would not do: Megatron refuses two different
settings for one parameter. Nor would ``wd_mult=1.0`` on the vectors: it makes a second group that Megatron
cannot tell from the default group when an optimizer state is loaded, and one of the two loses its
parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron_scalevec.config import WEIGHT_DECAYS
from megatron_scalevec.vectors import Role, role_of, vector_info

__all__ = [
    "decays",
    "no_weight_decay_cond",
    "param_decays",
    "with_decaying_vectors",
    "with_learning_rates",
]


def decays(role: Role | None, is_vector: bool, policy: str) -> bool | None:
    """Whether a 1-D parameter of this role decays; None where Megatron's own rule decides.

    Args:
        role: The parameter's role.
        is_vector: Whether it is a scale vector of the strategy (γ_in, γ_out or a norm's γ at a site).
        policy: A key of :data:`megatron_scalevec.config.WEIGHT_DECAYS`.

    A direction never decays: decay would change its length, which means nothing, and with it the size of
    its steps.
    """
    if role == "direction":
        return False
    if role not in ("input", "output") or policy == "stock":
        return None
    if policy == "split":
        return role == "input"
    if policy == "all":
        return is_vector or role == "output"
    if policy == "none":
        return False
    raise ValueError(f"unknown weight-decay policy {policy!r}")


def param_decays(param: torch.nn.Parameter, policy: str) -> bool | None:
    """:func:`decays` for a parameter that carries its role."""
    return decays(role_of(param), vector_info(param) is not None, policy)


def no_weight_decay_cond(policy: str) -> Callable[[str, torch.nn.Parameter], bool]:
    """The condition form of the split, for callers of megatron-core up to 0.15.

    Those versions have no ``config_overrides``: their ``get_megatron_optimizer`` takes a function of a
    parameter's name and the parameter, ``no_weight_decay_cond``, that says which ones do not decay.

    Args:
        policy: A key of :data:`megatron_scalevec.config.WEIGHT_DECAYS`.

    Returns:
        A function that is true for a parameter that does not decay. Where the policy leaves a parameter to
        Megatron it is Megatron's own default: one-dimensional parameters and biases do not decay.

    Raises:
        ValueError: There is no such policy.
    """
    if policy not in WEIGHT_DECAYS:
        raise ValueError(f"unknown weight-decay policy {policy!r}")

    def does_not_decay(name: str, param: torch.nn.Parameter) -> bool:
        own = param_decays(param, policy)
        return name.endswith(".bias") or param.dim() == 1 if own is None else not own

    return does_not_decay


def with_learning_rates(
    overrides: Mapping[Any, Any], multipliers: Mapping[str, float], optimizer_config: Any
) -> dict[Any, Any]:
    """Add a learning rate of its own for the scale vectors of each role.

    Args:
        overrides: Megatron's, for example from :func:`with_decaying_vectors`.
        multipliers: Role to factor on ``lr`` and ``min_lr``.
        optimizer_config: Megatron's ``OptimizerConfig``.

    Only for Megatron 0.19 and later: before, two groups that differ in their learning rate alone are not
    told apart when an optimizer state is loaded.
    """
    if not multipliers:
        return dict(overrides)
    from megatron.core.optimizer import ParamKey
    from megatron.core.optimizer.optimizer_config import ParamPredicate

    result = dict(overrides)
    for role, factor in multipliers.items():

        def has_role(param, role=role):
            return vector_info(param) is not None and role_of(param) == role

        key = ParamKey(predicate=ParamPredicate(name=f"scalevec_lr_{role}", fn=has_role))
        result[key] = {
            "max_lr": optimizer_config.lr * factor,
            "min_lr": (optimizer_config.min_lr or 0.0) * factor,
        }
    return result


def with_decaying_vectors(overrides: Mapping[Any, Any], policy: str) -> dict[Any, Any]:
    """Megatron's standard overrides with the policy's vectors taken out of the no-decay rule.

    Args:
        overrides: What ``get_standard_config_overrides`` returned.
        policy: A key of :data:`megatron_scalevec.config.WEIGHT_DECAYS`.

    Returns:
        A new mapping. Decaying vectors match no rule for weight decay any more, so they join the default
        group; what such a rule says besides holds for them as before. Those that the policy forbids to decay
        get a rule of their own, with the standard one's value. ``stock`` returns the overrides unchanged.
    """
    if policy == "stock":
        return dict(overrides)
    from megatron.core.optimizer import ParamKey
    from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate

    def rule(name: str, matches: Callable[[torch.nn.Parameter, str], bool]) -> ParamKey:
        # Megatron takes two predicates of one name for the same.
        return ParamKey(
            with_name_predicate=ParamWithNamePredicate(name=f"scalevec_{name}_{policy}", fn=matches)
        )

    result = {}
    for number, (key, override) in enumerate(overrides.items()):
        if override.get("wd_mult") != 0.0:
            result[key] = override
            continue

        def matches(param, name, key=key):
            return key.matches(param, name)

        def matches_and_stays(param, name, key=key):
            return key.matches(param, name) and not param_decays(param, policy)

        result[rule(f"no_decay_{number}", matches_and_stays)] = override
        rest = {field: value for field, value in override.items() if field != "wd_mult"}
        if rest:
            result[rule(f"no_decay_{number}_else", matches)] = rest
    # Where Megatron's rules would let decay what the policy does not.
    result[rule("never", lambda param, name: param_decays(param, policy) is False)] = {"wd_mult": 0.0}
    return result
