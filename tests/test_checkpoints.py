"""Resuming, and what happens when a checkpoint was trained under another strategy."""

import numpy as np
import pytest
from ranks.arguments import LAYOUTS, tiny_gpt
from ranks.pool import RankFailure

pytestmark = pytest.mark.needs_training


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Ten iterations of ``dp`` on two tensor-parallel ranks, with a checkpoint at the fifth."""
    folder = tmp_path_factory.mktemp("checkpoint")
    world_size, arguments = LAYOUTS["tp2"]
    argv = tiny_gpt(
        "llama",
        *arguments,
        *("--scalevec-strategy", "dp", "--scalevec-weight-decay", "all"),
        *("--save", str(folder), "--save-interval", "5", "--exit-interval", "10"),
    )
    return folder, ranks.run("train", world_size, argv=argv)[-1]


def _resume(folder, *more):
    # The tracker file names the last checkpoint; the run goes on from the fifth iteration.
    return tiny_gpt("llama", "--load", str(folder), "--ckpt-step", "5", *more)


def test_the_audit_lies_beside_the_checkpoints(saved):
    import json

    folder, run = saved
    assert json.loads((folder / "scalevec_audit.json").read_text()) == run["audit"]


@pytest.mark.parametrize("layout", ["tp2", "serial", "pp2"])
def test_a_resumed_run_repeats_the_uninterrupted_one(ranks, saved, layout):
    """The same layout, and others; the vectors' optimizer state included."""
    folder, whole = saved
    world_size, arguments = LAYOUTS[layout]
    argv = _resume(folder, *arguments, "--scalevec-strategy", "dp", "--scalevec-weight-decay", "all")
    run = ranks.run("train", world_size, argv=argv, by_name=False)[-1]
    assert len(run["losses"]) == 5
    np.testing.assert_allclose(run["losses"], whole["losses"][5:], rtol=1e-5)
    np.testing.assert_allclose(run["grad_norms"], whole["grad_norms"][5:], rtol=1e-5)


def test_use_checkpoint_args_restores_the_strategy(ranks, saved):
    folder, whole = saved
    [run] = ranks.run("train", argv=_resume(folder, "--use-checkpoint-args"), by_name=False)
    assert run["audit"]["components"]["weight_decay"] == "all"
    np.testing.assert_allclose(run["losses"], whole["losses"][5:], rtol=1e-5)


@pytest.mark.parametrize(
    ("flags", "asked"),
    [
        ([], "stock"),
        (["--scalevec-strategy", "hg"], "hg"),
        (["--scalevec-strategy", "dp"], "weight decay split"),
        (["--scalevec-strategy", "hg", "--use-checkpoint-args"], "hg"),
        (["--finetune"], "stock"),
    ],
    ids=["stock", "other strategy", "other component", "explicit wins", "finetune"],
)
def test_another_strategy_stops_and_says_which(ranks, saved, flags, asked):
    with pytest.raises(RankFailure) as caught:
        ranks.run("train", argv=_resume(saved[0], *flags), by_name=False)
    message = " ".join(str(caught.value).split())
    assert "was trained with dp: branches split, placement dual" in message
    assert f"this run asks for {asked}" in message or asked in message
    assert "--scalevec-strategy dp --scalevec-weight-decay all, or --use-checkpoint-args" in message


def test_a_stock_checkpoint_does_not_start_a_strategy_by_accident(ranks, tmp_path):
    argv = tiny_gpt("llama", "--save", str(tmp_path), "--save-interval", "10")
    ranks.run("train", argv=argv)
    with pytest.raises(RankFailure, match="was trained with stock"):
        ranks.run("train", argv=tiny_gpt("llama", "--load", str(tmp_path), "--scalevec-strategy", "hg"))
