"""Checkpoints of models with experts: the guard, the way in and the way back, resuming."""

import pytest

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
    folder = tmp_path_factory.mktemp("round-trips")
    cases = [
        {"kind": kind, "config": config, "train": train, **more}
        for kind, config, more in SAME_FUNCTION.values()
        for train in (False, True)
    ]
    [results] = ranks.run("round_trips", folder=str(folder), cases=cases)
    return dict(zip(((name, train) for name in SAME_FUNCTION for train in (False, True)), results))


def tolerance(name):
    return 2e-2 if "bf16" in name else 1e-5


@pytest.mark.parametrize("name", SAME_FUNCTION)
def test_unfolded_is_what_conversion_makes_of_the_stock_model(found, name):
    """Every parameter of every expert, bit by bit; none is left at its initial value."""
    result = found[name, False]
    assert result["initial"] == [] and result["dtypes"] == []
    assert result["unfolded"] < tolerance(name)


@pytest.mark.parametrize("name", SAME_FUNCTION)
def test_unfold_then_fold_is_the_identity(found, name):
    result = found[name, False]
    assert result["args"] and result["folded"] < tolerance(name)
    if name not in ROUNDED:
        assert result["changed"] == []


@pytest.mark.parametrize("name", SAME_FUNCTION)
def test_a_trained_model_folds_to_the_same_function(found, name):
    result = found[name, True]
    assert result["folded"] < tolerance(name) and result["product"] < tolerance(name)
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
