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
    assert ("make a stock checkpoint of it first (scalevec fold)" in message) == (asked == "stock")


def test_another_spec_beside_checkpoint_arguments_stops(ranks, saved):
    argv = _resume(saved[0], "--use-checkpoint-args", "--spec", "megatron_scalevec.specs", "hg")
    with pytest.raises(RankFailure, match="asks for hg: .* ask for dp: .*drop one of the two"):
        ranks.run("train", argv=argv, by_name=False)


def test_another_spec_than_the_checkpoints_stops(ranks, tmp_path):
    spec = ("--spec", "megatron_scalevec.specs")
    argv = tiny_gpt("llama", *spec, "dp", "--save", str(tmp_path), "--save-interval", "10")
    ranks.run("train", argv=argv)
    argv = tiny_gpt("llama", *spec, "hg", "--use-checkpoint-args", "--load", str(tmp_path))
    with pytest.raises(RankFailure, match="specs hg was given, and --use-checkpoint-args brings"):
        ranks.run("train", argv=argv, by_name=False)


def test_interleaved_pipelines_agree_on_head_norms(ranks, tmp_path):
    """Megatron would build a q norm in the second chunk, because the first one has asked for a k norm."""
    world_size, arguments = LAYOUTS["pp2-vpp"]
    flags = ["--scalevec-strategy", "dnp", "--scalevec-branches-off", "q"]
    argv = tiny_gpt("llama", *arguments, *flags, "--save", str(tmp_path), "--save-interval", "10")
    whole = ranks.run("train", world_size, argv=argv)[-1]
    [serial] = ranks.run("train", argv=tiny_gpt("llama", *flags))
    np.testing.assert_allclose(whole["losses"], serial["losses"], rtol=1e-5)
    assert not any("q_layernorm" in name for name in whole["vectors"])


def test_a_stock_checkpoint_does_not_start_a_strategy_by_accident(ranks, tmp_path):
    argv = tiny_gpt("llama", "--save", str(tmp_path), "--save-interval", "10")
    ranks.run("train", argv=argv)
    sentence = r"was trained with stock .* asks for hg: .* with scale vectors of it first \(scalevec unfold\)"
    with pytest.raises(RankFailure, match=sentence):
        ranks.run("train", argv=tiny_gpt("llama", "--load", str(tmp_path), "--scalevec-strategy", "hg"))


DISTRIBUTED = ["--use-distributed-optimizer"]
RESHARDABLE = [*DISTRIBUTED, "--dist-ckpt-optim-fully-reshardable"]


@pytest.mark.parametrize(
    ("precision", "optimizer", "flags"),
    [
        (["--bf16"], [], ["--scalevec-strategy", "unified"]),
        (["--bf16"], DISTRIBUTED, ["--scalevec-strategy", "unified", "--scalevec-reparam", "unit"]),
        (["--bf16"], RESHARDABLE, ["--scalevec-strategy", "unified"]),
        (["--bf16"], DISTRIBUTED, ["--scalevec-strategy", "unified", "--scalevec-vector-dtype", "fp32"]),
        (["--bf16"], RESHARDABLE, ["--scalevec-strategy", "dnp", "--scalevec-vector-dtype", "fp32"]),
        ([], RESHARDABLE, ["--scalevec-strategy", "unified", "--scalevec-lr-mult", "input=2,output=0.5"]),
    ],
    ids=lambda value: " ".join(value).replace("--", "") or "plain",
)
def test_mixed_precision_resumes_exactly(ranks, tmp_path, precision, optimizer, flags):
    """Moments, masters and vectors of either dtype: five steps, save, load, five steps are ten steps."""
    argv = tiny_gpt("llama", *precision, *optimizer, *flags)
    whole = ranks.run("train", 2, argv=[*argv, "--save", str(tmp_path), "--save-interval", "5"])
    resumed = ranks.run("train", 2, argv=[*argv, "--load", str(tmp_path), "--ckpt-step", "5"], by_name=False)
    for first, second in zip(whole, resumed):
        assert len(second["losses"]) == 5
        assert second["losses"] == first["losses"][5:]
        assert second["grad_norms"] == first["grad_norms"][5:]
        for name, vector in first["vectors"].items():
            np.testing.assert_array_equal(second["vectors"][name], vector, err_msg=name)
