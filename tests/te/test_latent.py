"""Latent attention of TransformerEngine's layers: weights that every rank holds whole, fused norms."""

import numpy as np
import pytest

STRATEGIES = ["none", "iwd", "hg", "post-qkv", "dp", "dnp", "or", "unified", "unified-foldable"]
KINDS = {
    "norms on latents": {},
    "no norms on latents": {"qk_layernorm": False},
    "one down-projection": {"mla_down_proj_fusion": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_equal_the_reference(te_ranks, kind):
    cases = [{"kind": "mla", "config": {"strategy": name}, "overrides": KINDS[kind]} for name in STRATEGIES]
    [results] = te_ranks.run("compare_with_reference", cases=cases)
    for case, found in zip(cases, results):
        assert found["start"] < 1e-15, case
        assert max(found["logits"], found["gradient"]) < 1e-10, case


@pytest.mark.parametrize("strategy", ["iwd", "unified"])
def test_the_same_parameters_as_with_local_layers(te_ranks, strategy):
    config = {"strategy": strategy}
    for found in te_ranks.run("describe", 2, kind="mla", config=config, tensor_model_parallel_size=2):
        local, te = found["local"], found["transformer_engine"]
        assert te["parameters"].keys() == local["parameters"].keys()
        for name, parameter in te["parameters"].items():
            if parameter["info"] is not None:
                assert parameter == local["parameters"][name]
        assert te["audit"] == local["audit"]
        vectors = [{key for key in of["checkpoint"] if "gamma" in key} for of in (local, te)]
        assert vectors[0] == vectors[1] and bool(vectors[0])


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("strategy", ["iwd", "or", "unified"])
def test_tensor_parallel_ranks_agree_with_one(te_ranks, strategy, sequence_parallel):
    """The gradients that Megatron hands to the optimizer, replicated weights' vectors among them."""
    worst = _worst(te_ranks, strategy, sequence_parallel)
    assert worst < 1e-8


@pytest.mark.parametrize("sabotage", ["summed-twice", "not-summed"])
def test_the_comparison_sees_wrong_sums(te_ranks, sabotage):
    assert _worst(te_ranks, "unified", True, sabotage=sabotage) > 1e-3


def _worst(te_ranks, strategy, sequence_parallel, **more):
    given = {"config": {"strategy": strategy}, "kind": "mla"}
    [serial] = te_ranks.run("gradients", **given)
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": sequence_parallel}
    worst = 0.0
    for run in te_ranks.run("gradients", 2, **given, **layout, **more):
        np.testing.assert_allclose(run["loss"], serial["loss"], rtol=1e-12)
        assert run["gradients"].keys() == serial["gradients"].keys()
        for name, expected in serial["gradients"].items():
            worst = max(worst, abs(run["gradients"][name] - expected).max() / abs(expected).max())
    return worst


def test_one_down_projection_over_ranks_is_refused(te_ranks):
    """Megatron gives the rotary key's rows one rank's gradient alone."""
    over_ranks = {"mla_down_proj_fusion": True, "tensor_model_parallel_size": 2}
    [*found] = te_ranks.run("latent_refused", 2, **over_ranks)
    for error in found:
        assert "--mla-down-proj-fusion" in error and "use one tensor-parallel rank" in error


def test_a_second_norm_before_the_queries_is_refused(te_ranks):
    """What Megatron 0.19 makes of --qk-layernorm where the queries have no latent."""
    [said] = te_ranks.run("latent_refused", q_lora_rank=None)
    assert "linear_q_proj has a norm of its own" in said and "add --q-lora-rank, drop --qk-layernorm" in said


@pytest.mark.parametrize("norms", [True, False])
def test_megatrons_own_hybrid_stack(te_ranks, norms):
    """Two down-projections, with --qk-layernorm two up-projections with a norm each, and gate and up."""
    [found] = te_ranks.run("own_hybrid_stack", qk_layernorm=norms)
    assert found["linears"] == 2 + 2 * norms + 1
    names = ["attention q_down", "attention kv_down", "attention k_rope", "mlp gate", "mlp up"]
    names += ["latent q_up", "latent k_up", "latent v_up"] * norms
    assert found["vectors"] == {**{f"{name} in": 1 for name in names}, "head logits in": 1}
