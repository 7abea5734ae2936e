"""Numbers: TransformerEngine's own modules and autograd functions, with its kernels replaced."""

import numpy as np
import pytest

STRATEGIES = ["none", "iwd", "hg", "post-qkv", "dp", "dnp", "or", "unified", "unified-foldable"]
COMPONENTS = [
    ("gpt2", {"strategy": "dp", "sites": ("attention", "mlp", "head", "projections")}, {}),
    ("gpt2", {"strategy": "hg", "branches": "shared", "placement": "dual"}, {}),
    ("gpt2", {"strategy": "unified", "reparam": "unit"}, {}),
    ("gpt2", {"strategy": "iwd"}, {"layernorm_zero_centered_gamma": True}),
    ("gpt2", {"strategy": "dnp"}, {"layernorm_zero_centered_gamma": True}),
    ("qk-norm", {"strategy": "unified"}, {"layernorm_zero_centered_gamma": True}),
    ("llama", {"strategy": "dnp"}, {"attention_output_gate": True}),
]


def check(te_ranks, cases):
    [results] = te_ranks.run("compare_with_reference", cases=cases)
    assert len(results) == len(cases)
    for case, found in zip(cases, results):
        if case["config"]["strategy"] not in ("dnp", "unified"):
            assert found["start"] == 0.0, case
        # Megatron takes the output gate's sigmoid in float32.
        gated = "attention_output_gate" in case.get("overrides", {})
        assert max(found["logits"], found["gradient"]) < (1e-6 if gated else 1e-10), case


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qk-norm"])
def test_values_and_gradients_equal_the_reference(te_ranks, kind):
    check(te_ranks, [{"kind": kind, "config": {"strategy": strategy}} for strategy in STRATEGIES])


def test_components_equal_the_reference(te_ranks):
    names = ("kind", "config", "overrides")
    check(te_ranks, [dict(zip(names, component)) for component in COMPONENTS])


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_ranks_agree_with_one(te_ranks, sequence_parallel):
    config = {"strategy": "unified", "sites": ("attention", "mlp", "head", "projections")}
    [serial] = te_ranks.run("train_once", config=config)
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": sequence_parallel}
    runs = te_ranks.run("train_once", 2, config=config, **layout)
    assert len(serial["gradients"]) == 2 * 2 * (3 + 4 + 4)
    for run in runs:
        np.testing.assert_allclose(run["loss"], serial["loss"], rtol=1e-6)
        assert run["gradients"].keys() == serial["gradients"].keys()
        for name, expected in serial["gradients"].items():
            np.testing.assert_allclose(
                run["gradients"][name], expected, rtol=1e-5, atol=1e-5 * abs(expected).max(), err_msg=name
            )


def test_float32_vectors_in_a_bf16_model(te_ranks):
    """TransformerEngine insists on one dtype for all parameters that it sees."""
    [found] = te_ranks.run("fp32_vectors")
    assert found == {"dtypes": {"torch.float32"}, "others": {"torch.bfloat16"}, "moved": True}


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_a_norms_kernel_multiplies_by_gamma(te_ranks, kind, zero_centered):
    """No product follows it: it is the kernel that is handed γ, and the last to be differentiated."""
    [found] = te_ranks.run("norm_with_gamma", kind=kind, zero_centered=zero_centered)
    assert found["last"] == "_OperationFuserAutogradFunctionBackward"
    assert found["scales"] == [True]
    assert found["own"] == {0.0 if zero_centered else 1.0} and found["untouched"]
    assert found["errors"].keys() == {"out", "x", "beta", "alpha", *(["bias"] if kind == "LayerNorm" else [])}
    assert all(error < 1e-12 for error in found["errors"].values()), found["errors"]


@pytest.mark.parametrize("zero_centered", [False, True])
def test_a_small_gamma_in_bfloat16(te_ranks, zero_centered):
    """Where Megatron stores γ − 1, in which it would be rounded away."""
    [found] = te_ranks.run("norm_with_gamma", kind="RMSNorm", zero_centered=zero_centered, small=True)
    assert found["scales"] == [True]
    errors = found["errors"]
    assert max(errors["out"], errors["x"], errors["alpha"]) < 2e-2, errors


def test_a_fused_residual_norm_is_multiplied_by_gamma(te_ranks):
    [found] = te_ranks.run("norm_with_gamma", kind="TEFusedResidualRMSNorm")
    assert found["last"] == "MulBackward0" and found["own"] == {1.0} and found["untouched"]
    assert all(error < 1e-12 for error in found["errors"].values()), found["errors"]


def test_a_norm_that_would_lose_the_gradient_stops_the_run(te_ranks):
    [found] = te_ranks.run("norm_with_gamma", kind="RMSNorm", sabotage=True)
    assert "would get no gradient; the run was stopped" in found["error"]


@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_the_gpu_check_does(te_ranks, implementation, precision):
    """Its verdict on a CPU, right and wrong."""
    arguments = {"implementation": implementation, "precision": precision}
    [broken] = te_ranks.run("gpu_check_on_the_cpu", broken=True, **arguments)
    assert broken["right"] == [False, False], "\n".join(broken["lines"])
    [found] = te_ranks.run("gpu_check_on_the_cpu", **arguments)
    assert found["right"] == [True, True], "\n".join(found["lines"])
