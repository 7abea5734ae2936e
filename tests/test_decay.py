"""The weight-decay split: roles to rules, and Megatron's own merging of rules."""

import pytest
import torch

from megatron_scalevec.decay import decays, with_decaying_vectors
from megatron_scalevec.vectors import VectorInfo, set_role

# role, is a vector of the strategy -> decays under split, all, none (None: Megatron's rule decides)
GOLDEN = {
    ("input", True): (True, True, False),
    ("output", False): (False, True, False),
    ("output", True): (False, True, False),
    ("direction", True): (False, False, False),
    ("bias", False): (None, None, None),
    ("stock", False): (None, None, None),
    (None, False): (None, None, None),
}


@pytest.mark.parametrize(("key", "expected"), GOLDEN.items())
def test_golden_table(key, expected):
    assert tuple(decays(*key, policy) for policy in ("split", "all", "none")) == expected
    assert decays(*key, "stock") is (False if key[0] == "direction" else None)


def _parameters():
    def param(*shape, role=None, vector=False):
        p = torch.nn.Parameter(torch.ones(*shape))
        if role:
            info = VectorInfo("mlp", "up", "in", 1, "linear") if vector else None
            set_role(p, role, info)
        return p

    return {
        "decoder.layers.0.mlp.linear_fc1.weight": param(4, 4),
        "decoder.layers.0.mlp.linear_fc1.bias": param(4, role="bias"),
        "decoder.layers.0.mlp.linear_fc1.gamma_in_up": param(4, role="input", vector=True),
        "decoder.layers.0.self_attention.q_layernorm.weight": param(4, role="output"),
        "decoder.final_layernorm.weight": param(4, role="stock"),
    }


@pytest.mark.parametrize(
    ("policy", "decaying"),
    [
        ("stock", {"linear_fc1.weight"}),
        ("split", {"linear_fc1.weight", "gamma_in_up"}),
        ("all", {"linear_fc1.weight", "gamma_in_up", "q_layernorm.weight"}),
        ("none", {"linear_fc1.weight"}),
    ],
)
def test_rules_of_megatron_with_the_policy(policy, decaying):
    """What is left without any override is in the default group and decays."""
    from megatron.core.optimizer import OptimizerConfig, get_standard_config_overrides

    overrides = with_decaying_vectors(get_standard_config_overrides(OptimizerConfig()), policy)
    found = {
        name
        for name, param in _parameters().items()
        if not any(key.matches(param, name) for key in overrides)
    }
    assert {name for name in found for end in decaying if name.endswith(end)} == found
    assert len(found) == len(decaying)


def test_a_second_rule_beside_the_standard_one_is_what_megatron_refuses():
    """The reason for replacing the rule instead of adding one."""
    from megatron.core.optimizer_param_scheduler import (
        ParamGroupOverride,
        combine_param_group_overrides,
    )

    with pytest.raises(ValueError):
        combine_param_group_overrides([ParamGroupOverride(wd_mult=0.0), ParamGroupOverride(wd_mult=1.0)])


def test_other_overrides_stay_as_they_are():
    from megatron.core.optimizer import OptimizerConfig, get_standard_config_overrides

    config = OptimizerConfig(decoupled_lr=0.1, lr=0.2)
    standard = get_standard_config_overrides(config)
    ours = with_decaying_vectors(standard, "split")
    assert list(ours.values()) == list(standard.values())
    kept = [key for key in standard if key in ours]
    assert len(kept) == 1 and standard[kept[0]].get("max_lr") == 0.1


def test_a_parameter_has_one_role():
    param = torch.nn.Parameter(torch.ones(2))
    set_role(param, "input")
    set_role(param, "input")
    with pytest.raises(ValueError, match="already has the role"):
        set_role(param, "output")
    with pytest.raises(ValueError, match="is not one of"):
        set_role(torch.nn.Parameter(torch.ones(2)), "scale")
