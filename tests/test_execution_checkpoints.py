"""Checkpoints of runs that fold inside the optimizer: resume, the other mode, the tools, stock Megatron."""

import shutil

import numpy as np
import pytest
import torch
from ranks.arguments import EXPERT_LAYOUTS, LAYOUTS, tiny_gpt
from ranks.pool import RankFailure
from reference import effective_weight, product
from runs import assert_continues

from megatron_scalevec.checkpoint.store import CheckpointReader

pytestmark = pytest.mark.needs_training

DISTRIBUTED = ["--use-distributed-optimizer"]
FORMATS = {
    "reshardable": [*DISTRIBUTED, "--dist-ckpt-optim-fully-reshardable"],
    "default": DISTRIBUTED,
    "plain": [],
}
IN_OPTIMIZER = ["--scalevec-execution", "optimizer"]
BY_AUTOGRAD = ["--scalevec-execution", "autograd"]


INSTANCES = "--num-distributed-optimizer-instances 2 --micro-batch-size 1".split()
ALL_LAYOUTS = {**EXPERT_LAYOUTS, **LAYOUTS, "dp2": (2, []), "instances": (4, INSTANCES)}
SCRIPTS = {"hybrid": "pretrain_hybrid.py"}  # of models that the built-in entry does not build


def _run(ranks, layout, form, *flags, job="train", model="llama", **options):
    world_size, arguments = ALL_LAYOUTS[layout]
    argv = tiny_gpt(model, "--bf16", *arguments, *FORMATS[form], *flags)
    return ranks.run(job, world_size, argv=argv, script=SCRIPTS.get(model), **options)


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Runs of ten steps with a checkpoint at the fifth, made when they are first asked for."""
    runs = {}

    def get(layout, form, *flags, **more):
        key = layout, form, flags, *more.items()
        if key not in runs:
            folder = tmp_path_factory.mktemp("run")
            save = ["--save", str(folder), "--save-interval", "5"]
            runs[key] = folder, _run(ranks, layout, form, *flags, *save, **more)
        return runs[key]

    return get


def _resume(ranks, folder, layout, form, *flags, **more):
    load = ["--load", str(folder), "--ckpt-step", "5"]
    return _run(ranks, layout, form, *flags, *load, by_name=False, **more)


# --- resume -------------------------------------------------------------------------------------------

DP = ("--scalevec-strategy", "dp", *IN_OPTIMIZER)  # nothing of it is left in the forward pass
UNIFIED = ("--scalevec-strategy", "unified", *IN_OPTIMIZER)
PRODUCT = ("--scalevec-strategy", "unified-foldable", *IN_OPTIMIZER)
UNIT = ("--scalevec-strategy", "unified-foldable", "--scalevec-reparam", "unit", *IN_OPTIMIZER)


SHARED_DP = (*DP, "--scalevec-experts", "shared")
UNROUNDED = {"job": "train_unrounded"}


@pytest.mark.parametrize(
    ("layout", "form", "flags"),
    [
        ("tp2-sp", "reshardable", UNIFIED),
        ("dp2-distopt", "default", DP),
        ("pp2-vpp", "plain", UNIT),
        ("instances", "reshardable", UNIFIED),
        ("instances", "default", UNIFIED),
    ],
    ids=["reshardable", "default", "plain", "instances-reshardable", "instances-default"],
)
def test_five_and_five_steps_are_ten(ranks, saved, layout, form, flags):
    """Bit for bit in the same layout: losses, norms of gradients, vectors, moments."""
    folder, whole = saved(layout, form, *flags)
    resumed = _resume(ranks, folder, layout, form, *flags)
    for first, second in zip(whole, resumed):
        assert second["audit"]["execution"] == "optimizer"
        assert len(second["losses"]) in (0, 5)
        assert second["losses"] == first["losses"][5:]
        assert second["grad_norms"] == first["grad_norms"][5:]
        for name, vector in first["vectors"].items():
            np.testing.assert_array_equal(second["vectors"][name], vector, err_msg=name)
        assert second["moments"] == first["moments"]
    assert any(run["moments"] for run in whole) and whole[-1]["losses"]


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        ("llama", ["--optimizer", "muon"]),
        ("deepseek-v3", ["--expert-model-parallel-size", "2", "--scalevec-experts", "shared"]),
    ],
    ids=["layer-wise", "deepseek-v3"],
)
def test_five_and_five_steps_of_several_optimizers_are_ten(ranks, saved, model, arguments):
    """Where weights and vectors have different optimizers; losses, norms, vectors and moments, bit by bit."""
    flags = (*arguments, *UNIFIED)
    folder, whole = saved("dp2", "default", *flags, model=model)
    resumed = _resume(ranks, folder, "dp2", "default", *flags, model=model)
    for first, second in zip(whole, resumed):
        assert len(first["losses"]) == 10 and first["audit"]["execution"] == "optimizer"
        assert second["losses"] == first["losses"][5:]
        assert second["grad_norms"] == first["grad_norms"][5:]
        assert second["moments"] == first["moments"] and first["moments"]
        for name, vector in first["vectors"].items():
            np.testing.assert_array_equal(second["vectors"][name], vector, err_msg=name)


@pytest.mark.parametrize("apart", [False, True])
def test_a_run_with_non_persistent_checkpoints_alone_goes_on_in_its_mode(ranks, tmp_path, apart):
    """As one that was killed before its first persistent save; and the other guards look at these too."""
    load, strategy = ["--load", str(tmp_path)], DP[:2]
    beside = tmp_path / ("apart" if apart else "non_persistent")
    kind = ["--non-persistent-save-interval", "4", "--non-persistent-ckpt-type", "global"]
    kind += ["--non-persistent-global-ckpt-dir", str(beside)] if apart else []
    save = ["--save", str(tmp_path), "--save-interval", "10"]
    [whole] = _run(ranks, "serial", "plain", *strategy, *BY_AUTOGRAD, *kind, *save)
    shutil.rmtree(tmp_path / "iter_0000010")
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()

    [run] = _run(ranks, "serial", "plain", *strategy, *kind, *load, by_name=False)
    assert run["audit"]["execution"] == "autograd"
    assert run["losses"] == whole["losses"][8:] and len(run["losses"]) == 2
    [run] = _run(ranks, "serial", "plain", "--use-checkpoint-args", *kind, *load, by_name=False)
    assert run["audit"]["strategy"] == "dp" and run["losses"] == whole["losses"][8:]
    with pytest.raises(RankFailure, match="was trained with dp"):
        _run(ranks, "serial", "plain", *UNIFIED[:2], *kind, *load, by_name=False)
    (beside / "iter_0000008" / ".metadata").unlink()
    with pytest.raises(RankFailure, match="iter_0000008 is not whole .*leave out --non-persistent-ckpt-ty"):
        _run(ranks, "serial", "plain", *strategy, *kind, *load, by_name=False)


def _layouts():
    """(model, strategy, saved at, resumed at)"""
    saved_at = ("serial", "tp2-sp", "pp2")
    yield from (("llama", UNIFIED, source, target) for source in saved_at for target in saved_at)
    yield from (("llama", UNIFIED, "tp2-sp", target) for target in ("cp2", "dp2-distopt"))
    yield from (("llama", DP, *ends) for ends in zip(saved_at, (*saved_at[1:], saved_at[0])))
    yield from (("mixtral", UNIFIED, *ends) for ends in (("ep2", "ep2"), ("ep2", "tp2-sp-etp1")))
    yield from (("mixtral", UNIFIED, *ends) for ends in (("tp2-sp", "pp2"), ("pp2", "tp2-sp")))
    yield "mixtral", SHARED_DP, "ep2", "tp2-sp-etp1"


@pytest.mark.parametrize(
    ("model", "flags", "source", "target"),
    [pytest.param(*case, id=f"{case[0]}-{case[1][1]}-{case[2]}-{case[3]}") for case in _layouts()],
)
def test_resuming_in_a_layout(ranks, saved, model, flags, source, target):
    """The optimizer's state with it; without rounding of the live weights, which would hide an error. In the
    same layout bit by bit."""
    case = {"model": model, **UNROUNDED}
    folder, whole = saved(source, "reshardable", *flags, **case)
    runs = _resume(ranks, folder, target, "reshardable", *flags, **case)
    assert runs[-1]["audit"]["execution"] == "optimizer" and len(runs[-1]["losses"]) == 5
    assert_continues(runs[-1], whole[-1])
    for first, second in zip(whole, runs) if source == target else ():
        assert second["losses"] == first["losses"][5:]
        assert second["grad_norms"] == first["grad_norms"][5:]
        assert second["moments"] == first["moments"] and first["moments"]


def test_one_and_several_expert_parallel_ranks(ranks, saved):
    """As by autograd, and in stock runs: refused with the optimizer's state."""
    case = {"model": "mixtral", **UNROUNDED}
    folder, _ = saved("ep2", "reshardable", *UNIFIED, **case)
    with pytest.raises(RankFailure, match="loads no optimizer state across the step from one expert-paral"):
        _resume(ranks, folder, "pp2", "reshardable", *UNIFIED, **case)


