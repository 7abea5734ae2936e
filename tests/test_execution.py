"""Execution inside the optimizer: the same numbers as by autograd, or the run stops."""

import numpy as np
import pytest
from ranks.pool import RankFailure

FOLDING = ["hg", "post-qkv", "dp", "dnp", "or", "unified", "unified-foldable"]
# Smaller than the tests' usual model; the hidden size makes shards end in the middle of rows.
SMALL = {"num_layers": 1, "hidden_size": 40}
UNIT = {"strategy": "unified-foldable", "reparam": "unit"}


def _case(strategy, **more):
    return {"config": {"strategy": strategy}, "model": SMALL, **more}


def _differences(result):
    ours, theirs = result["optimizer"], result["autograd"]
    assert len(ours["losses"]) == len(theirs["losses"]) == 20
    scale = max(map(abs, theirs["losses"]))
    return {
        "losses": np.abs(np.subtract(ours["losses"], theirs["losses"])).max() / scale,
        "norms": np.abs(np.divide(ours["norms"], theirs["norms"]) - 1).max(),
        "vectors": max(
            np.abs(vector - theirs["vectors"][name]).max() for name, vector in ours["vectors"].items()
        ),
    }


def _assert_same(result):
    differences = _differences(result)
    assert differences["losses"] < 2e-6, differences
    assert differences["norms"] < 1e-6, differences
    # Where a scalar's gradient is zero but for rounding (a norm follows the weight), Adam's step is as
    # large as for any other.
    assert differences["vectors"] < 2e-4, differences
    own = result["optimizer"]
    for errors in own["check"]:
        assert errors["weight"] < 5e-7 and errors["vectors"] < 1e-6, errors
    assert own["live"]


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    ],
    ids=["dp2", "tp2-sp"],
)
def test_both_modes_take_the_same_steps_on_two_ranks(ranks, sizes):
    """Twenty steps with float32 live weights beside float32 masters: no rounding between the modes."""
    cases = [
        _case("unified", overlap=True),
        {"config": UNIT, "model": SMALL},
        _case("dp", distributed=False, overlap=True, kind="one-group"),
    ]
    for result in ranks.run("compare_executions", 2, cases=cases, **sizes)[0]:
        _assert_same(result)


def test_every_strategy_on_four_ranks(ranks):
    """Sharded over two tensor-parallel and two data-parallel ranks."""
    cases = [_case(strategy) for strategy in FOLDING]
    cases.append(
        {
            "config": {
                "strategy": "dp",
                "branches_off": ("k",),
                "sites": ("attention", "mlp", "projections"),
            },
            "model": SMALL,
        }
    )
    results = ranks.run("compare_executions", 4, cases=cases, tensor_model_parallel_size=2)
    for result in results[0]:
        _assert_same(result)
        assert result["optimizer"]["sets"] == 1  # one of each collective


def test_bfloat16_weights_are_cast_folded_masters(ranks):
    """On two data-parallel ranks, gradients reduced in float32 and in bfloat16."""
    cases = [
        _case("unified-foldable", precision="bf16"),
        _case("unified", precision="bf16", ddp={"grad_reduce_in_fp32": False}),
        _case("hg", precision="bf16", distributed=False),
    ]
    for result in ranks.run("compare_executions", 2, cases=cases)[0]:
        own = result["optimizer"]
        assert own["live"]
        for errors in own["check"]:
            assert errors["weight"] < 5e-7 and errors["vectors"] < 1e-6, errors


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("leave-one-out", "is not what the optimizer's master and the scale vectors come to"),
        ("fold-twice", "is not what the optimizer's master and the scale vectors come to"),
        ("load-vectors-alone", "is not what the optimizer's master and the scale vectors come to"),
        ("forget-to-write", "stepped without folding its masters"),
    ],
)
def test_a_fault_stops_the_run(ranks, fault, message):
    with pytest.raises(RankFailure) as caught:
        ranks.run("compare_executions", cases=[_case("unified-foldable")], fault=fault)
    assert message in " ".join(str(caught.value).split())


@pytest.mark.parametrize("sizes", [{}, {"tensor_model_parallel_size": 2}], ids=["dp2", "tp2"])
def test_a_dropped_reduction_shows(ranks, sizes):
    """What the comparison is worth: without the sums over ranks it fails."""
    [result] = ranks.run(
        "compare_executions", 2, cases=[_case("unified-foldable")], fault="drop-reduction", **sizes
    )[0]
    assert max(errors["vectors"] for errors in result["optimizer"]["check"]) > 1e-2
    assert _differences(result)["vectors"] > 1e-3
