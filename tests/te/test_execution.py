"""Execution inside the optimizer on TransformerEngine's layers: its classes as they are, on W_eff."""

import numpy as np

OF_EXPERTS = ("attention", "mlp", "projections")
SITES = (*OF_EXPERTS, "latent")
ONE_WITH_EXPERTS = {"num_layers": 1, "moe_layer_freq": [1]}


def check(te_ranks, cases, **sizes):
    """Ten steps in both modes, without rounding between them."""
    cases = [{"steps": 10, **case} for case in cases]
    for results in te_ranks.run("compare_executions", 2, cases=cases, **sizes):
        assert len(results) == len(cases)
        for case, result in zip(cases, results):
            ours, theirs = result["optimizer"], result["autograd"]
            assert len(ours["losses"]) == 10
            np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=0, atol=1e-6)
            np.testing.assert_allclose(ours["norms"], theirs["norms"], rtol=1e-6)
            for errors in ours["check"]:
                assert errors["weight"] < 5e-7 and errors["vectors"] < 1e-6, (case, errors)
            assert ours["live"]


def test_fused_norms_and_latent_attention(te_ranks):
    """The norm inside the linear, also where it stores γ − 1; down-projections held whole by every rank."""
    cases = [
        {"config": {"strategy": "unified"}, "kind": "gpt2"},
        {"config": {"strategy": "iwd"}, "kind": "gpt2", "model": {"layernorm_zero_centered_gamma": True}},
        {"config": {"strategy": "dp", "sites": SITES}, "kind": "mla"},
    ]
    check(te_ranks, cases, tensor_model_parallel_size=2, sequence_parallel=True)


def test_grouped_experts(te_ranks):
    """One linear for all local experts, with vectors of their own and with shared ones."""
    cases = [
        {
            "config": {
                "strategy": "unified",
                "experts": experts,
                "sites": ("attention", "mlp", "projections"),
            },
            "experts": "shared",
            "model": {**ONE_WITH_EXPERTS, "moe_grouped_gemm": True},
            "without_tokens": 3,
        }
        for experts in ("per-expert", "shared")
    ]
    check(te_ranks, cases, expert_model_parallel_size=2)


def test_experts_on_latents_and_rows_that_take_turns(te_ranks):
    """Projections that every rank holds whole around the experts; gate and up rows in blocks of four."""
    sites = {"sites": ("attention", "mlp", "projections")}
    model = {"num_layers": 1, "moe_grouped_gemm": True}
    latent = {"config": {"strategy": "dp", **sites}, "experts": "latent", "model": model}
    turns = {**model, "moe_mlp_glu_interleave_size": 4}
    in_turns = {"config": {"strategy": "unified"}, "experts": "mixtral", "model": turns}
    check(te_ranks, [latent, in_turns], expert_model_parallel_size=2)
    check(te_ranks, [latent], tensor_model_parallel_size=2, sequence_parallel=True)