def test_resuming_without_the_optimizer_keeps_the_function(ranks, saved):
    """W is what the live weight and the vectors say; the next iteration's loss is the same, bit by bit."""
    folder, whole = saved("dp2-distopt", "default", *DP)
    run = _resume(ranks, folder, "dp2-distopt", "default", *DP, "--no-load-optim")[-1]
    assert run["losses"][0] == whole[-1]["losses"][5]
    assert run["losses"] != whole[-1]["losses"][5:]


# --- the other mode -----------------------------------------------------------------------------------


HYBRID = ("--hybrid-layer-pattern", "M*-G-*")


@pytest.mark.parametrize(
    ("model", "source", "target", "more", "written_by"),
    [
        ("llama", "tp2-sp", "pp2", (), "autograd"),
        ("llama", "tp2-sp", "pp2", (), "optimizer"),
        # Vectors of each expert's own.
        ("mixtral", "ep2", "tp2-sp-etp1", (), "autograd"),
        # Latent attention, multi-token prediction, vectors that experts share.
        ("deepseek-v3", "ep2", "ep2", ("--scalevec-experts", "shared"), "optimizer"),
        ("hybrid", "tp2-sp", "serial", HYBRID, "autograd"),
        ("hybrid", "serial", "tp2-sp", HYBRID, "optimizer"),
    ],
)
def test_a_run_of_the_other_mode_goes_on(ranks, saved, model, source, target, more, written_by):
    """In another layout, with the optimizer's state and without it."""
    modes = {"autograd": BY_AUTOGRAD, "optimizer": IN_OPTIMIZER}
    strategy = ("--scalevec-strategy", "unified", *more)
    case = {"model": model, **UNROUNDED}
    folder, whole = saved(source, "reshardable", *strategy, *modes.pop(written_by), **case)
    [(own, flags)] = modes.items()
    flags = (*strategy, *flags)
    run = _resume(ranks, folder, target, "reshardable", *flags, **case)[-1]
    assert run["audit"]["execution"] == own and len(run["losses"]) == 5
    assert_continues(run, whole[-1])
    run = _resume(ranks, folder, target, "reshardable", *flags, "--no-load-optim", **case)[-1]
    np.testing.assert_allclose(run["losses"][0], whole[-1]["losses"][5], rtol=1e-6)
    assert abs(run["losses"][-1] / whole[-1]["losses"][-1] - 1) > 1e-5  # the comparisons can fail


