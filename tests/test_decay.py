"""The weight-decay split: roles to rules, and Megatron's own merging of rules."""

import pytest
import torch

from megatron_scalevec.decay import decays, no_weight_decay_cond, with_decaying_vectors
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


@pytest.mark.parametrize("policy", ["stock", "split", "all", "none"])
def test_the_condition_form_says_the_same(policy):
    """For callers that hand a function of name and parameter to Megatron."""
    from megatron.core.optimizer import OptimizerConfig, get_standard_config_overrides

    overrides = with_decaying_vectors(get_standard_config_overrides(OptimizerConfig()), policy)
    does_not_decay = no_weight_decay_cond(policy)
    for name, param in _parameters().items():
        assert does_not_decay(name, param) == any(key.matches(param, name) for key in overrides), name


def test_the_condition_form_without_megatron():
    """In a process of its own, where Megatron cannot even be imported."""
    import subprocess
    import sys

    code = """
import sys
sys.modules["megatron"] = None
import torch
from megatron_scalevec.decay import no_weight_decay_cond
from megatron_scalevec.vectors import VectorInfo, add_vector

linear = torch.nn.Linear(3, 2)
info = VectorInfo("mlp", "up", "in", 1, "linear", "unit")
add_vector(linear, "gamma_in_up", torch.ones(3), info, "input", like=linear.weight)
condition = no_weight_decay_cond("split")
assert {n: condition(n, p) for n, p in linear.named_parameters()} == {
    "weight": False, "bias": True, "gamma_in_up_magnitude": False, "gamma_in_up_direction": True
}
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_condition_form_of_an_unknown_policy():
    with pytest.raises(ValueError, match="unknown weight-decay policy 'sometimes'"):
        no_weight_decay_cond("sometimes")


def test_what_a_rule_says_besides_decay_holds_for_decaying_vectors_too():
    """And two rules of one kind stay two."""
    from megatron.core.optimizer import ParamKey

    rules = {
        ParamKey(name="*.gamma_in_*"): {"wd_mult": 0.0, "max_lr": 0.1},
        ParamKey(name="*.bias"): {"wd_mult": 0.0},
    }
    ours = with_decaying_vectors(rules, "split")
    parameters = _parameters()

    def merged(end):
        [name] = [name for name in parameters if name.endswith(end)]
        found = [rule for key, rule in ours.items() if key.matches(parameters[name], name)]
        return {field: value for rule in found for field, value in rule.items()}

    assert merged("gamma_in_up") == {"max_lr": 0.1}
    assert merged("bias") == {"wd_mult": 0.0} == merged("q_layernorm.weight")
    assert merged("fc1.weight") == {}


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
    assert list(ours.values()) == [*standard.values(), {"wd_mult": 0.0}]
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
