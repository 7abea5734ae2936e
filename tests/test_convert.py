"""Scale vectors on built models: against the float64 reference, and what is refused."""

import itertools
import re

import numpy as np
import pytest

PLACEMENTS = ["input", "output", "dual", "dual-norm"]
REPARAMS = ["none", "product", "unit"]
BRANCHES = ["split", "shared"]
# All forms of the method on one model; an output scale has nothing to share.
FORMS = [
    {"strategy": "hg", "placement": placement, "reparam": reparam, "branches": branches}
    for placement, reparam, branches in itertools.product(PLACEMENTS, REPARAMS, BRANCHES)
    if (placement, branches) != ("output", "shared")
]
NORMS = ["RMSNorm", "LayerNorm"]
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}


def check(case, found, dtype):
    normalizes = case["config"].get("placement") == "dual-norm" or case["config"]["strategy"] in (
        "dnp",
        "unified",
    )
    if not normalizes:
        assert found["start"] == 0.0, "conversion alone must not change a bit of the function"
    assert found["logits"] < TOLERANCE[dtype]
    assert found["gradient"] < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("zero_centered", [False, True], ids=["gamma", "zero-centered"])
@pytest.mark.parametrize("normalization", NORMS)
def test_every_form_equals_the_reference(ranks, normalization, zero_centered, gated, dtype):
    """Values and all gradients of placements x reparameterizations x branches (21 forms)."""
    import torch

    overrides = {
        "normalization": normalization,
        "layernorm_zero_centered_gamma": zero_centered,
        "gated_linear_unit": gated,
        "activation_func": torch.nn.functional.silu if gated else torch.nn.functional.gelu,
    }
    cases = [{"kind": "llama", "config": form, "overrides": overrides} for form in FORMS]
    [found] = ranks.run("compare_with_reference", cases=cases, dtype=dtype)
    assert len(found) == len(FORMS) == 21
    for case, result in zip(cases, found):
        check(case, result, dtype)


@pytest.mark.parametrize("kind", ["gpt2", "qk-norm", "one-group"])
def test_strategies_on_other_models(ranks, kind):
    """Biases, multi-head attention and tied embeddings; q/k norms; one group of keys and values."""
    names = ["none", "iwd", "hg", "post-qkv", "dp", "dnp", "or", "unified", "unified-foldable"]
    cases = [{"kind": kind, "config": {"strategy": name}} for name in names]
    [found] = ranks.run("compare_with_reference", cases=cases)
    for case, result in zip(cases, found):
        check(case, result, "float64")


@pytest.mark.parametrize(
    "components",
    [
        {"sites": ("attention",)},
        {"sites": ("mlp", "head")},
        {"placement": "output", "sites": ("attention",)},
        {"placement": "dual", "sites": ("attention", "mlp", "projections"), "reparam": "unit"},
        {"placement": "dual-norm", "sites": ("attention", "projections")},
        {"placement": "dual", "branches_off": ("v", "up")},
        {"placement": "dual-norm", "branches_off": ("q",)},
        {"placement": "dual-norm", "decay_v_norm": "output", "vector_dtype": "fp32"},
    ],
    ids=str,
)
def test_components_equal_the_reference(ranks, components):
    # Float32 vectors bound a float64 model.
    dtype = "float32" if "vector_dtype" in components else "float64"
    kinds = ("llama", "gpt2") if dtype == "float64" else ("llama",)
    cases = [{"kind": kind, "config": {"strategy": "hg", **components}} for kind in kinds]
    [found] = ranks.run("compare_with_reference", cases=cases, dtype=dtype)
    for case, result in zip(cases, found):
        check(case, result, dtype)


@pytest.mark.parametrize("strategy", ["hg", "unified"])
def test_the_attention_output_gate_is_a_branch(ranks, strategy):
    case = {"kind": "llama", "config": {"strategy": strategy}, "overrides": {"attention_output_gate": True}}
    """Megatron takes the sigmoid in float32, whatever the model is."""
    [[found]] = ranks.run("compare_with_reference", cases=[case])
    check(case, found, "float32")


@pytest.mark.parametrize("reparam", REPARAMS)
def test_bfloat16_within_two_units_in_the_last_place(ranks, reparam):
    [found] = ranks.run("linear_in_bfloat16", reparam=reparam)
    assert len(found) >= 7
    assert max(found.values()) <= 2, found


