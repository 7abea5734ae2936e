"""Experts of TransformerEngine's layers: grouped linears, and a module for each expert."""

import re

import pytest
from ranks.pool import RankFailure
from runs import assert_equal_steps

FORMS = [
    {"strategy": "hg"},
    {"strategy": "unified", "sites": ("attention", "mlp", "head", "projections")},
    {"strategy": "dp", "experts": "shared", "sites": ("attention", "mlp", "head", "projections")},
    {"strategy": "or"},
    {"strategy": "dp", "reparam": "unit", "branches_off": ("expert_gate",)},
]


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "sequential"])
@pytest.mark.parametrize("model", ["mixtral", "qwen3-moe", "shared"])
def test_values_and_gradients_equal_the_reference(te_ranks, model, grouped):
    overrides = {"moe_grouped_gemm": grouped}
    cases = [{"kind": "llama", "config": form, "experts": model, "overrides": overrides} for form in FORMS]
    [results] = te_ranks.run("compare_with_reference", cases=cases)
    for case, found in zip(cases, results):
        assert found["start"] == 0.0 or case["config"]["strategy"] == "unified"
        # Megatron takes softmax and sigmoid of the router in float32.
        assert found["logits"] < 1e-6 and found["gradient"] < 1e-5, (case, found)


LATENT_FORMS = [
    {"strategy": "hg"},
    {"strategy": "none"},
    {"strategy": "iwd"},
    {"strategy": "unified", "sites": ("attention", "mlp", "head", "projections")},
    {"strategy": "dp", "experts": "shared", "sites": ("attention", "mlp", "head", "projections")},
    {"strategy": "or", "placement": "dual"},
    {"strategy": "post-qkv", "reparam": "unit", "branches_off": ("latent_down",)},
]


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "sequential"])
def test_experts_on_latents_equal_the_reference(te_ranks, grouped):
    """The norm feeds the projection to the latents; the experts' own maps count as projections."""
    overrides = {"moe_grouped_gemm": grouped}
    cases = [
        {"kind": "llama", "config": form, "experts": "latent", "overrides": overrides}
        for form in LATENT_FORMS
    ]
    [results] = te_ranks.run("compare_with_reference", cases=cases)
    for case, found in zip(cases, results):
        assert found["start"] == 0.0 or case["config"]["strategy"] == "unified", case
        assert found["logits"] < 1e-6 and found["gradient"] < 1e-5, (case, found)


LAYOUTS = {
    "ep2": (2, {"expert_model_parallel_size": 2}),
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
}


@pytest.mark.parametrize(
    ("model", "whose"), [("mixtral", "per-expert"), ("latent", "per-expert"), ("latent", "shared")]
)
def test_gradients_in_every_layout(te_ranks, model, whose):
    """Gradients, the clipping norm, a step and the audit of grouped experts; where these are on one
    tensor-parallel rank each, with rows that take turns as well."""
    config = {"strategy": "dp", "experts": whose, "sites": "attention,mlp,head,projections"}
    for turns in (None, 4):
        given = {"config": config, "experts": model}
        given["overrides"] = {"moe_grouped_gemm": True, "moe_mlp_glu_interleave_size": turns}
        serial = te_ranks.run("expert_gradients", **given)
        for world_size, sizes in [LAYOUTS[name] for name in LAYOUTS if not (turns and name == "tp2-sp")]:
            assert_equal_steps(te_ranks.run("expert_gradients", world_size, **given, **sizes), serial)


def test_a_grouped_expert_without_tokens_has_gradients_of_zero(te_ranks):
    given = {"config": {"strategy": "dp"}, "experts": "shared", "overrides": {"moe_grouped_gemm": True}}
    [found] = te_ranks.run("expert_gradients", idle=3, **given)
    for index, idle in ((2, False), (3, True)):
        own = [g for name, g in found["gradients"].items() if f"local_experts.{index}." in name]
        assert len(own) == 4  # gate and up, in and out
        assert all(gradient.any() != idle for gradient in own)


