"""Execution inside the optimizer in whole runs of Megatron's loop: layouts, precisions."""

import numpy as np
import pytest
from ranks.arguments import EXPERT_LAYOUTS, LAYOUTS, tiny_gpt

pytestmark = pytest.mark.needs_training

DISTRIBUTED = ["--use-distributed-optimizer"]
OVERLAP = [*DISTRIBUTED, "--overlap-grad-reduce", "--overlap-param-gather"]
IN_OPTIMIZER = ["--scalevec-execution", "optimizer"]
UNIFIED_FOLDABLE = ["--scalevec-strategy", "unified-foldable"]
FOLDABLE = [*UNIFIED_FOLDABLE, *IN_OPTIMIZER]


ALL_LAYOUTS = {**EXPERT_LAYOUTS, **LAYOUTS, "dp2": (2, DISTRIBUTED)}
# By default its products are of bfloat16 numbers, where the processor multiplies such.
MUON = ["--optimizer", "muon", "--muon-fp32-matmul-prec", "high"]
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
        ("pp2-vpp", OVERLAP),
        ("cp2", DISTRIBUTED),
        ("dp2-distopt", ["--global-batch-size", "16", "--mtp-num-layers", "1", *EVALUATING]),
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
    assert (len(optimizer["evaluations"]) >= 3) == (EVALUATING[0] in flags)
    np.testing.assert_allclose(optimizer["evaluations"], autograd["evaluations"], rtol=2e-6)


@pytest.mark.parametrize(
    ("layout", "model", "flags"),
    [
        # Weights step first and are gathered after their vectors have stepped.
        ("dp2", "llama", MUON),
        ("dp2-distopt", "llama", ["--optimizer", "lion"]),
        # One layer-wise optimizer for both.
        ("dp2", "llama", [*MUON, "--no-use-layer-wise-param-layout"]),
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


def test_skipped_steps_of_fp16(ranks):
    """The initial loss scale overflows: steps are skipped, then the run goes on, in both modes alike."""
    flags = ["--fp16", "--initial-loss-scale", str(2**40), "--loss-scale-window", "2"]
    argv = tiny_gpt("llama", *flags, *OVERLAP, *UNIFIED_FOLDABLE, "--train-iters", "30")
    [ours, _] = ranks.run("train", 2, argv=[*argv, *IN_OPTIMIZER])
    [theirs, _] = ranks.run("train", 2, argv=[*argv, "--scalevec-execution", "autograd"])
    assert ours["audit"]["execution"] == "optimizer"
    assert np.isfinite(ours["losses"]).all()
    assert len(ours["losses"]) == len(theirs["losses"])
    np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=3e-3)