LAYOUTS = {
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2-sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "tp4": (4, {"tensor_model_parallel_size": 4}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "config",
    [
        {"strategy": "unified"},
        {"strategy": "unified", "reparam": "unit"},
        {"strategy": "dp", "sites": ("attention", "mlp", "head", "projections")},
        {"strategy": "or"},
    ],
    ids=["unified", "unified unit", "dp with projections", "or"],
)
def test_gradients_of_every_vector_are_the_serial_ones(ranks, config, layout):
    """In float64, through megatron.core alone. Four ranks share two query groups."""
    world_size, sizes = LAYOUTS[layout]
    [serial] = ranks.run("gradients", config=config, kind="llama")
    parallel = ranks.run("gradients", world_size, config=config, kind="llama", **sizes)
    for result in parallel:
        np.testing.assert_allclose(result["loss"], serial["loss"], rtol=1e-12)
        assert result["gradients"].keys() == serial["gradients"].keys()
        for name, gradient in result["gradients"].items():
            np.testing.assert_allclose(
                gradient, serial["gradients"][name], rtol=1e-8, atol=1e-12, err_msg=name
            )


@pytest.mark.parametrize("strategy", ["hg", "dnp", "unified"])
def test_norms_over_apex(ranks, strategy):
    """Dual-norm builds more of them, of the model's kind."""
    case = {"kind": "gpt2", "config": {"strategy": strategy}}
    [[found]] = ranks.run("compare_with_apex_norms", cases=[case])
    check(case, found, "float64")


def test_a_trained_norm_scale_is_carried_over(ranks):
    """Conversion of a model whose norms are not at one keeps its function where that is possible."""
    for kind in ("llama", "gpt2"):
        for strategy in ("iwd", "hg", "dp", "or", "unified-foldable"):
            [found] = ranks.run("convert_trained", kind=kind, config={"strategy": strategy})
            assert found["difference"] < 1e-14
            assert (found["norms"] == {1.0}) == (strategy != "iwd")
    [refused] = ranks.run("convert_trained", config={"strategy": "post-qkv"})
    assert "trained scale, which 'post-qkv' would drop" in refused["error"]
    assert refused["unchanged"]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("twice", "already carries scale vectors"),
        ("wrapped", "on a Wrapper"),
        ("linear", "linear_fc1 is a .*Other.*ColumnParallelLinear"),
        ("unknown-vector", r"decoder\.extra \(3,\) is a one-dimensional parameter of a kind"),
        ("attention", "self_attention is a .*Latent"),
    ],
)
def test_what_cannot_be_converted_is_left_as_it_was(ranks, case, message):
    [found] = ranks.run("convert_refused", case=case)
    assert re.search(message, found["error"])
    assert found["unchanged"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"branches_off": "output_gate"},
            "no such branch at the sites.*branches there are q, k, v, gate, up",
        ),
        ({"branches_off": "gate,o"}, "--scalevec-branches-off o: this model has no such branch"),
        ({"branches_off": "q", "sites": "mlp"}, "--scalevec-branches-off q"),
        ({"sites": "mtp,mamba"}, "nothing at the sites mamba, mtp.*give some of attention, mlp, head, proj"),
        ({"experts": "shared"}, "--scalevec-experts shared has no effect on this model"),
    ],
    ids=str,
)
def test_what_the_model_does_not_have_is_refused(ranks, config, message):
    [found] = ranks.run("convert_refused", case="nothing", config={"strategy": "hg", **config})
    assert re.search(message, found["error"])
    assert found["unchanged"]


def test_decay_toward_one_is_refused(ranks):
    [found] = ranks.run(
        "convert_refused", case="zero-centered", config={"strategy": "hg", "weight_decay": "all"}
    )
    assert "pulled toward 1 instead of 0" in found["error"] and found["unchanged"]


@pytest.mark.parametrize("strategy", ["iwd", "hg", "dnp", "unified"])
@pytest.mark.parametrize("vector_dtype", ["model", "fp32"])
def test_vectors_have_the_dtype_that_was_asked_for(ranks, strategy, vector_dtype):
    """After Megatron has cast the model, in linears and in norms."""
    [found] = ranks.run("dtypes", config={"strategy": strategy, "vector_dtype": vector_dtype})
    assert found == {"float32" if vector_dtype == "fp32" else "bfloat16"}


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (None, None),
        ("drop-layer", "linears with scale vectors: 3 built, 4 expected"),
        ("drop-vector", "vectors mlp gate in: 1 built, 2 expected"),
        ("thaw-norm", "norm scales retired: 3 built, 4 expected"),
        ("late-vector", "added after the scale vectors were"),
        ("other-config", "carries hg: .*, but dp: .* was asked for"),
        ("no-decay-rule", "gamma_in_q should decay, but the optimizer's group has wd_mult 0"),
        ("not-in-optimizer", "is in no parameter group, so it would never train"),
    ],
)
def test_the_audit_finds_what_is_missing(ranks, breakage, message):
    [found] = ranks.run("audit_broken", breakage=breakage)
    if message is None:
        assert found["error"] is None
        assert found["audit"]["linears_converted"] == found["audit"]["linears_expected"] == 4
        assert found["audit"]["parameters_added"] == 2 * (3 + 2) * 32 - 4 * 32
    else:
        assert re.search(message, found["error"])
