"""Mixture of experts: values, gradients over layouts, training, what is counted and what is refused."""

import re

import numpy as np
import pytest
from packaging.version import Version
from ranks.pool import RankFailure
from runs import assert_equal_steps, together

from megatron_scalevec import ScaleVecConfig, ScaleVecError

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


@pytest.mark.parametrize("model", ["mixtral", "qwen3-moe", "shared", "deepseek"])
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
            config = {"strategy": strategy, "sites": "attention,latent,mlp,head,projections"}
            config["experts"] = more.pop("whose", "per-expert")
            world_size, sizes = LAYOUTS.get(layout, (1, {}))
            runs[key] = ranks.run(
                "expert_gradients", world_size, config=config, experts=experts, **{**sizes, **more}
            )
        return runs[key]

    return run


@pytest.fixture(scope="module")
def before_0_19(ranks):
    """Whether Megatron's gradient norm does not know experts' tensor-parallel groups."""
    [version] = ranks.run("version_of_megatron")
    return Version(version) < Version("0.19")


@pytest.mark.parametrize("whose", ["per-expert", "shared"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "etp2"])
def test_gradients_in_every_layout(gradients, layout, whose):
    """Every vector's gradient, the clipping norm, one step of the optimizer and the audit."""
    assert_equal_steps(gradients(layout, whose=whose), gradients("serial", whose=whose))


@pytest.mark.parametrize("whose", ["per-expert", "shared"])
def test_more_expert_tensor_parallel_ranks_than_others(gradients, before_0_19, whose):
    """Before 0.19, Megatron would count such experts' parameters twice."""
    if before_0_19:
        with pytest.raises(RankFailure, match="counts parameters of experts wrongly in the gradient norm"):
            gradients("etp2", whose=whose)
        return
    assert_equal_steps(gradients("etp2", whose=whose), gradients("serial", whose=whose))
    # One set for all experts is summed over the dense layers' ranks, of which there is one here.
    if whose == "per-expert":
        broken = gradients("etp2", whose=whose, sabotage="tensor-parallel-sum", audited=False)
        with pytest.raises(AssertionError, match="gamma_(in|out)_expert"):
            assert_equal_steps(broken, gradients("serial", whose=whose))


def test_vectors_of_experts_count_on_every_rank(gradients, before_0_19):
    """Tensor-parallel ranks without expert tensor parallelism hold different experts. Before 0.19 it takes
    a mark on the vectors to count them all."""
    broken = gradients("tp2-sp-ep2-etp1", sabotage="counted-once", audited=False)
    [serial] = gradients("serial")
    for run in broken:
        assert (abs(run["norm"] / serial["norm"] - 1) < 1e-6) == (not before_0_19)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_dispatchers(gradients, dispatcher):
    overrides = {"moe_token_dispatcher_type": dispatcher}
    runs = gradients("ep2", "mixtral", overrides=overrides)
    assert_equal_steps(runs, gradients("serial", "mixtral", overrides=overrides))


def test_dropped_tokens(gradients):
    """A capacity factor drops tokens by the number that a rank has, so the oracle has as many ranks, each
    with all experts."""
    overrides = {"moe_expert_capacity_factor": 0.5}
    runs, others = (gradients(layout, "mixtral", overrides=overrides) for layout in ("ep2", "dp2"))
    found, expected, whole = together(runs), together(others), together(gradients("serial", "mixtral"))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        limit = 1e-6 * abs(gradient).max() + 1e-9
        np.testing.assert_allclose(found[name], gradient, rtol=0, atol=limit, err_msg=name)
    assert any(abs(found[name] - whole[name]).max() > 0.1 * abs(whole[name]).max() for name in whole)


@pytest.mark.parametrize("layout", ["serial", "ep2"])
def test_an_expert_without_tokens_has_gradients_of_zero(gradients, layout):
    found = together(gradients(layout, idle=3))
    own = {name: g for name, g in found.items() if "local_experts.3." in name}
    assert len(own) == 6  # gate and up and down, in and out
    for name, gradient in own.items():
        assert not gradient.any(), name
    assert all(g.any() for name, g in found.items() if "local_experts.2." in name)


@pytest.mark.parametrize(
    ("sabotage", "layout", "whose", "seen_in"),
    [
        ("tensor-parallel-sum", "tp2-sp", "per-expert", "gamma_"),
        ("tensor-parallel-sum", "tp2-sp-ep2-etp1", "shared", "gamma_"),
        ("allreduce", "ep2", "per-expert", "gamma_(in|out)_expert"),
        ("expert-parallel-sum", "ep2", "shared", "gamma_(in|out)_expert"),
    ],
)
def test_the_comparison_sees_what_is_broken(gradients, sabotage, layout, whose, seen_in):
    """A sum over tensor-parallel ranks dropped; a vector reduced with the wrong ranks."""
    broken = gradients(layout, whose=whose, sabotage=sabotage, audited=False)
    with pytest.raises(AssertionError, match=seen_in):
        assert_equal_steps(broken, gradients("serial", whose=whose))


