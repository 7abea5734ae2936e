"""Telemetry beside the float64 reference, in every layout."""

import pytest

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
    "experts unit": {"config": UNIT, "experts": "mixtral"},
}
DENSE_LAYOUTS = {
    "serial": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2-sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
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


def assert_equal(told, expected):
    """Every figure of every vector, to the rounding of a float32 model."""
    assert told["norm"] == pytest.approx(expected["norm"], rel=1e-5)
    names = ("layer", "site", "branch", "side")
    rows = {tuple(row.pop(name) for name in names): row for row in told["vectors"]}
    assert len(rows) == len(told["vectors"])
    assert rows.keys() == expected["figures"].keys()
    for place, figures in expected["figures"].items():
        for name, value in figures.items():
            want = value if value is None else pytest.approx(value, rel=2e-5, abs=1e-9)
            assert rows[place][name] == want, (place, name)
    cosines = {tuple(row[name] for name in names): row["cosine"] for row in told["branches"]}
    assert cosines == pytest.approx(expected["cosines"], rel=1e-6)


@pytest.mark.parametrize("mode", ["autograd", "optimizer"])
@pytest.mark.parametrize("layout", DENSE_LAYOUTS)
def test_values_are_the_references(ranks, reference, layout, mode):
    world_size, sizes = DENSE_LAYOUTS[layout]
    names = [name for name in CASES if mode == "autograd" or name in ("hg", "unified", "unit")]
    results = ranks.run(
        "telemetry_of_a_step", world_size, cases=[{**CASES[name], "mode": mode} for name in names], **sizes
    )
    assert all(found is None for result in results[:-1] for found in result)
    for name, told in zip(names, results[-1]):
        assert_equal(told, reference(name))


@pytest.mark.parametrize("mode", ["autograd", "optimizer"])
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_experts_count_once(ranks, reference, layout, mode):
    world_size, data_ranks, sizes = EXPERT_LAYOUTS[layout]
    cases = [{**case, "mode": mode} for case in EXPERTS.values()]
    results = ranks.run("telemetry_of_a_step", world_size, cases=cases, **sizes)
    for name, told in zip(EXPERTS, results[-1]):
        assert_equal(told, reference(name, data_ranks))
