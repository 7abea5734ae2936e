"""Properties that hold for every configuration, on ones that nobody thought of."""

import dataclasses

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from megatron_scalevec import ScaleVecConfig, ScaleVecError
from megatron_scalevec.config import (
    BRANCH_NAMES,
    BRANCHES,
    PLACEMENTS,
    REPARAMS,
    SITES,
    STRATEGIES,
    V_NORM_CLASSES,
    WEIGHT_DECAYS,
)

ALL_BRANCHES = sorted(name for group in BRANCH_NAMES.values() for name in group)
# What the dense models below have, which are without MTP and output gate.
THERE = {"attention": ("q", "k", "v"), "mlp": ("gate", "up"), "projections": ("o", "down"), "head": ()}
DENSE = sorted(name for group in THERE.values() for name in group)


def maybe(values):
    return st.none() | st.sampled_from(sorted(values))


def configurations(branches):
    return st.fixed_dictionaries(
        {"strategy": st.sampled_from([name for name in STRATEGIES if name != "stock"])},
        optional={
            "branches": maybe(BRANCHES),
            "placement": maybe(PLACEMENTS),
            "reparam": maybe(REPARAMS),
            "weight_decay": maybe(WEIGHT_DECAYS),
            "decay_v_norm": maybe(V_NORM_CLASSES),
            "sites": st.lists(st.sampled_from(sorted(SITES)), min_size=1, unique=True).map(tuple),
            "branches_off": st.lists(st.sampled_from(branches), max_size=3, unique=True).map(tuple),
        },
    )


models = st.fixed_dictionaries(
    {
        "num_layers": st.integers(1, 3),
        "num_query_groups": st.sampled_from([1, 2, 4]),
        "normalization": st.sampled_from(["RMSNorm", "LayerNorm"]),
        "layernorm_zero_centered_gamma": st.booleans(),
        "add_bias_linear": st.booleans(),
        "qk_layernorm": st.booleans(),
    }
)
SETTINGS = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)


def resolved(values):
    try:
        return ScaleVecConfig(**values)
    except ScaleVecError:
        assume(False)


def fitting(values, overrides):
    """A configuration that has something to do in the models below and that they can carry."""
    config = resolved(values)
    assume(config.weight_decay != "all" or not overrides["layernorm_zero_centered_gamma"])
    assume(THERE.keys() & config.sites)
    assume(set(config.branches_off) <= {name for site in config.sites for name in THERE.get(site, ())})
    return config


@given(values=configurations(ALL_BRANCHES))
@settings(SETTINGS, max_examples=300)
def test_a_configuration_is_what_its_own_description_says(values):
    """Resolved once, it resolves to itself; so do the strings that checkpoints hold."""
    config = resolved(values)
    assert ScaleVecConfig(**dataclasses.asdict(config)) == config
    namespace = type("Namespace", (), {})()
    for name, value in values.items():
        text = ",".join(value) if isinstance(value, tuple) else value
        setattr(namespace, f"scalevec_{name}", text or None)
    assert ScaleVecConfig.from_namespace(namespace) == config


@given(values=configurations(DENSE), overrides=models)
@SETTINGS
def test_counts_start_and_values(ranks, values, overrides):
    """The audit finds what the configurations imply, conversion changes no bit of the function where no norm
    comes between, and the model computes what the reference computes."""
    config = fitting(values, overrides)
    case = {"kind": "llama", "config": values, "overrides": overrides}
    [[found]] = ranks.run("compare_with_reference", cases=[case])
    if config.placement != "dual-norm":
        assert found["start"] == 0.0
    assert found["logits"] < 1e-10
    assert found["gradient"] < 1e-9


@given(values=configurations(DENSE), overrides=models)
@SETTINGS
def test_w_eff_put_into_a_stock_model_gives_the_same_logits(ranks, values, overrides):
    """Wherever no norm comes between, scale vectors are a factor on the weights and nothing else."""
    config = fitting(values, overrides)
    assume(config.placement != "dual-norm")
    [difference] = ranks.run("fold_by_hand", config=values, overrides=overrides)
    assert difference < 1e-12


@pytest.mark.parametrize("placement", ["input", "output", "dual"])
def test_the_hand_fold_would_notice_a_dropped_vector(ranks, placement):
    config = {"strategy": "hg", "placement": placement}
    [difference] = ranks.run("fold_by_hand", config=config, overrides={}, drop=True)
    assert difference > 1e-3