@pytest.mark.parametrize("sabotage", ["allreduce", "expert-parallel-sum"])
def test_the_audit_sees_vectors_reduced_with_the_wrong_ranks(gradients, sabotage):
    whose = {"allreduce": "per-expert", "expert-parallel-sum": "shared"}[sabotage]
    with pytest.raises(RankFailure, match="vectors mlp expert_gate in: 2 built, (4|1) expected"):
        gradients("ep2", whose=whose, sabotage=sabotage)


def test_a_forgotten_expert_stops_the_run(ranks):
    with pytest.raises(RankFailure, match="linears with scale vectors: 8 built, 10 expected"):
        ranks.run(
            "expert_gradients",
            2,
            config={"strategy": "hg"},
            experts="shared",
            sabotage="expert-forgotten",
            expert_model_parallel_size=2,
        )


@pytest.mark.parametrize("layout", ["ep2", "tp2-sp", "tp2-sp-ep2-etp1"])
def test_latent_attention_with_experts_in_every_layout(gradients, layout):
    """As DeepSeek-V3: vectors of latent attention, which all ranks have, beside those of own experts."""
    assert_equal_steps(gradients(layout, "deepseek"), gradients("serial", "deepseek"))


@pytest.mark.parametrize(
    ("sabotage", "layout", "seen_in"),
    [
        ("rope-key-gradient", "tp2-sp", r"decoder\.layers\.0\."),
        ("latent-row-map", "tp2-sp", "gamma_"),
        ("allreduce", "ep2", "gamma_(in|out)_expert"),
    ],
)
def test_the_comparison_sees_what_is_broken_there(gradients, sabotage, layout, seen_in):
    broken = gradients(layout, "deepseek", sabotage=sabotage, audited=False)
    with pytest.raises(AssertionError, match=seen_in):
        assert_equal_steps(broken, gradients("serial", "deepseek"))


QKV = {f"attention {branch} in": 2 for branch in "qkv"}
COUNTS = {
    # Two layers with experts: gate and up of 4 experts in each.
    "mixtral": (
        {**QKV, "mlp router in": 2, "mlp expert_gate in": 8, "mlp expert_up in": 8},
        {"linears": 2 * (1 + 1 + 4), "retired": 4},
        # q, k, v, the router, gate and up of every expert instead of two norms.
        2 * (3 + 1 + 2 * 4 - 2) * 32,
    ),
    "qwen3-moe": (
        {**QKV, "mlp router in": 2, "mlp expert_gate in": 16, "mlp expert_up in": 16},
        {"linears": 2 * (1 + 1 + 8), "retired": 4},
        2 * (3 + 1 + 2 * 8 - 2) * 32,
    ),
    # A dense layer, and one with 4 experts, a shared one and its gate.
    "shared": (
        {
            **QKV,
            "mlp gate in": 1,
            "mlp up in": 1,
            "mlp router in": 1,
            "mlp expert_gate in": 4,
            "mlp expert_up in": 4,
            "mlp shared_gate in": 1,
            "mlp shared_up in": 1,
            "mlp shared_expert_gate in": 1,
        },
        {"linears": 2 * 1 + 1 + (1 + 4 + 1 + 1), "retired": 4},
        (2 * 3 + 2 + 1 + 2 * 4 + 2 + 1 - 4) * 32,
    ),
    # Latent attention with latents of 12 and 10 channels, behind norms of their own: two down- and two
    # up-projections in each layer. A dense layer, and one with 4 experts and a shared one without a gate.
    "deepseek": (
        {
            **{f"attention {branch} in": 2 for branch in ("q_down", "kv_down", "k_rope")},
            **{f"latent {branch} in": 2 for branch in ("q_up", "k_up", "v_up")},
            "mlp gate in": 1,
            "mlp up in": 1,
            "mlp router in": 1,
            "mlp expert_gate in": 4,
            "mlp expert_up in": 4,
            "mlp shared_gate in": 1,
            "mlp shared_up in": 1,
        },
        {"linears": 2 * 4 + 1 + (1 + 4 + 1), "retired": 2 * 4},
        2 * (3 * 32 + 12 + 2 * 10) + (2 + 1 + 2 * 4 + 2) * 32 - 2 * (2 * 32 + 12 + 10),
    ),
}


@pytest.mark.parametrize("model", COUNTS)
def test_what_is_counted(ranks, model):
    vectors, numbers, added = COUNTS[model]
    [found] = ranks.run("expert_audit", config={"strategy": "hg"}, experts=model)
    assert found["built_vectors"] == {**vectors, "head logits in": 1}
    assert found["linears_converted"] == numbers["linears"]
    assert found["norm_scales_retired"] == numbers["retired"]
    assert found["parameters_added"] == added


def test_experts_of_multi_token_prediction(ranks):
    """Its layers are of the kind of the last one of the decoder."""
    [found] = ranks.run(
        "expert_audit", config={"strategy": "dp"}, experts="shared", overrides={"mtp_num_layers": 1}
    )
    assert found["built_vectors"]["mlp expert_gate in"] == found["built_vectors"]["mlp expert_up out"] == 8
    assert found["built_vectors"]["mlp gate in"] == 1
    assert found["built_vectors"]["mlp shared_expert_gate out"] == 2
    assert found["built_vectors"]["mtp enorm in"] == 1