@pytest.mark.parametrize("more", [(), ("--no-load-optim",)], ids=["with-state", "without-state"])
def test_a_run_by_autograd_goes_on_in_bfloat16(ranks, saved, more):
    """Raw weights are found from W_eff in float32, and every weight gets its gradient as before."""
    folder, whole = saved("dp2-distopt", "default", *DP)
    flags = ("--scalevec-strategy", "dp", *BY_AUTOGRAD)
    run = _resume(ranks, folder, "dp2-distopt", "default", *flags, *more)[-1]
    assert run["audit"]["execution"] == "autograd" and len(run["losses"]) == 5
    steps = slice(0, 1) if more else slice(0, 5)
    np.testing.assert_allclose(run["losses"][steps], whole[-1]["losses"][5:][steps], rtol=1e-3)
    np.testing.assert_allclose(run["grad_norms"][steps], whole[-1]["grad_norms"][5:][steps], rtol=1e-2)


def test_the_default_goes_on_in_the_mode_of_the_checkpoint(ranks, saved):
    """A run trained by autograd, as by earlier versions of the plugin: bit by bit; its weights alone start a
    run that folds."""
    strategy = ("--scalevec-strategy", "unified")
    folder, whole = saved("tp2-sp", "reshardable", *strategy, *BY_AUTOGRAD, **UNROUNDED)
    run = _resume(ranks, folder, "tp2-sp", "reshardable", *strategy, **UNROUNDED)[-1]
    assert run["audit"]["execution"] == "autograd"
    assert run["audit"]["execution_reason"].startswith(f"as before in {folder}")
    assert run["losses"] == whole[-1]["losses"][5:]
    weights = ("--no-load-optim", "--train-iters", "6")
    run = _resume(ranks, folder, "serial", "reshardable", *strategy, *weights, **UNROUNDED)[-1]
    assert run["audit"]["execution"] == "optimizer"
    np.testing.assert_allclose(run["losses"][0], whole[-1]["losses"][5], rtol=1e-6)


def test_a_checkpoint_of_the_format_torch_goes_on_in_torch_dist(ranks, saved):
    """Which is the format of runs by autograd alone: in their mode bit by bit, and in the other one, with the
    optimizer's state or its weights alone."""
    strategy = ("--scalevec-strategy", "dp")
    folder, whole = saved("serial", "plain", *strategy, "--ckpt-format", "torch")
    runs = _resume(ranks, folder, "serial", "plain", *strategy)
    assert runs[0]["audit"]["execution_reason"].startswith(f"as before in {folder}")
    for first, second in zip(whole, runs):
        assert second["losses"] == first["losses"][5:] and len(second["losses"]) == 5
        assert second["moments"] == first["moments"] and first["moments"]
    for more, steps in (((), 5), (("--no-load-optim",), 1)):
        run = _resume(ranks, folder, "serial", "plain", *strategy, *IN_OPTIMIZER, *more)[-1]
        assert run["audit"]["execution"] == "optimizer" and len(run["losses"]) == 5
        np.testing.assert_allclose(run["losses"][:steps], whole[-1]["losses"][5:][:steps], rtol=1e-3)


