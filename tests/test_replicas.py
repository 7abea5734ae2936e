"""Copies that must be equal, equal and not."""

import pytest
from ranks.arguments import LAYOUTS, tiny_gpt
from ranks.pool import RankFailure

TP2 = {"tensor_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}


def check(ranks, breakage, world_size=2, **sizes):
    return ranks.run("replicas_of_a_broken_model", world_size, breakage=breakage, **sizes)


@pytest.mark.parametrize(
    ("world_size", "sizes", "compared"), [(2, TP2, 30), (2, CP2, 34), (2, {}, 34), (4, TP2, 64)]
)
def test_equal_copies_are_equal(ranks, world_size, sizes, compared):
    """One collective for each group of more than one rank, however many vectors there are. Four of the biases
    are split over tensor-parallel ranks."""
    for found in check(ranks, "none", world_size, **sizes):
        assert found["error"] is None
        assert found["collectives"] == (2 if world_size == 4 else 1)
        assert found["compared"] == compared


@pytest.mark.parametrize(
    ("breakage", "sizes", "over", "name", "by"),
    [
        ("one bit", TP2, "tensor-parallel", "gamma_in_up", "5.96e-08"),
        ("one bit", CP2, "data-parallel", "gamma_in_up", "5.96e-08"),
        ("one bit", {}, "data-parallel", "gamma_in_up", "5.96e-08"),
        ("bfloat16", TP2, "tensor-parallel", "gamma_in_up", "0.00391"),
        ("NaN", TP2, "tensor-parallel", "gamma_out_up", "nan"),
        ("shard", {}, "data-parallel", "bias", "1"),
    ],
)
def test_a_copy_that_differs_is_named(ranks, breakage, sizes, over, name, by):
    for found in check(ranks, breakage, **sizes):
        sentence = (
            f"now: decoder.layers.1.mlp.linear_fc1.{name} must be the same on all {over} ranks, and on rank "
            f"1 it differs from rank 0's by up to {by}; "
        )
        assert found["error"].startswith(sentence)


def test_shards_of_tensor_parallel_ranks_may_differ(ranks):
    """They are no copies."""
    assert all(found["error"] is None for found in check(ranks, "shard", **TP2))


FLAGS = ("--scalevec-strategy", "dp", "--scalevec-debug-replicas", "2")


@pytest.mark.needs_training
@pytest.mark.parametrize("layout", ["tp2-sp", "dp2-distopt", "cp2"])
def test_sound_runs_pass_and_are_not_changed(ranks, layout):
    """Overlapped gathering of parameters included, which must be finished before the check."""
    world_size, arguments = LAYOUTS[layout]
    argv = tiny_gpt("llama", *arguments, "--exit-interval", "4", *FLAGS[:2])
    plain = ranks.run("train", world_size, argv=argv)[-1]
    checked = ranks.run("train", world_size, argv=[*argv, *FLAGS[2:]])[-1]
    assert checked["losses"] == plain["losses"] and checked["grad_norms"] == plain["grad_norms"]


@pytest.mark.needs_training
def test_a_gradient_that_is_not_summed_stops_the_run(ranks):
    argv = tiny_gpt("llama", *LAYOUTS["tp2"][1], *FLAGS)
    with pytest.raises(RankFailure) as caught:
        ranks.run("train", 2, argv=argv, sabotage="tensor-parallel-sum")
    assert (
        "after step 2 of this run: decoder.layers.0.self_attention.linear_qkv.gamma_in_q must be the same on "
        "all tensor-parallel ranks"
    ) in str(caught.value)


@pytest.mark.needs_training
def test_parameters_that_are_not_gathered_yet_would_differ(ranks):
    """The reason for gathering first: the check as it would be without."""
    argv = tiny_gpt("llama", *LAYOUTS["dp2-distopt"][1], *FLAGS)
    with pytest.raises(RankFailure, match="must be the same on all data-parallel ranks"):
        ranks.run("train", 2, argv=argv, sabotage="check before gathering")


@pytest.mark.needs_training
def test_a_stock_run_can_be_checked_too(ranks):
    argv = tiny_gpt("gpt2", *LAYOUTS["tp2"][1], *FLAGS[2:])
    assert len(ranks.run("train", 2, argv=argv)[-1]["losses"]) == 10


@pytest.mark.needs_training
@pytest.mark.parametrize("value", ["0", "-1", "often"])
def test_a_wrong_number_of_steps(ranks, value):
    argv = tiny_gpt("llama", "--scalevec-debug-replicas", value)
    with pytest.raises(RankFailure, match="is not a number of steps, 1 or more"):
        ranks.run("train", argv=argv)


@pytest.mark.needs_training
def test_a_script_without_steps_says_that_nothing_was_compared(ranks):
    with pytest.raises(RankFailure, match="--scalevec-debug-replicas compared nothing"):
        ranks.run("launch_only", argv=["--scalevec-debug-replicas", "1"], script="exits_zero.py")


@pytest.mark.parametrize(("interval", "says"), [(10, False), (11, True)])
def test_an_interval_longer_than_the_run_is_told(capsys, interval, says):
    from types import SimpleNamespace

    from packaging.version import Version

    from megatron_scalevec import ScaleVecConfig
    from megatron_scalevec.integration import argument_hooks
    from megatron_scalevec.integration.arguments import parse_own
    from megatron_scalevec.integration.session import Session

    own = parse_own(["--scalevec-debug-replicas", str(interval)])
    session = Session(own, Version("0.19.2"), False, ScaleVecConfig())
    validate = argument_hooks.validate(session, lambda args, defaults: args)
    validate(SimpleNamespace(**vars(own), train_iters=10))
    assert session.replicas_every == interval
    expected = f"nothing will be compared: --scalevec-debug-replicas is {interval}, and the run has 10 iter"
    assert (expected in capsys.readouterr().out) == says
