"""Telemetry beside the float64 reference, in every layout."""

import pytest
from runs import assert_equal_telemetry

# Nothing of these is folded, so there is one mode.
ONE_MODE = {("iwd", "optimizer")}
UNIT = {"strategy": "unified-foldable", "reparam": "unit"}
CASES = {
    "hg": {"config": {"strategy": "hg"}},
    "unified": {"config": {"strategy": "unified"}},
    "unit": {"config": UNIT},
    "iwd": {"config": {"strategy": "iwd"}},
    "shared": {"config": {"strategy": "or", "reparam": "product"}, "kind": "gpt2"},
    "qk-norm": {"config": {"strategy": "dp"}, "kind": "qk-norm"},
}
EXPERTS = {
    "experts": {"config": {"strategy": "hg"}, "experts": "mixtral"},
    "shared experts": {"config": {"strategy": "hg", "experts": "shared"}, "experts": "mixtral"},
    "experts unit": {"config": UNIT, "experts": "mixtral"},
}
LAYOUTS = {
    "serial": (1, 1, {}),
    "dp2": (2, 2, {}),
    "tp2": (2, 1, {"tensor_model_parallel_size": 2}),
    "tp2-sp": (2, 1, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, 1, {"pipeline_model_parallel_size": 2}),
}
EXPERT_LAYOUTS = {
    "serial": (1, 1, {}),
    "ep2": (2, 2, {"expert_model_parallel_size": 2}),
    "etp2": (2, 1, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
}


@pytest.fixture(scope="module")
def reference(ranks):
    known = {}

    def of(name, data_ranks=1):
        if (name, data_ranks) not in known:
            case = {**CASES, **EXPERTS}[name]
            [known[name, data_ranks]] = ranks.run("telemetry_by_the_reference", data_ranks=data_ranks, **case)
        return known[name, data_ranks]

    return of


def told_and_expected(ranks, reference, cases, world_size, data_ranks, sizes):
    """Both modes of execution in one go; the other one has the same masters."""
    wanted = [
        (name, mode) for mode in ("autograd", "optimizer") for name in cases if (name, mode) not in ONE_MODE
    ]
    results = ranks.run(
        "telemetry_of_a_step",
        world_size,
        cases=[{**cases[name], "mode": mode} for name, mode in wanted],
        **sizes,
    )
    assert all(found is None for result in results[:-1] for found in result)
    for (name, _), told in zip(wanted, results[-1]):
        yield told, reference(name, data_ranks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_the_references(ranks, reference, layout):
    for told, expected in told_and_expected(ranks, reference, CASES, *LAYOUTS[layout]):
        assert_equal_telemetry(told, expected)


def test_masters_that_every_data_parallel_rank_holds_whole(ranks, reference):
    """Without the distributed optimizer a sum over the ranks has each several times."""
    cases = [{**CASES["unit"], "mode": mode, "distributed": False} for mode in ("autograd", "optimizer")]
    for told in ranks.run("telemetry_of_a_step", 2, cases=cases)[-1]:
        assert_equal_telemetry(told, reference("unit", 2))


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_experts_count_once(ranks, reference, layout):
    for told, expected in told_and_expected(ranks, reference, EXPERTS, *EXPERT_LAYOUTS[layout]):
        assert_equal_telemetry(told, expected)
