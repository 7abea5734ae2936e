"""Telemetry on TransformerEngine's layers is what the float64 reference says of Megatron's own."""

from runs import assert_equal_telemetry

EXPERTS = {"config": {"strategy": "hg"}, "experts": "mixtral"}


def test_fused_norms(te_ranks):
    config = {"strategy": "unified-foldable", "reparam": "unit"}
    cases = [{"config": config, "mode": mode} for mode in ("autograd", "optimizer")]
    results = te_ranks.run("telemetry_of_a_step", 2, cases=cases, tensor_model_parallel_size=2)
    [expected] = te_ranks.run("telemetry_by_the_reference", config=config)
    for told in results[-1]:
        assert_equal_telemetry(told, expected)


def test_grouped_experts(te_ranks):
    """One linear holds the vectors of all local experts."""
    grouped = {**EXPERTS, "model": {"moe_grouped_gemm": True}}
    cases = [{**grouped, "mode": mode} for mode in ("autograd", "optimizer")]
    results = te_ranks.run("telemetry_of_a_step", 2, cases=cases, expert_model_parallel_size=2)
    [expected] = te_ranks.run("telemetry_by_the_reference", data_ranks=2, **EXPERTS)
    for told in results[-1]:
        assert_equal_telemetry(told, expected)
