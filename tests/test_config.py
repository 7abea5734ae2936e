"""Strategies, components, and what contradicts what."""

from types import SimpleNamespace

import pytest

from megatron_scalevec import ScaleVecConfig, ScaleVecError


@pytest.mark.parametrize(
    ("strategy", "components"),
    [
        ("stock", (None, None, None, "stock")),
        ("none", (None, None, None, "stock")),
        ("iwd", ("shared", "input", "none", "split")),
        ("hg", ("split", "input", "none", "split")),
        ("post-qkv", ("split", "output", "none", "split")),
        ("dp", ("split", "dual", "none", "split")),
        ("dnp", ("split", "dual-norm", "none", "split")),
        ("or", ("shared", "input", "product", "split")),
        ("unified", ("split", "dual-norm", "product", "split")),
        ("unified-foldable", ("split", "dual", "product", "split")),
    ],
)
def test_presets_resolve_to_the_table_of_the_method(strategy, components):
    config = ScaleVecConfig(strategy=strategy)
    assert (config.branches, config.placement, config.reparam, config.weight_decay) == components
    assert config.sites == ("attention", "latent", "mlp", "mamba", "delta", "mtp", "head")
    assert config.active == (strategy != "stock")


def test_a_component_overrides_the_preset():
    config = ScaleVecConfig(strategy="hg", placement="dual", weight_decay="none", sites="mlp")
    assert (config.branches, config.placement, config.weight_decay) == ("split", "dual", "none")
    assert config.sites == ("mlp",)


def test_lists_are_brought_into_one_order():
    config = ScaleVecConfig(
        strategy="unified", branches_off="up, q", lr_mult="output=0.5,input=2,direction=1"
    )
    assert config.branches_off == ("q", "up")
    assert config.lr_mult == "input=2,output=0.5"
    assert config.lr_multipliers == {"input": 2.0, "output": 0.5}
    assert ScaleVecConfig(strategy="hg", lr_mult="input=1.23456789").lr_mult == "input=1.23456789"


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
        ({"sites": "mlp"}, "--scalevec-sites needs a strategy"),
        ({"strategy": "none", "placement": "input"}, "contradicts --scalevec-strategy none"),
        ({"strategy": "none", "weight_decay": "split"}, "contradicts --scalevec-strategy none"),
        ({"strategy": "post-qkv", "branches": "shared"}, "nothing to share"),
        ({"strategy": "iwd", "placement": "output"}, "nothing to share"),
        ({"strategy": "none", "branches_off": "q"}, "contradicts --scalevec-strategy none"),
        ({"strategy": "none", "sites": "projections"}, "no norm feeds"),
        ({"strategy": "iwd", "branches_off": "q"}, "contradicts --scalevec-branches shared"),
        ({"strategy": "hg", "branches_off": "qq"}, "unknown branch 'qq'"),
        ({"strategy": "hg", "decay_v_norm": "output"}, "no effect with --scalevec-placement input"),
        ({"strategy": "iwd", "weight_decay": "stock"}, "only lets the norms' own scales decay"),
        (
            {"strategy": "hg", "branches": "shared", "weight_decay": "none"},
            "--scalevec-strategy hg has no effect",
        ),
        ({"strategy": "none", "vector_dtype": "fp32"}, "no effect with --scalevec-strategy none"),
        ({"strategy": "unified", "sites": "mlp"}, "leave none of them.*placement dual"),
        ({"strategy": "dnp", "branches_off": "q,k,v"}, "leave none of them"),
        ({"strategy": "dnp", "branches_off": "v", "decay_v_norm": "output"}, "no effect with .*-off v"),
        ({"strategy": "dp", "lr_mult": "output=2"}, "γ_out on a linear is of class 'input'"),
        ({"strategy": "unified", "lr_mult": "direction=2"}, "only --scalevec-reparam unit"),
        ({"strategy": "hg", "lr_mult": "input"}, "ROLE=FACTOR"),
        ({"strategy": "hg", "lr_mult": "input=2,input=3"}, "gives input twice"),
        ({"strategy": "hg", "lr_mult": "input=-1"}, "positive factor"),
        ({"strategy": "hg", "lr_mult": "in=2"}, "unknown role 'in'.*'input'"),
        # What YAML makes of numbers, lists and of words like no.
        ({"strategy": False}, "unknown strategy False.*put a name in quotes"),
        ({"strategy": None}, "unknown strategy None"),
        ({"strategy": "hg", "weight_decay": False}, "choose one of split, stock, all, none.*in quotes"),
        ({"strategy": "hg", "placement": ["dual"]}, r"\['dual'\]: choose one of input, output, dual"),
        ({"strategy": "hg", "sites": 5}, "--scalevec-sites is 5: give names"),
        ({"strategy": "hg", "sites": [1, "mlp"]}, "unknown site '1'"),
        ({"strategy": "hg", "branches_off": True}, "--scalevec-branches-off is True"),
        ({"strategy": "hg", "lr_mult": 2}, "--scalevec-lr-mult is 2"),
    ],
)
def test_bad_values_are_refused_with_a_sentence(values, message):
    with pytest.raises(ScaleVecError, match=message) as caught:
        ScaleVecConfig(**values)
    assert "\n" not in str(caught.value)


def test_namespaces_without_the_keys_are_stock():
    assert ScaleVecConfig.from_namespace(SimpleNamespace()) == ScaleVecConfig()
    # YAML's `no` and `off` are not `none`, and not nothing.
    with pytest.raises(ScaleVecError, match="unknown strategy False"):
        ScaleVecConfig.from_namespace(SimpleNamespace(scalevec_strategy=False))


def test_a_namespace_gives_back_what_made_it():
    args = SimpleNamespace(scalevec_strategy="hg", scalevec_sites="attention,mlp")
    config = ScaleVecConfig.from_namespace(args)
    assert config == ScaleVecConfig(strategy="hg", sites=("attention", "mlp"))
    assert config != ScaleVecConfig(strategy="hg")


def test_execution_is_not_part_of_equality():
    assert ScaleVecConfig(strategy="hg", execution="autograd") == ScaleVecConfig(strategy="hg")