def test_a_shared_scale_stays_where_several_maps_take_it(ranks):
    """Two down-projections, or a router and experts, behind one norm; a dense MLP has one linear there."""
    [found] = ranks.run("expert_audit", config={"strategy": "or"}, experts="deepseek")
    assert {vector["name"] for vector in found["vectors"] if vector["branch"] == "shared"} == {
        f"decoder.layers.{path}_{part}"
        for part in ("beta", "alpha")
        for path in (
            "0.input_layernorm.gamma",
            "1.input_layernorm.gamma",
            "1.pre_mlp_layernorm.gamma",
            "0.mlp.linear_fc1.gamma_in_shared",
            *(
                f"{layer}.self_attention.linear_{latent}_up_proj.gamma_in_shared"
                for layer in (0, 1)
                for latent in ("q", "kv")
            ),
        )
    }
    assert found["linears_converted"] == 1 + 2 * 2


@pytest.mark.parametrize("model", ["shared", "deepseek"])
def test_a_trained_stock_model_is_taken_over(ranks, model):
    """γ of one norm goes to all maps that it feeds, or stays there for all of them."""
    configs = [{"strategy": strategy} for strategy in ("hg", "or", "iwd", "unified-foldable")]
    [differences] = ranks.run("start_from_stock", configs=configs, kind=model)
    assert max(differences) < 1e-6, list(zip(configs, differences))


def test_multi_token_prediction_beside_latent_attention_and_experts(ranks):
    [found] = ranks.run(
        "expert_audit", config={"strategy": "unified"}, experts="deepseek", overrides={"mtp_num_layers": 1}
    )
    counts = {f"{site} {branch}": number for site, branch, number in DEEPSEEK_WITH_MTP}
    parts = {
        f"{name} {side} {part}": number
        for name, number in counts.items()
        for side in ("in", "out")
        for part in ("beta", "alpha")
    }
    only_in = {
        f"{name} in {part}": 1
        for name in ("mtp enorm", "mtp hnorm", "mtp final_layernorm", "head logits")
        for part in ("beta", "alpha")
    }
    assert found["built_vectors"] == {**parts, **only_in}
    assert found["linears_converted"] == 3 * 4 + 1 + 2 * (1 + 4 + 1)
    assert found["norm_scales_retired"] == 3 * 4 + 3 + 1


# Three layers with latent attention: a dense one, and two with experts, one of which predicts further tokens.
DEEPSEEK_WITH_MTP = [
    *(("attention", branch, 3) for branch in ("q_down", "kv_down", "k_rope")),
    *(("latent", branch, 3) for branch in ("q_up", "k_up", "v_up")),
    *(("mlp", branch, 1) for branch in ("gate", "up")),
    *(("mlp", branch, 2) for branch in ("router", "shared_gate", "shared_up")),
    *(("mlp", branch, 2 * 4) for branch in ("expert_gate", "expert_up")),
]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("router", r"mlp\.router is a .*Other.*TopKRouter"),
        ("experts", r"mlp\.experts is a .*Other.*SequentialMLP and TEGroupedMLP"),
        ("expert", r"local_experts\.0 is a .*Other"),
        ("linear", r"experts\.linear_fc1 is a .*Other"),
        ("shared", r"mlp\.shared_experts is a .*Other.*SharedExpertMLP"),
        ("layer", r"decoder\.layers\.1\.mlp is a .*Other.*MoELayer"),
        ("overlap", "--moe-shared-expert-overlap"),
        ("branches-off", "--scalevec-branches-off down: .*no such branch"),
        ("trained", "trained scale, which --scalevec-branches-off router would drop"),
    ],
)
def test_what_cannot_carry_vectors_is_left_as_it_was(ranks, case, message):
    [found] = ranks.run("experts_refused", case=case)
    assert re.search(message, found["error"]), found["error"]
    assert found["unchanged"]


@pytest.mark.parametrize("whose", ["per-expert", "shared"])
def test_vectors_have_the_dtype_that_was_asked_for(ranks, whose):
    """After Megatron has cast the model, on linears, routers, gates and experts."""
    config = {"strategy": "dp", "vector_dtype": "fp32", "experts": whose}
    [found] = ranks.run("expert_dtypes", config=config)
    assert found == {"vectors": {"float32"}, "others": {"bfloat16"}}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"strategy": "stock"}, "--scalevec-experts needs a strategy"),
        ({"strategy": "none"}, "--scalevec-experts shared has no effect"),
        ({"strategy": "or"}, "--scalevec-experts shared has no effect"),
        ({"strategy": "hg", "sites": "attention"}, "--scalevec-experts shared has no effect"),
    ],
)
def test_sharing_without_effect_is_refused(more, message):
    with pytest.raises(ScaleVecError, match=message):
        ScaleVecConfig(experts="shared", **more)
    assert ScaleVecConfig(strategy="dp", experts="shared").describe().count("experts shared") == 1