@pytest.mark.parametrize(
    ("overrides", "sizes", "config", "message"),
    [
        (
            {"moe_mlp_glu_interleave_size": 4},
            {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            {},
            "would load other rows than the scale vectors are for; add --expert-tensor-parallel-size 1",
        ),
        ({}, {"expert_model_parallel_size": 2}, {"experts": "shared"}, "--scalevec-experts shared has no ef"),
    ],
)
def test_what_is_refused_of_experts_on_latents(te_ranks, overrides, sizes, config, message):
    given = {"config": {"strategy": "dp", **config}, "experts": "latent", **sizes}
    with pytest.raises(RankFailure, match=message):
        te_ranks.run("expert_gradients", 2, overrides={"moe_grouped_gemm": True, **overrides}, **given)


def test_what_is_counted_of_experts_on_latents(te_ranks):
    """Two layers, each with the router, the projection to the latents, and gate and up of a shared expert
    behind the norm; gate, up and down of 4 experts and the way back behind none."""
    counts = {
        **{f"attention {branch}": 2 for branch in "qkv"},
        **{f"mlp {branch}": 2 for branch in ("router", "latent_down", "shared_gate", "shared_up")},
        **{f"projections expert_{branch}": 8 for branch in ("gate", "up", "down")},
        **{f"projections {branch}": 2 for branch in ("o", "latent_up", "shared_down")},
    }
    config = {"strategy": "dp", "sites": "attention,mlp,head,projections"}
    [found] = te_ranks.run("expert_audit", config=config, experts="latent")
    both = {f"{name} {side}": number for name, number in counts.items() for side in ("in", "out")}
    assert found["built_vectors"] == {**both, "head logits in": 1}
    # qkv and o; the router, both projections around the latents; two of each expert and of the shared one.
    assert found["linears_converted"] == 2 * (2 + 1 + 2 + 2 * 4 + 2)
    assert found["norm_scales_retired"] == 2 * 2
    assert {v["weight_decay_class"] for v in found["vectors"]} == {"input"} and found["norm_scales_retired"]
    assert all(vector["decays"] for vector in found["vectors"])
    whole = {v["branch"]: v["tensor_parallel"] for v in found["vectors"] if v["branch"].startswith("latent")}
    assert set(whole.values()) == {"as the weight that every rank holds whole"}
    [default] = te_ranks.run("expert_audit", config={"strategy": "dp"}, experts="latent")
    assert not [name for name in default["built_vectors"] if "expert_gate" in name and "shared" not in name]


@pytest.mark.parametrize("model", ["mixtral", "latent"])
def test_gate_and_up_rows_that_take_turns_equal_the_reference(te_ranks, model):
    """In blocks of four rows; an expert that is a module of its own has its rows in the ordinary order."""
    cases = [
        {
            "kind": "llama",
            "config": {"sites": ("attention", "mlp", "head", "projections"), **form},
            "experts": model,
            "overrides": {"moe_grouped_gemm": grouped, "moe_mlp_glu_interleave_size": 4},
        }
        for grouped in (True, False)
        for form in ({"strategy": "unified"}, {"strategy": "dp", "experts": "shared", "reparam": "unit"})
    ]
    [results] = te_ranks.run("compare_with_reference", cases=cases)
    for case, found in zip(cases, results):
        assert found["logits"] < 1e-6 and found["gradient"] < 1e-5, (case, found)


@pytest.mark.parametrize("config", [FORMS[1], FORMS[2], FORMS[4]], ids=["unified", "one-set", "dp"])
@pytest.mark.parametrize(
    ("ranks_of", "sizes"),
    [
        (1, {}),
        (2, {"expert_model_parallel_size": 2}),
        (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    ],
    ids=["one", "ep2", "tp2"],
)
def test_grouped_and_sequential_checkpoints_are_the_same(te_ranks, config, ranks_of, sizes):
    """Names, shapes, offsets and replicas of everything that is saved; what trains, roles and counts."""
    for found in te_ranks.run("describe", ranks_of, kind="llama", config=config, experts="shared", **sizes):
        local, te = found["local"], found["transformer_engine"]
        assert te["parameters"] == local["parameters"]
        assert te["audit"] == local["audit"]
        # Megatron itself keeps the norm before experts under another name in its local layers.
        for entries in (te["checkpoint"], local["checkpoint"]):
            for key in [
                k for k in entries if re.search(r"layers\.1\.(pre_mlp_|mlp\.linear_fc1\.)layer_?norm", k)
            ]:
                del entries[key]
        assert te["checkpoint"] == local["checkpoint"]
        vectors = [key for key in te["checkpoint"] if ".experts." in key and "gamma_" in key]
        own = [name for name in te["parameters"] if ".experts." in name and "gamma_" in name]
        assert len(vectors) == len(own) > 0


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no-interception", "has no method _get_weight_tensors, through which"),
        ("quantized", "holds quantized weights"),
        ("bypassed", "does not take its weights through _get_weight_tensors"),
    ],
)
def test_what_cannot_carry_vectors_says_so(te_ranks, case, message):
    [found] = te_ranks.run("convert_grouped", case=case)
    assert re.search(message, found["error"])
    assert found["unchanged"]


def test_converted_grouped_linears_stop_adding_to_main_grad(te_ranks):
    [found] = te_ranks.run("convert_grouped", case="fine")
    assert found["error"] == "" and found["fused"] is False