# --- the tools ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folded(ranks, saved, tmp_path_factory):
    """A run's checkpoint and what ``scalevec fold`` makes of it, checked by the tool."""
    folder, whole = saved("tp2", "reshardable", *PRODUCT)
    out = tmp_path_factory.mktemp("folded") / "out"
    ranks.run("scalevec", arguments=["fold", str(folder), str(out), "--ckpt-step", "5"])
    return folder, out, whole[-1]


def test_folding_keeps_the_weights_and_folds_the_masters(folded):
    """Weights bit by bit; and they are the folded masters, cast."""
    folder, out, _ = folded
    before, after = CheckpointReader(folder, 5), CheckpointReader(out)
    assert not [key for key in after.tensors if "gamma" in key or "scalevec" in key]
    fc1 = "decoder.layers.mlp.linear_fc1."
    masters = "optimizer.state.param."

    def gamma(side, branch):
        parts = (before.read(f"{masters}{fc1}gamma_{side}_{branch}_{part}") for part in ("alpha", "beta"))
        return product(*(part.double() for part in parts))

    raw = before.read(f"{masters}{fc1}weight").double()
    expected = torch.cat(
        [
            torch.stack(
                [effective_weight(w, gamma("in", b)[n], gamma("out", b)[n]) for n, w in enumerate(half)]
            )
            for b, half in zip(("gate", "up"), raw.chunk(2, dim=1))
        ],
        dim=1,
    )
    assert float((expected - raw).abs().max()) > 1e-4
    torch.testing.assert_close(after.read(f"{masters}{fc1}weight").double(), expected, rtol=1e-6, atol=0)
    for linear in (fc1, "decoder.layers.self_attention.linear_qkv."):
        weight = after.read(f"{linear}weight")
        assert torch.equal(weight, before.read(f"{linear}weight"))
        assert torch.equal(weight, after.read(f"{masters}{linear}weight").to(weight.dtype))


def test_a_folded_checkpoint_goes_on_in_stock_megatron(ranks, folded):
    """With its optimizer's state."""
    _, out, whole = folded
    [run] = _run(ranks, "serial", "reshardable", "--load", str(out), plugin=False, by_name=False)
    assert len(run["losses"]) == 5
    np.testing.assert_allclose(run["losses"][0], whole["losses"][5], rtol=1e-3)
    np.testing.assert_allclose(run["losses"], whole["losses"][5:], rtol=0.05)


def test_an_export_is_that_of_the_folded_checkpoint(ranks, folded, tmp_path):
    from safetensors.torch import load_file

    folder, out, _ = folded
    for source, step, target in ((folder, ["--step", "5"], "run"), (out, [], "folded")):
        ranks.run("scalevec", arguments=["export", str(source), str(tmp_path / target), *step])
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "folded"))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_an_unfolded_checkpoint_starts_a_run_that_folds(ranks, folded, tmp_path):
    """``scalevec unfold`` writes raw weights; optimizer's state and schedule go along."""
    _, out, whole = folded
    arguments = ["unfold", str(out), str(tmp_path / "start"), "--strategy", "dp", "--no-check"]
    ranks.run("scalevec", arguments=arguments)
    load = ["--load", str(tmp_path / "start")]
    run = _run(ranks, "tp2", "reshardable", *DP, *load, by_name=False)[-1]
    assert run["audit"]["execution"] == "optimizer" and len(run["losses"]) == 5
    np.testing.assert_allclose(run["losses"][0], whole["losses"][5], rtol=1e-3)
    np.testing.assert_allclose(run["losses"], whole["losses"][5:], rtol=0.05)


# --- stock Megatron -----------------------------------------------------------------------------------


def test_stock_megatron_loads_the_model_and_not_the_masters(ranks, saved):
    """Without the plugin: the same function from the model's part; its first step would drop the fold."""
    folder, whole = saved("dp2-distopt", "default", *DP)
    run = _resume(ranks, folder, "dp2-distopt", "default", "--no-load-optim", plugin=False)[-1]
    np.testing.assert_allclose(run["losses"][0], whole[-1]["losses"][5], rtol=1e-3)
    lenient = ["--dist-ckpt-strictness", "log_all"]
    with pytest.raises(RankFailure, match="Global shape mismatch"):
        _resume(ranks, folder, "dp2-distopt", "default", *lenient, plugin=False)
