"""Checkpoints of models with experts: the guard, the way in and the way back, resuming."""

import pytest
from runs import logits_tolerance, round_trips

ALL_SITES = "attention,mlp,head,projections"

# Name to kind of model, strategy, and the rest of a case.
SAME_FUNCTION = {
    "mixtral": ("mixtral", {"strategy": "hg"}, {}),
    "one set": ("mixtral", {"strategy": "unified-foldable", "experts": "shared", "sites": ALL_SITES}, {}),
    "qwen3-moe, unit": ("qwen3-moe", {"strategy": "hg", "reparam": "unit"}, {}),
    "shared experts": ("shared", {"strategy": "unified-foldable", "sites": ALL_SITES}, {}),
    "shared experts, one set": ("shared", {"strategy": "dp", "experts": "shared"}, {}),
    "scale at the norm": ("shared", {"strategy": "or", "placement": "dual"}, {}),
    "iwd": ("mixtral", {"strategy": "iwd"}, {}),
    "layernorm": ("mixtral", {"strategy": "dp"}, {"overrides": {"normalization": "LayerNorm"}}),
    "mtp": ("shared", {"strategy": "dp"}, {"overrides": {"mtp_num_layers": 1}}),
    "bf16, fp32 vectors": ("mixtral", {"strategy": "hg", "vector_dtype": "fp32"}, {"dtype": "bfloat16"}),
}
ROUNDED = {"qwen3-moe, unit", "layernorm"}  # divided and multiplied again: the last bit may differ


@pytest.fixture(scope="module")
def found(ranks, tmp_path_factory):
    """Every case once with and once without training in between."""
    return round_trips(ranks, tmp_path_factory.mktemp("round-trips"), SAME_FUNCTION)


@pytest.mark.parametrize("name", SAME_FUNCTION)
def test_unfolded_is_what_conversion_makes_of_the_stock_model(found, name):
    """Every parameter of every expert, bit by bit; none is left at its initial value."""
    result = found[name, False]
    assert result["initial"] == [] and result["dtypes"] == []
    assert result["unfolded"] < logits_tolerance(name)


@pytest.mark.parametrize("name", SAME_FUNCTION)
def test_unfold_then_fold_is_the_identity(found, name):
    result = found[name, False]
    assert result["args"] and result["folded"] < logits_tolerance(name)
    if name not in ROUNDED:
        assert result["changed"] == []


@pytest.mark.parametrize("name", SAME_FUNCTION)
def test_a_trained_model_folds_to_the_same_function(found, name):
    result = found[name, True]
    assert result["folded"] < logits_tolerance(name) and result["product"] < logits_tolerance(name)
    if name != "iwd":  # which has no vectors to train
        assert result["other"] > 2e-2


def test_a_scale_without_a_place_is_refused(ranks, tmp_path):
    """In the router alone, and in all experts."""
    cases = [
        {"kind": "mixtral", "config": {"strategy": "dp", "branches_off": branch}}
        for branch in ("router", "expert_up")
    ]
    cases.append({"kind": "shared", "config": {"strategy": "dp", "branches_off": "shared_expert_gate"}})
    [results] = ranks.run("round_trips", folder=str(tmp_path), cases=cases)
    for case, result in zip(cases, results):
        sentence = f"leaves no place for on {case['config']['branches_off']}: use a strategy"
        assert sentence in result["error"]


MLP = {"strategy": "post-qkv", "sites": "mlp"}
# Every branch of the mlp site but those whose weight is to be seen alone.
ALONE = {
    "router": "gate,up,expert_gate,expert_up,shared_gate,shared_up,shared_expert_gate",
    "experts": "gate,up,router,shared_gate,shared_up,shared_expert_gate",
    "shared_experts.linear_fc1": "gate,up,router,expert_gate,expert_up,shared_expert_gate",
    "gate_weight": "gate,up,router,expert_gate,expert_up,shared_gate,shared_up",
}


FOREIGN = [
    *((where, "shared", {**MLP, "branches_off": off}) for where, off in ALONE.items()),
    ("experts", "mixtral", {**MLP, "branches_off": "router", "experts": "shared"}),
    ("layer_norm_weight", "mixtral", {"strategy": "or", "sites": "mlp"}),
]


def test_a_stock_model_refuses_every_kind_of_raw_weight(ranks, tmp_path):
    """One kind at a time, the rest of the checkpoint is stock; whatever the strictness. Saved by two
    expert-parallel ranks; with the strategy, it loads there and on one rank."""
    what = {"folder": str(tmp_path), "cases": [case[1:] for case in FOREIGN]}
    for results in ranks.run("store_experts", 2, **what):
        for (where, _, config), result in zip(FOREIGN, results):
            for message in result["stock"].values():
                assert message != "loaded" and where in message, (config, message)
            assert "Global shape mismatch" in result["stock"]["ignore_all"], config
            assert result["other"] == [], config
    [results] = ranks.run("load_experts", **what)
    assert results == [[]] * len(FOREIGN)


def test_experts_fold_in_place(ranks):
    """In a process of one's own, for inference: routers, experts, shared experts and their gate."""
    cases = [
        {"kind": kind, "config": {"strategy": "unified-foldable", "experts": experts, "sites": ALL_SITES}}
        for kind, experts in (("shared", "per-expert"), ("mixtral", "shared"))
    ]
    [results] = ranks.run("fold_in_process", cases=cases)
    for result in results:
        assert result["difference"] < 1e-5
        assert result["classes"] == [] and result["names"] == [] and result["frozen"] == []
