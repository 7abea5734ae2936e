"""Runs of models with experts, saved and resumed in other layouts, converted, and offered to stock Megatron.

Megatron has an optimizer of their own for experts that are spread over ranks, and loads no optimizer state
across the step from one expert-parallel rank to several, in stock runs neither.
"""

import numpy as np
import pytest
import torch
from ranks.arguments import EXPERT_LAYOUTS, tiny_gpt
from ranks.pool import RankFailure

from megatron_scalevec.checkpoint.store import CheckpointReader

pytestmark = pytest.mark.needs_training

RESHARDABLE = ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]


def _run(ranks, layout, *more, model="mixtral", **options):
    world_size, arguments = EXPERT_LAYOUTS[layout]
    argv = tiny_gpt(model, *RESHARDABLE, *arguments, *more)
    return ranks.run("train", world_size, argv=argv, **options)[-1]


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Runs of ten steps with a checkpoint at the fifth, made when they are first asked for."""
    runs = {}

    def get(layout, *strategy, **options):
        key = layout, strategy, repr(options)
        if key not in runs:
            folder = tmp_path_factory.mktemp("run")
            flags = ["--save", str(folder), "--save-interval", "5"]
            runs[key] = folder, _run(ranks, layout, *strategy, *flags, **options)
        return runs[key]

    return get


UNIFIED = ("--scalevec-strategy", "unified")
DP = ("--scalevec-strategy", "dp")


@pytest.mark.parametrize(
    ("strategy", "source", "target"),
    [
        (UNIFIED, "ep2", "ep2"),
        (UNIFIED, "ep2", "tp2-sp-etp1"),
        (UNIFIED, "tp2-sp", "pp2"),
        (UNIFIED, "pp2", "tp2-sp"),
        (DP, "ep2", "ep2"),
        ((*DP, "--scalevec-experts", "shared"), "ep2", "tp2-sp-etp1"),
    ],
)
def test_a_resumed_run_repeats_the_uninterrupted_one(ranks, saved, strategy, source, target):
    folder, whole = saved(source, *strategy)
    run = _run(ranks, target, *strategy, "--load", str(folder), "--ckpt-step", "5", by_name=False)
    assert len(run["losses"]) == 5
    if source == target:
        assert run["losses"] == whole["losses"][5:] and run["grad_norms"] == whole["grad_norms"][5:]
    np.testing.assert_allclose(run["losses"], whole["losses"][5:], rtol=1e-6)
    np.testing.assert_allclose(run["grad_norms"], whole["grad_norms"][5:], rtol=1e-5)


@pytest.mark.parametrize(("source", "target"), [("ep2", "pp2"), ("tp2-sp", "ep2")])
def test_one_and_several_expert_parallel_ranks(ranks, saved, source, target):
    """Refused with the optimizer's state; the weights and vectors alone go over."""
    folder, whole = saved(source, *UNIFIED)
    load = [*UNIFIED, "--load", str(folder), "--ckpt-step", "5"]
    with pytest.raises(RankFailure, match="loads no optimizer state across the step from one expert-paral"):
        _run(ranks, target, *load, by_name=False)
    run = _run(ranks, target, *load, "--no-load-optim", by_name=False)
    assert run["losses"][0] == pytest.approx(whole["losses"][5], rel=1e-6)


@pytest.mark.parametrize("more", [[], ["--dist-ckpt-strictness", "ignore_all", "--no-load-optim"]])
def test_stock_megatron_refuses(ranks, saved, more):
    folder, _ = saved("ep2", *DP)
    load = ["--load", str(folder), "--ckpt-step", "5", *more]
    with pytest.raises(RankFailure, match="Global shape mismatch|Missing keys"):
        _run(ranks, "ep2", *load, plugin=False, by_name=False)


def test_converted_checkpoints_go_on(ranks, saved, tmp_path):
    """Stock, to a strategy whose directions of experts do not decay (their optimizer gets a second group),
    and back; each goes on from the loss where the stock run was, with the averages of its weights."""
    model = "shared-experts"
    folder, whole = saved("ep2", model=model, plugin=False)
    out, back = tmp_path / "out", tmp_path / "back"
    form = ["--strategy", "unified-foldable", "--reparam", "unit"]
    unfold = ["unfold", str(folder), str(out), "--ckpt-step", "5", "--no-check", *form]
    ranks.run("scalevec", arguments=unfold)
    ranks.run("scalevec", arguments=["fold", str(out), str(back), "--no-check"])
    start, unfolded, folded = (CheckpointReader(path, 5) for path in (folder, out, back))
    layer = "decoder.layers.1.mlp."
    for path, weight in (
        ("router.", "weight"),
        ("experts.experts.linear_fc1.", "weight"),
        ("shared_experts.linear_fc1.", "weight"),
        ("shared_experts.", "gate_weight"),
    ):
        for state in ("exp_avg", "exp_avg_sq", "param"):
            key = f"optimizer.state.{state}.{layer}{path}"
            before = start.read(key + weight)
            assert before.any() and torch.equal(unfolded.read(f"{key}scalevec_{weight}"), before)
            torch.testing.assert_close(folded.read(key + weight), before)
    vector = f"{layer}experts.experts.linear_fc1.gamma_in_expert_up_direction"
    assert unfolded.tensors[f"optimizer.state.exp_avg.{vector}"].shape == (4, 32)
    # The chunks of norms differ: the optimizer had cut some of them.
    first, second = (
        {key: (stored.shape, stored.dtype) for key, stored in reader.tensors.items()}
        for reader in (start, folded)
    )
    assert first == second
    for path, options in ((out, {}), (back, {"plugin": False})):
        flags = ["--load", str(path), *(["--use-checkpoint-args"] if path == out else [])]
        run = _run(ranks, "ep2", *flags, model=model, by_name=False, **options)
        assert run["losses"][0] == pytest.approx(whole["losses"][5], rel=1e-6)
        assert len(run["losses"]) == 5
        np.testing.assert_allclose(run["losses"], whole["losses"][5:], rtol=0.05)


def test_finetuning_starts_from_a_stock_checkpoint_directly(ranks, saved):
    folder, _ = saved("ep2", model="shared-experts", plugin=False)
    flags = ["--load", str(folder), "--ckpt-step", "5", "--finetune"]
    plain = _run(ranks, "ep2", *flags, model="shared-experts", plugin=False, by_name=False)
    flags.append("--scalevec-strategy")
    for strategy in (["unified-foldable"], ["dp", "--scalevec-experts", "shared"]):
        run = _run(ranks, "ep2", *flags, *strategy, model="shared-experts", by_name=False)
        assert run["losses"][0] == pytest.approx(plain["losses"][0], rel=1e-6)
        assert run["audit"]["strategy"] == strategy[0]
    with pytest.raises(RankFailure, match=r"the norm before .*mlp\.router has a trained scale"):
        off = ["dp", "--scalevec-branches-off", "router"]
        _run(ranks, "ep2", *flags, *off, model="shared-experts", by_name=False)
