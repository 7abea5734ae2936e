"""Strategies, components, and what contradicts what."""

from types import SimpleNamespace

import pytest

from megatron_scalevec import ScaleVecConfig, ScaleVecError
from megatron_scalevec.config import STRATEGIES

BUILT = ["stock", "none", "iwd", "hg", "post-qkv", "dp"]


@pytest.mark.parametrize(
    ("strategy", "components"),
    [
        ("stock", (None, None, None, "stock")),
        ("none", (None, None, None, "stock")),
        ("iwd", ("shared", "input", "none", "split")),
        ("hg", ("split", "input", "none", "split")),
        ("post-qkv", ("split", "output", "none", "split")),
        ("dp", ("split", "dual", "none", "split")),
    ],
)
def test_presets_resolve_to_the_table_of_the_method(strategy, components):
    config = ScaleVecConfig(strategy=strategy)
    assert (config.branches, config.placement, config.reparam, config.weight_decay) == components
    assert config.sites == ("attention", "mlp", "head")
    assert config.active == (strategy != "stock")


def test_a_component_overrides_the_preset():
    config = ScaleVecConfig(strategy="hg", placement="dual", weight_decay="none", sites="mlp")
    assert (config.branches, config.placement, config.weight_decay) == ("split", "dual", "none")
    assert config.sites == ("mlp",)


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s not in BUILT])
def test_strategies_of_the_method_that_are_not_built_say_so(strategy):
    with pytest.raises(ScaleVecError, match=rf"{strategy} is part of the method.*available now: .*hg"):
        ScaleVecConfig(strategy=strategy)


@pytest.mark.parametrize(
    "component",
    [
        {"placement": "dual-norm"},
        {"reparam": "product"},
        {"reparam": "unit"},
        {"execution": "optimizer"},
    ],
)
def test_components_that_are_not_built_say_so(component):
    with pytest.raises(ScaleVecError, match="does not build it yet"):
        ScaleVecConfig(strategy="hg", **component)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"strategy": "gh"}, "unknown strategy 'gh'.*Did you mean 'hg'"),
        ({"strategy": "unifed"}, "Did you mean 'unified'"),
        (
            {"strategy": "hg", "placement": "inputs"},
            "--scalevec-placement 'inputs'.*Did you mean 'input'",
        ),
        ({"strategy": "hg", "weight_decay": "x"}, "choose one of split, stock, all, none"),
        ({"strategy": "hg", "sites": "mlp,attn"}, "unknown site 'attn'"),
        ({"strategy": "hg", "sites": ""}, "empty"),
        ({"placement": "dual"}, "needs a strategy"),
        ({"sites": "mlp"}, "needs a strategy"),
        ({"strategy": "none", "placement": "input"}, "contradicts --scalevec-strategy none"),
        ({"strategy": "none", "weight_decay": "split"}, "contradicts --scalevec-strategy none"),
        ({"strategy": "post-qkv", "branches": "shared"}, "nothing to share"),
        ({"strategy": "iwd", "placement": "output"}, "nothing to share"),
    ],
)
def test_bad_values_are_refused_with_a_sentence(values, message):
    with pytest.raises(ScaleVecError, match=message) as caught:
        ScaleVecConfig(**values)
    assert "\n" not in str(caught.value)


def test_namespaces_without_the_keys_are_stock():
    assert ScaleVecConfig.from_namespace(SimpleNamespace()) == ScaleVecConfig()


def test_a_namespace_gives_back_what_made_it():
    args = SimpleNamespace(scalevec_strategy="hg", scalevec_sites="attention,mlp")
    config = ScaleVecConfig.from_namespace(args)
    assert config == ScaleVecConfig(strategy="hg", sites=("attention", "mlp"))
    assert config != ScaleVecConfig(strategy="hg")


def test_execution_is_not_part_of_equality():
    assert ScaleVecConfig(strategy="hg", execution="autograd") == ScaleVecConfig(strategy="hg")
