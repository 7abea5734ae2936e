"""Execution inside the optimizer in whole runs of Megatron's loop: layouts, precisions, checkpoints."""

import re

import numpy as np
import pytest
from ranks.arguments import EXPERT_LAYOUTS, LAYOUTS, tiny_gpt
from ranks.pool import RankFailure

pytestmark = pytest.mark.needs_training

DISTRIBUTED = ["--use-distributed-optimizer"]
OVERLAP = [*DISTRIBUTED, "--overlap-grad-reduce", "--overlap-param-gather"]
RESHARDABLE = [*DISTRIBUTED, "--dist-ckpt-optim-fully-reshardable"]
IN_OPTIMIZER = ["--scalevec-execution", "optimizer"]
DP = ["--scalevec-strategy", "dp", *IN_OPTIMIZER]  # nothing of it is left in the forward pass
FOLDABLE = ["--scalevec-strategy", "unified-foldable", *IN_OPTIMIZER]


ALL_LAYOUTS = {**EXPERT_LAYOUTS, **LAYOUTS, "dp2": (2, DISTRIBUTED)}
EVALUATING = ["--eval-interval", "3", "--eval-iters", "1"]


def _modes(ranks, layout, *flags, strategy="unified", job="train_unrounded", model="llama"):
    world_size, arguments = ALL_LAYOUTS[layout]
    argv = tiny_gpt(model, "--bf16", *arguments, *flags, "--scalevec-strategy", strategy)
    autograd = ranks.run(job, world_size, argv=[*argv, "--scalevec-execution", "autograd"])[-1]
    optimizer = ranks.run(job, world_size, argv=[*argv, *IN_OPTIMIZER])[-1]
    assert autograd["audit"]["execution"] == "autograd"
    assert optimizer["audit"]["execution"] == "optimizer"
    return optimizer, autograd


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ("pp2", OVERLAP),
        ("pp2-vpp", [*OVERLAP, *EVALUATING]),
        ("cp2", DISTRIBUTED),
        ("dp2-distopt", ["--global-batch-size", "16", "--mtp-num-layers", "1"]),
        ("tp4", []),
        ("full-recompute", ["--rampup-batch-size", "4", "4", "32", "--global-batch-size", "8"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_both_modes_in_a_layout(ranks, layout, flags):
    """Losses and clipped gradient norms of ten iterations, without rounding between the modes."""
    optimizer, autograd = _modes(ranks, layout, *flags)
    assert len(optimizer["losses"]) == len(autograd["losses"]) > 3
    np.testing.assert_allclose(optimizer["losses"], autograd["losses"], rtol=2e-6)
    np.testing.assert_allclose(optimizer["grad_norms"], autograd["grad_norms"], rtol=2e-5)
    # Between a step and the gathering of its parameters, which the next forward pass would wait for.
    assert len(optimizer["evaluations"]) == (3 if EVALUATING[0] in flags else 0)
    np.testing.assert_allclose(optimizer["evaluations"], autograd["evaluations"], rtol=2e-6)


@pytest.mark.parametrize(
    ("layout", "model", "flags"),
    [
        # Weights step first and are gathered after their vectors have stepped.
        ("dp2", "llama", ["--optimizer", "muon"]),
        ("dp2-distopt", "llama", ["--optimizer", "lion"]),
        # One layer-wise optimizer for both.
        ("dp2", "llama", ["--optimizer", "muon", "--no-use-layer-wise-param-layout"]),
        # Latent attention, multi-token prediction, experts and a shared one.
        ("ep2-distopt", "deepseek-v3", ["--scalevec-experts", "shared"]),
    ],
    ids=["muon", "lion-overlaps", "muon-one-optimizer", "deepseek-v3"],
)
def test_weights_and_vectors_of_different_optimizers(ranks, layout, model, flags):
    """Layer by layer over data-parallel ranks, or shared by experts: losses and norms without rounding."""
    optimizer, autograd = _modes(ranks, layout, *flags, model=model)
    assert len(optimizer["losses"]) == len(autograd["losses"]) == 10
    np.testing.assert_allclose(optimizer["losses"], autograd["losses"], rtol=2e-6)
    np.testing.assert_allclose(optimizer["grad_norms"], autograd["grad_norms"], rtol=2e-5)


def test_rounding_to_bfloat16_costs_no_more_than_by_autograd(ranks):
    """Distance from the run without rounding, over ten iterations."""
    exact, _ = _modes(ranks, "serial", strategy="unified-foldable")
    optimizer, autograd = _modes(ranks, "serial", strategy="unified-foldable", job="train")

    def distance(run):
        return np.abs(np.subtract(run["losses"], exact["losses"])).max()

    assert 0 < distance(optimizer) < 2 * distance(autograd)


def test_skipped_steps_of_fp16(ranks):
    """The initial loss scale overflows: steps are skipped, then the run goes on, in both modes alike."""
    flags = ["--fp16", "--initial-loss-scale", str(2**40), "--loss-scale-window", "2"]
    argv = tiny_gpt("llama", *flags, *OVERLAP, *FOLDABLE, "--train-iters", "30")
    [ours, _] = ranks.run("train", 2, argv=argv)
    [theirs, _] = ranks.run("train", 2, argv=[*argv, "--scalevec-execution", "autograd"])
    assert ours["audit"]["execution"] == "optimizer"
    assert np.isfinite(ours["losses"]).all()
    assert len(ours["losses"]) == len(theirs["losses"])
    np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=3e-3)


# --- checkpoints --------------------------------------------------------------------------------------


def _save(folder):
    return ["--save", str(folder), "--save-interval", "5"]


def _load(folder):
    return ["--load", str(folder), "--ckpt-step", "5"]


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Ten iterations on two tensor-parallel ranks, in a format that any layout can load."""
    folder = tmp_path_factory.mktemp("folded")
    argv = tiny_gpt("llama", "--bf16", "--tensor-model-parallel-size", "2", *RESHARDABLE, *DP)
    return folder, ranks.run("train", 2, argv=[*argv, *_save(folder)])[-1]


@pytest.mark.parametrize("layout", ["tp2", "dp2-distopt", "pp2"])
def test_resuming_in_another_layout(ranks, saved, layout):
    """Masters, moments and vectors: the same layout repeats the run, others up to rounding."""
    folder, whole = saved
    world_size, arguments = LAYOUTS[layout]
    argv = tiny_gpt("llama", "--bf16", *arguments, *RESHARDABLE, *DP, *_load(folder))
    run = ranks.run("train", world_size, argv=argv, by_name=False)[-1]
    assert run["audit"]["execution"] == "optimizer"
    rtol = 0 if layout == "tp2" else 1e-3
    np.testing.assert_allclose(run["losses"], whole["losses"][5:], rtol=rtol)


def test_resuming_without_the_optimizer_keeps_the_function(ranks, saved):
    """W is what the live weight and the vectors say; the next iteration's loss is the same, bit by bit."""
    folder, whole = saved
    argv = tiny_gpt("llama", "--bf16", "--tensor-model-parallel-size", "2", *RESHARDABLE, *DP)
    run = ranks.run("train", 2, argv=[*argv, *_load(folder), "--no-load-optim"], by_name=False)[-1]
    assert run["losses"][0] == whole["losses"][5]


def _stock(*flags):
    return tiny_gpt("llama", "--bf16", *RESHARDABLE, *flags)


def test_stock_megatron_loads_the_model(ranks, saved):
    """Without the plugin and without the optimizer's state: the same function."""
    folder, whole = saved
    flags = ["--tensor-model-parallel-size", "2", *_load(folder), "--no-load-optim"]
    run = ranks.run("train", 2, argv=_stock(*flags), plugin=False, by_name=False)[-1]
    np.testing.assert_allclose(run["losses"][0], whole["losses"][5], rtol=1e-3)


def test_stock_megatron_does_not_load_the_optimizer(ranks, saved):
    """Its first step would drop the fold."""
    folder, _ = saved
    flags = ["--tensor-model-parallel-size", "2", *_load(folder)]
    with pytest.raises(RankFailure) as caught:
        ranks.run("train", 2, argv=_stock(*flags), plugin=False, by_name=False)
    assert "optimizer.state" in str(caught.value)


@pytest.mark.parametrize("optimizer", [RESHARDABLE, DISTRIBUTED, []], ids=["reshardable", "default", "plain"])
def test_raw_masters_have_keys_of_their_own(ranks, tmp_path, optimizer):
    """Whatever the format, a stock Megatron does not find the tensor it asks for."""
    saving = ["--save", str(tmp_path), "--save-interval", "10"]
    argv = tiny_gpt("llama", "--bf16", *optimizer, *DP, *saving)
    ranks.run("train", argv=argv)
    [names] = ranks.run("checkpoint_keys", folder=str(tmp_path / "iter_0000010"))
    raw = [name for name in names if "scalevec_raw" in name]
    masters = [name for name in names if re.search(r"\.(fp32_)?param(\.|$)", name) and name not in raw]
    assert raw
    assert not any("linear_qkv.weight" in name or "linear_fc1.weight" in name for name in masters)
    if "--dist-ckpt-optim-fully-reshardable" not in optimizer and optimizer:
        assert not masters


def test_the_other_mode_is_told_to_be_this_one(ranks, saved):
    folder, _ = saved
    argv = tiny_gpt("llama", "--bf16", "--tensor-model-parallel-size", "2", *RESHARDABLE, *DP)
    with pytest.raises(RankFailure, match="give --scalevec-execution optimizer"):
        ranks.run("train", 2, argv=[*argv, *_load(folder), "--scalevec-execution", "autograd"])


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        ("llama", ["--optimizer", "muon"]),
        ("deepseek-v3", ["--expert-model-parallel-size", "2", "--scalevec-experts", "shared"]),
    ],
    ids=["layer-wise", "deepseek-v3"],
)
def test_five_and_five_steps_are_ten(ranks, tmp_path, model, arguments):
    """Where weights and vectors have different optimizers; losses, norms, vectors and moments, bit by bit."""
    argv = tiny_gpt(
        model, "--bf16", *DISTRIBUTED, *arguments, "--scalevec-strategy", "unified", *IN_OPTIMIZER
    )
    whole = ranks.run("train", 2, argv=[*argv, *_save(tmp_path)])
    resumed = ranks.run("train", 2, argv=[*argv, *_load(tmp_path)], by_name=False)
    for first, second in zip(whole, resumed):
        assert len(first["losses"]) == 10 and first["audit"]["execution"] == "optimizer"
        assert second["losses"] == first["losses"][5:]
        assert second["grad_norms"] == first["grad_norms"][5:]
        assert second["moments"] == first["moments"] and first["moments"]
        for name, vector in first["vectors"].items():
            np.testing.assert_array_equal(second["vectors"][name], vector, err_msg=name)
