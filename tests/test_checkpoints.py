"""Resuming, and what happens when a checkpoint was trained under another strategy."""

import numpy as np
import pytest
import torch
from ranks.arguments import LAYOUTS, tiny_gpt
from ranks.pool import RankFailure

from megatron_scalevec.checkpoint.store import CheckpointReader

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
    assert ("make a stock checkpoint of it with scalevec fold" in message) == (asked == "stock")


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
    sentence = "was trained with stock .* asks for hg: .* make a start for it with scalevec unfold"
    with pytest.raises(RankFailure, match=sentence):
        ranks.run("train", argv=tiny_gpt("llama", "--load", str(tmp_path), "--scalevec-strategy", "hg"))


DISTRIBUTED = ["--use-distributed-optimizer"]
RESHARDABLE = [*DISTRIBUTED, "--dist-ckpt-optim-fully-reshardable"]
# The other mode's are in test_execution_checkpoints.
BY_AUTOGRAD = ["--scalevec-execution", "autograd"]


@pytest.mark.parametrize(
    ("precision", "optimizer", "flags"),
    [
        (["--bf16"], [], [*BY_AUTOGRAD, "--scalevec-strategy", "unified"]),
        (
            ["--bf16"],
            DISTRIBUTED,
            [*BY_AUTOGRAD, "--scalevec-strategy", "unified", "--scalevec-reparam", "unit"],
        ),
        (["--bf16"], RESHARDABLE, [*BY_AUTOGRAD, "--scalevec-strategy", "unified"]),
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


@pytest.fixture(scope="module")
def stock(ranks, tmp_path_factory):
    """Five iterations of a stock run on two tensor-parallel ranks, saved, and five more."""
    folder = tmp_path_factory.mktemp("stock")
    argv = tiny_gpt("llama", *RESHARDABLE, *LAYOUTS["tp2"][1], "--save", str(folder), "--save-interval", "5")
    return folder, ranks.run("train", 2, argv=argv)[-1]


def test_an_unfolded_run_goes_on_as_the_stock_run_would(ranks, stock, tmp_path):
    """Same losses at first, then those of a run with scale vectors; iteration, schedule and averages of the
    weights are carried over, so that a broken one shows in the first step's size."""
    folder, whole = stock
    tool = ["unfold", str(folder), str(tmp_path / "out"), "--ckpt-step", "5", "--no-check"]
    ranks.run("scalevec", arguments=[*tool, "--strategy", "dp"])
    tool = ["fold", str(tmp_path / "out"), str(tmp_path / "back"), "--no-check"]
    ranks.run("scalevec", arguments=tool)
    start, unfolded, folded = (
        CheckpointReader(path, step)
        for path, step in ((folder, 5), (tmp_path / "out", 5), (tmp_path / "back", 5))
    )
    qkv = "decoder.layers.self_attention.linear_qkv"
    norm, vector = f"{qkv}.layer_norm_weight", f"{qkv}.gamma_in_k"
    for state in ("exp_avg", "exp_avg_sq", "param"):
        of = f"optimizer.state.{state}."
        assert torch.equal(unfolded.read(f"{of}{qkv}.scalevec_weight"), start.read(f"{of}{qkv}.weight"))
        assert f"{of}{norm}" not in unfolded.tensors
        value = start.read(of + norm) if state == "param" else torch.zeros(4, 32)
        assert torch.equal(unfolded.read(of + vector), value)
        assert torch.equal(folded.read(of + norm), value)
        assert torch.equal(folded.read(f"{of}{qkv}.weight"), start.read(f"{of}{qkv}.weight"))
    # The chunks of norms differ: the optimizer had cut some of them.
    first, second = (
        {key: (stored.shape, stored.dtype) for key, stored in reader.tensors.items()}
        for reader in (start, folded)
    )
    assert first == second
    argv = tiny_gpt("llama", *RESHARDABLE, "--load", str(tmp_path / "out"))
    [run] = ranks.run("train", argv=[*argv, "--use-checkpoint-args"], by_name=False)
    assert run["audit"]["strategy"] == "dp" and len(run["losses"]) == 5
    assert run["losses"][0] == pytest.approx(whole["losses"][5], rel=1e-6)
    np.testing.assert_allclose(run["losses"], whole["losses"][5:], rtol=0.05)


def test_finetuning_starts_from_a_stock_checkpoint_directly(ranks, stock):
    """What the tool makes of it, and what conversion in place makes of it, are the same start."""
    folder, whole = stock
    argv = tiny_gpt("llama", *RESHARDABLE, "--load", str(folder), "--ckpt-step", "5", "--finetune")
    [plain] = ranks.run("train", argv=argv, by_name=False)
    for flags in (["--scalevec-strategy", "unified-foldable"], ["--scalevec-strategy", "iwd"]):
        in_optimizer = [["--bf16", "--scalevec-execution", "optimizer"]] if "iwd" not in flags else []
        for precision in ([], ["--bf16", *BY_AUTOGRAD], *in_optimizer):
            [run] = ranks.run("train", argv=[*argv, *precision, *flags], by_name=False)
            tolerance = 2e-3 if precision else 1e-6
            assert run["losses"][0] == pytest.approx(plain["losses"][0], rel=tolerance)
            assert run["audit"]["strategy"] in flags
    with pytest.raises(RankFailure, match="would drop the trained scales of its norms"):
        ranks.run("train", argv=[*argv, "--scalevec-strategy", "none"], by_name=False)
    with pytest.raises(RankFailure, match="leaves no place for on every branch"):
        ranks.run("train", argv=[*argv, "--scalevec-strategy", "post-qkv"], by_name=False)


def test_a_folded_checkpoint_goes_on_in_stock_megatron(ranks, tmp_path):
    """Model and optimizer state, in a process that knows nothing of the package."""
    argv = tiny_gpt("llama", *RESHARDABLE)
    flags = [
        "--scalevec-strategy",
        "unified-foldable",
        "--save",
        str(tmp_path / "run"),
        "--save-interval",
        "5",
    ]
    whole = ranks.run("train", 2, argv=[*argv, *LAYOUTS["tp2"][1], *flags])[-1]
    tool = ["fold", str(tmp_path / "run"), str(tmp_path / "out"), "--ckpt-step", "5", "--no-check"]
    ranks.run("scalevec", arguments=tool)
    load = ["--load", str(tmp_path / "out")]
    [run] = ranks.run("train", argv=[*argv, *load], plugin=False, by_name=False)
    assert len(run["losses"]) == 5
    assert run["losses"][0] == pytest.approx(whole["losses"][5], rel=1e-5)
    np.testing.assert_allclose(run["losses"], whole["losses"][5:], rtol=0.05)
    with pytest.raises(RankFailure, match="Global shape mismatch"):
        load = ["--load", str(tmp_path / "run"), "--ckpt-step", "5"]
        ranks.run("train", argv=[*argv, *load], plugin=False, by_name=False)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_unfolded_trained_and_folded(ranks, stock, tmp_path, dtype, tolerance):
    """Twenty steps of the real loop from a stock run's weights: the folded model computes the same."""
    start, trained, folded = (str(tmp_path / name) for name in ("start", "trained", "folded"))
    tool = ["unfold", str(stock[0]), start, "--ckpt-step", "5", "--strategy", "unified-foldable"]
    ranks.run("scalevec", arguments=[*tool, "--no-check"])
    flags = ["--use-checkpoint-args", "--load", start, "--finetune", "--train-iters", "20"]
    flags += ["--save", trained, "--save-interval", "20", *(["--bf16"] if dtype == "bfloat16" else [])]
    [run] = ranks.run("train", argv=tiny_gpt("llama", *RESHARDABLE, *flags), by_name=False)
    assert len(run["losses"]) == 20 and run["audit"]["strategy"] == "unified-foldable"
    ranks.run("scalevec", arguments=["fold", trained, folded, "--no-check"])
    [[same, other]] = ranks.run("logit_differences", first=trained, others=[folded, start], dtype=dtype)
    assert same < tolerance
    assert other > 10 * tolerance  # training has moved what is compared


def test_the_format_torch_is_refused_by_stock_megatron_too(ranks, tmp_path):
    """It loads a second time without strictness when the first attempt fails."""
    argv = tiny_gpt("llama", "--ckpt-format", "torch")
    flags = ["--scalevec-strategy", "hg"]
    save = ["--save", str(tmp_path), "--save-interval", "5"]
    [whole] = ranks.run("train", argv=[*argv, *flags, *save])
    load = ["--load", str(tmp_path), "--ckpt-step", "5"]
    [run] = ranks.run("train", argv=[*argv, *flags, *load], by_name=False)
    assert run["losses"] == whole["losses"][5:]
    with pytest.raises(RankFailure, match="size mismatch for"):
        ranks.run("train", argv=[*argv, *load, "--no-load-optim"], plugin=False, by_name=False)


def test_a_torn_checkpoint_stops_the_run(ranks, saved, tmp_path):
    import shutil

    folder = tmp_path / "run"
    shutil.copytree(saved[0], folder)
    argv = tiny_gpt("llama", "--scalevec-strategy", "dp", "--scalevec-weight-decay", "all")
    data = next((folder / "iter_0000010").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-100])
    with pytest.raises(RankFailure, match=r"iter_0000010 is not whole .*whole ones there: 5"):
        ranks.run("train", argv=[*argv, "--load", str(folder)], by_name=False)
    (folder / "latest_checkpointed_iteration.txt").write_text("")
    with pytest.raises(RankFailure, match="where an iteration should stand.*whole ones there: 5"):
        ranks.run("train", argv=[*argv, "--load", str(folder)], by_name=False)
