"""What conversion makes of TransformerEngine's modules, against what it makes of the local ones."""

import re

import pytest


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("llama", {"strategy": "none"}),
        ("llama", {"strategy": "hg"}),
        ("gpt2", {"strategy": "iwd"}),
        ("gpt2", {"strategy": "dp", "sites": ("attention", "mlp", "head", "projections")}),
        ("qk-norm", {"strategy": "unified"}),
        ("llama", {"strategy": "unified"}),
    ],
    ids=lambda value: value["strategy"] if isinstance(value, dict) else value,
)
def test_the_same_parameters_and_checkpoint_as_with_local_layers(te_ranks, kind, config):
    for found in te_ranks.run("describe", 2, kind=kind, config=config, tensor_model_parallel_size=2):
        local, te = found["local"], found["transformer_engine"]
        assert te["parameters"] == local["parameters"]
        assert te["audit"] == local["audit"]
        assert te["checkpoint"] == local["checkpoint"]
        vectors = [key for key in te["checkpoint"] if "gamma" in key]
        assert len(vectors) == sum("gamma" in name for name in te["parameters"])


@pytest.mark.parametrize("strategy", ["none", "unified"])
def test_multi_token_prediction(te_ranks, strategy):
    [found] = te_ranks.run("describe", kind="llama", config={"strategy": strategy}, mtp_num_layers=1)
    local, te = found["local"], found["transformer_engine"]
    assert te["parameters"] == local["parameters"]
    assert te["audit"] == local["audit"]
    assert any(name.startswith("mtp.") and "linear_qkv" in name for name in te["parameters"])


@pytest.mark.parametrize("strategy", ["iwd", "unified"])
def test_models_on_the_meta_device(te_ranks, strategy):
    [on_meta] = te_ranks.run("describe", kind="llama", config={"strategy": strategy}, device="meta")
    [on_cpu] = te_ranks.run("describe", kind="llama", config={"strategy": strategy})
    assert on_meta["transformer_engine"]["parameters"] == on_cpu["transformer_engine"]["parameters"]


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("strategy", ["iwd", "hg", "unified-foldable"])
def test_fused_norms_and_fused_gradients(te_ranks, strategy, zero_centered):
    """A trained model keeps its function; only converted linears stop adding to main_grad."""
    [found] = te_ranks.run(
        "retired_and_flags", strategy=strategy, layernorm_zero_centered_gamma=zero_centered
    )
    assert found["difference"] < 1e-13
    stays = strategy == "iwd" and not zero_centered
    assert found["fused"] == {"qkv": stays, "proj": True, "fc1": stays, "fc2": True}
    prefix = "" if stays else "ScaleVec"
    assert found["classes"]["qkv"] == f"{prefix}TELayerNormColumnParallelLinear"
    assert found["classes"]["proj"] == "TERowParallelLinear"
    if stays:
        assert (found["trains"], found["role"]) == (True, "input")
        assert len(found["norm"]) > 1
    else:
        assert (found["trains"], found["role"]) == (False, None)
        assert found["norm"] == [0.0 if zero_centered else 1.0]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no-interception", "has no method _get_weight_and_bias_tensors, through which"),
        ("split-weight", "does not hold its weight as one parameter"),
        ("quantized", "holds a quantized weight"),
        ("fp8", "is set to FP8, FP4 or a quantization recipe"),
        ("delayed", "computes its weight gradient outside of autograd"),
        ("overlap", "overlaps communication with products"),
        ("two-norms", "pre_mlp_layernorm is a transformer_engine.*no norm before a linear that has one"),
        ("bypassed", "does not take its weight through _get_weight_and_bias_tensors"),
    ],
)
def test_what_cannot_carry_vectors_says_so(te_ranks, case, message):
    [found] = te_ranks.run("refused", case=case)
    assert re.search(message, found["error"])
    assert found["unchanged"]


def test_classes_are_found_by_name(te_ranks):
    assert te_ranks.run("classes_by_name") == [True]


@pytest.mark.parametrize("strategy", ["hg", "unified"])
def test_a_layer_spec_builds_what_the_call_builds(te_ranks, strategy):
    assert te_ranks.run("spec_and_call", strategy=strategy) == [True]
