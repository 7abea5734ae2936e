"""Mixture of experts: values, gradients over layouts, training, what is counted and what is refused."""

import numpy as np
import pytest

FORMS = [
    {"strategy": "hg"},
    {"strategy": "unified"},
    {"strategy": "dp", "experts": "shared", "sites": ("attention", "mlp", "head", "projections")},
    {"strategy": "dp", "reparam": "unit", "sites": ("mlp", "projections")},
    {"strategy": "or"},
    {"strategy": "or", "placement": "dual", "experts": "shared"},
    {"strategy": "post-qkv", "branches_off": ("router", "expert_up")},
    {"strategy": "none"},
    {"strategy": "iwd"},
]


@pytest.mark.parametrize("model", ["mixtral", "qwen3-moe", "shared"])
def test_every_form_equals_the_reference(ranks, model):
    cases = [{"kind": "llama", "config": form, "experts": model} for form in FORMS]
    [found] = ranks.run("compare_with_reference", cases=cases)
    for case, result in zip(cases, found):
        assert result["start"] == 0.0 or case["config"]["strategy"] == "unified"
        # Megatron takes softmax and sigmoid of the router in float32.
        assert result["logits"] < 1e-6 and result["gradient"] < 1e-5, (case, result)


LAYOUTS = {
    "ep2": (2, {"expert_model_parallel_size": 2}),
    "dp2": (2, {}),
    "etp2": (2, {"expert_tensor_parallel_size": 2}),
    "tp2-sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "tp2-sp-ep2-etp1": (
        2,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
    ),
    "tp2-sp-ep2": (
        4,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "expert_model_parallel_size": 2,
        },
    ),
}


@pytest.fixture(scope="module")
def gradients(ranks):
    runs = {}

    def run(layout, experts="shared", strategy="dp", **more):
        key = layout, experts, strategy, repr(more)
        if key not in runs:
            config = {"strategy": strategy, "sites": "attention,mlp,head,projections"}
            config["experts"] = more.pop("whose", "per-expert")
            world_size, sizes = LAYOUTS.get(layout, (1, {}))
            runs[key] = ranks.run(
                "expert_gradients", world_size, config=config, experts=experts, **{**sizes, **more}
            )
        return runs[key]

    return run


def together(runs):
    """Gradients of all vectors over the ranks; those that several ranks hold must agree."""
    found = {}
    for run in runs:
        for name, gradient in run["gradients"].items():
            if name in found:
                np.testing.assert_allclose(gradient, found[name], rtol=1e-9, atol=1e-12, err_msg=name)
            found[name] = gradient
    return found


def assert_equal_steps(runs, serial):
    [serial] = serial
    found = together(runs)
    assert found.keys() == serial["gradients"].keys()
    for name, expected in serial["gradients"].items():
        limit = 1e-6 * abs(expected).max() + 1e-9
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=limit, err_msg=name)
    for run in runs:
        np.testing.assert_allclose(run["norm"], serial["norm"], rtol=1e-6)
        assert run["audit"] == serial["audit"]
        for name, moved in run["moved"].items():
            np.testing.assert_allclose(moved, serial["moved"][name], rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("whose", ["per-expert", "shared"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_in_every_layout(gradients, layout, whose):
    """Every vector's gradient, the clipping norm, one step of the optimizer and the audit."""
    assert_equal_steps(gradients(layout, whose=whose), gradients("serial", whose=whose))
