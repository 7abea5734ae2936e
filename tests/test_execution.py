"""Execution inside the optimizer: the same numbers as by autograd, or the run stops."""

import dataclasses
import sys
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from packaging.version import Version
from ranks.pool import RankFailure

from megatron_scalevec import ScaleVecConfig, ScaleVecError, execution
from megatron_scalevec.execution import engine, shard
from megatron_scalevec.execution.choice import OBSTACLES, choose_execution
from megatron_scalevec.integration.resumed import execution_to_keep

FOLDING = ["hg", "post-qkv", "dp", "dnp", "or", "unified", "unified-foldable"]
# Smaller than the tests' usual model; the hidden size makes shards end in the middle of rows.
SMALL = {"num_layers": 1, "hidden_size": 40}
UNIT = {"strategy": "unified-foldable", "reparam": "unit"}
ONE_WITH_EXPERTS = {"num_layers": 1, "moe_layer_freq": [1]}
# Gated delta nets inside of hybrids are Megatron's since then.
HYBRIDS = metadata.version("megatron-core") >= "0.18"


def _case(strategy, **more):
    return {"config": {"strategy": strategy}, "model": SMALL, **more}


def _differences(result):
    ours, theirs = result["optimizer"], result["autograd"]
    assert len(ours["losses"]) == len(theirs["losses"]) == 20
    scale = max(map(abs, theirs["losses"]))
    return {
        "losses": np.abs(np.subtract(ours["losses"], theirs["losses"])).max() / scale,
        "norms": np.abs(np.divide(ours["norms"], theirs["norms"]) - 1).max(),
        "vectors": max(np.abs(by - theirs["moved"][name]).max() for name, by in ours["moved"].items()),
    }


def _apart(first, second):
    """Root mean squares of what two runs differ by: losses, norms of gradients, how vectors have moved."""
    names = sorted(second["moved"])
    moved = [np.concatenate([run["moved"][name] for name in names]) for run in (first, second)]
    pairs = {what: (first[what], second[what]) for what in ("losses", "norms")} | {"vectors": moved}
    return {what: np.sqrt(np.square(np.subtract(*pair)).mean()) for what, pair in pairs.items()}


def _assert_same(result):
    differences = _differences(result)
    assert differences["losses"] < 1e-6, differences
    assert differences["norms"] < 1e-6, differences
    # Where a scalar's gradient is zero but for rounding (a norm follows the weight), Adam's step is as
    # large as for any other.
    assert differences["vectors"] < 2e-4, differences
    _assert_right(result["optimizer"])


def _assert_right(own):
    """The first split is that of float64 autograd, and at the end live weights are cast(fold(masters))."""
    for errors in own["check"]:
        assert errors["weight"] < 5e-7 and errors["vectors"] < 1e-6, errors
    assert own["live"]


def _assert_apart_as_roundings_are(result):
    """In bfloat16 the two modes differ no more than two roundings of one run do.

    Two roundings: by autograd from one start, and from the same with a quarter of the values rounded to a
    neighbour: half of the last digit's step in the root mean square, less than between two stochastic
    roundings of one number (0.58). Both are by autograd, so the limit does not depend on what is tested, and
    what bfloat16 does to every run alike is in neither distance. Losses are those of squares there, where
    rounding cancels and a wrong scale does not. Both distances are samples of twelve steps, hence the room:
    twice, and more for the few vectors, where Adam makes a whole step of a gradient whose sign is rounding.
    """
    by_autograd, [again] = result["bf16 autograd"], result["bf16 nudged"]
    found, limit = _apart(result["bf16 optimizer"], by_autograd), _apart(again, by_autograd)
    for what, times in (("losses", 2), ("norms", 2), ("vectors", 4)):
        assert 0 < found[what] < times * limit[what], (what, found, limit)


def _assert_same_on_all(ranks, world_size, cases, **more):
    """Twenty steps with float32 live weights beside float32 masters: no rounding between the modes."""
    for results in ranks.run("compare_executions", world_size, cases=cases, **more):
        assert len(results) == len(cases)
        for result in results:
            _assert_same(result)
            if more.get("rounded"):
                _assert_right(result["bf16 optimizer"])
                _assert_apart_as_roundings_are(result)
    return results


TP2, PP2, EP2 = ({f"{name}_model_parallel_size": 2} for name in ("tensor", "pipeline", "expert"))
VPP = {**PP2, "virtual_pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("world_size", "sizes", "more"),
    [
        (2, {}, {"overlap": True}),
        (2, TP2, {"distributed": False}),
        (2, {**TP2, "sequence_parallel": True}, {}),
        (2, PP2, {"overlap": True, "model": {**SMALL, "num_layers": 2}}),
        (2, VPP, {"overlap": True, "model": {**SMALL, "num_layers": 4}}),
        (2, {"context_parallel_size": 2}, {}),
        (2, EP2, {"experts": "shared", "without_tokens": 3, "overlap": True, "model": ONE_WITH_EXPERTS}),
        (4, TP2, {}),
    ],
    ids=["dp2", "tp2", "tp2-sp", "pp2", "vpp", "cp2", "ep2", "tp2-dp2"],
)
def test_every_strategy_in_every_layout(ranks, world_size, sizes, more):
    """Together with the optimizer, distributed or not, that the layout's row names; and in bfloat16."""
    cases = [_case(strategy, **more) for strategy in FOLDING]
    results = _assert_same_on_all(ranks, world_size, cases, rounded=True, **sizes)
    # One of each collective; experts have an optimizer of their own.
    assert {result["optimizer"]["sets"] for result in results} == ({1, 2} if sizes == EP2 else {1})


def test_other_vectors(ranks):
    """Stored as a direction; without a branch; all sites; with one query group for two ranks."""
    everywhere = {"sites": ("attention", "mlp", "projections")}
    cases = [
        {"config": {**UNIT, **everywhere}, "model": SMALL},
        {"config": {"strategy": "dp", "branches_off": ("k",), **everywhere}, "model": SMALL},
        _case("dp", distributed=False, overlap=True, kind="one-group"),
    ]
    _assert_same_on_all(ranks, 2, cases, **TP2)


@pytest.mark.parametrize(
    ("world_size", "sizes", "distributed"),
    [
        (4, EP2, True),
        (4, {**EP2, "instances": 2}, True),
        (2, {**EP2, **TP2, "expert_tensor_parallel_size": 1, "sequence_parallel": True}, False),
    ],
    ids=["ep2-dp2", "ep2-instances", "tp2-ep2-etp1"],
)
def test_experts(ranks, world_size, sizes, distributed):
    """Vectors of every expert's own, and vectors that they share and that another optimizer steps; router,
    shared expert and its gate; one expert without tokens."""
    cases = [
        {
            "config": {
                "strategy": "unified",
                "experts": experts,
                "sites": ("attention", "mlp", "projections"),
            },
            "experts": "shared",
            "model": ONE_WITH_EXPERTS,
            "without_tokens": 3,
            "distributed": distributed,
        }
        for experts in ("per-expert", "shared")
    ]
    _assert_same_on_all(ranks, world_size, cases, **sizes)


def test_several_instances_of_the_distributed_optimizer(ranks):
    """Two that have everything, on two ranks each: gradients are reduced within and across."""
    cases = [_case("unified"), _case("unified-foldable", overlap=True)]
    _assert_same_on_all(ranks, 4, cases, rounded=True, instances=2)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_latent_attention_and_hybrids(ranks, sequence_parallel):
    sites = ("attention", "mlp", "projections")
    strategy = "unified" if sequence_parallel else "unified-foldable"
    cases = [
        {
            "config": {"strategy": strategy, "sites": (*sites, "latent")},
            "kind": "mla",
            "model": {"num_layers": 1},
        },
    ]
    if HYBRIDS:
        cases.append(
            {"config": {"strategy": strategy, "sites": (*sites, "mamba", "delta")}, "pattern": "M*-G"}
        )
    _assert_same_on_all(ranks, 2, cases, **TP2, sequence_parallel=sequence_parallel)


def test_gradients_reduced_in_bfloat16(ranks):
    """Over two data-parallel ranks."""
    cases = [_case("unified", precision="bf16", ddp={"grad_reduce_in_fp32": False})]
    for [result] in ranks.run("compare_executions", 2, cases=cases):
        _assert_right(result["optimizer"])


@pytest.mark.needs_training  # the environment with emerging-optimizers
def test_muon_steps_weights_and_adam_their_vectors(ranks):
    """Two optimizers in a chain; or weights layer by layer on single data-parallel ranks, which are gathered
    when the distributed optimizer behind has stepped their vectors. Muon orthogonalizes in bfloat16, so
    losses agree to its rounding only."""
    together = _case("unified-foldable", optimizer="muon", distributed=False)
    apart = _case("unified-foldable", optimizer="muon", layer_wise=True)
    for case, sizes in ((together, TP2), (apart, {})):
        for [result] in ranks.run("compare_executions", 2, cases=[case], **sizes):
            differences = _differences(result)
            assert differences["losses"] < 2e-2 and differences["norms"] < 5e-3, differences
            _assert_right(result["optimizer"])


@pytest.mark.needs_training
@pytest.mark.parametrize("layer_wise", [False, True], ids=["tp2", "layer-wise"])
def test_soap_goes_no_farther_from_itself(ranks, layer_wise):
    """SOAP turns gradients into the eigenvectors of their own products, many of which have the eigenvalue 0
    and are rounding, and divides by the size of what it finds there: a change of the start in the last digit
    takes a run by autograd as far as the other mode does. The gradients it is given are right."""
    case = _case("unified-foldable", optimizer="soap", distributed=False, nudges=(1e-7, -1e-7))
    if layer_wise:
        case["layer_wise"] = case["distributed"] = True
    for [result] in ranks.run("compare_executions", 2, cases=[case], **({} if layer_wise else TP2)):
        _assert_right(result["optimizer"])
        found = _apart(result["optimizer"], result["autograd"])
        nudged = [_apart(run, result["autograd"]) for run in result["nudged"]]
        for what, distance in found.items():
            assert distance < 2 * max(each[what] for each in nudged), (found, nudged)


@pytest.mark.parametrize("reparam", ["none", "product", "unit"])
def test_a_start_without_masters_never_freezes_a_channel(ranks, reparam):
    """γ = 0 would leave W at zero, and neither would get a gradient again."""
    [found] = ranks.run("start_from_dead_channels", reparam=reparam)
    assert found == dict.fromkeys(("function_kept", "revived", "live_is_folded", "learns"), True)


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
def test_megatron_does_not_copy_what_is_folded(ranks, distributed):
    """Its copy of a master to the live weight would be written over, and takes as long as the fold."""
    [found] = ranks.run("copy_without_folding", distributed=distributed)
    assert found["groups kept"]
    assert any(".gamma_in" in name for name in found["changed"])
    names = ("self_attention.linear_qkv.weight", "mlp.linear_fc1.weight")
    assert found["as it was"] == [f"decoder.layers.{layer}.{name}" for layer in (0, 1) for name in names]
    assert any("linear_proj" in name for name in found["changed"])


def test_an_optimizer_that_was_not_told_stops_the_run(ranks):
    [found] = ranks.run("train_without_an_engine")
    assert "no optimizer was told: call megatron_scalevec.execution" in found["forward"]
    assert "does not fold 4 of 4 weights" in found["audit"]
    assert found["evaluation"] == "True" and found["execution"] == "optimizer"
    assert found["reason"].endswith("fp32 master; by other passes")
    assert "folds the model's weights already" in found["twice"]
    for kind in ("plain", "distributed"):
        assert "in no optimizer that keeps a float32 master" in found[f"{kind} in full precision"]


@pytest.mark.needs_training  # the environment with emerging-optimizers
def test_layers_dealt_out_without_masters_stop_the_run(ranks):
    """No rank would fold them."""
    case = _case("dp", optimizer="muon", layer_wise=True, precision="fp32")
    with pytest.raises(RankFailure, match="in no optimizer that keeps a float32 master"):
        ranks.run("compare_executions", 2, cases=[case])


MEGATRON = Version("0.19.2")


def _arguments(**more):
    return SimpleNamespace(**{"bf16": True, "optimizer": "adam", **more})


def test_the_optimizer_folds_where_it_can():
    asked = {mode: ScaleVecConfig(strategy="unified", execution=mode) for mode in ("optimizer", "autograd")}
    for config in (ScaleVecConfig(strategy="unified"), asked["optimizer"]):
        for name in ("adam", "sgd", "lion", "muon", "dist_muon", "soap"):
            assert choose_execution(_arguments(optimizer=name), config, MEGATRON).mode == "optimizer"
        assert choose_execution(_arguments(bf16=False, fp16=True), config, MEGATRON).mode == "optimizer"
    found = choose_execution(_arguments(), asked["autograd"], MEGATRON)
    assert (found.mode, found.reason.split(";")[0]) == ("autograd", "as asked for")


def test_a_resumed_run_keeps_its_mode():
    """What was asked for, and what stands in the way, come first."""

    def mode(before, asked=None, **args):
        config = ScaleVecConfig(strategy="unified", execution=asked)
        return choose_execution(_arguments(**args), config, MEGATRON, lambda: before)

    kept = mode(("autograd", "/runs/a"))
    assert kept.mode == "autograd" and kept.reason.startswith("as before in /runs/a; ")
    assert mode(("optimizer", "/runs/a")).mode == mode(None).mode == "optimizer"
    assert mode(("autograd", "/runs/a"), "optimizer").mode == "optimizer"
    assert mode(("optimizer", "/runs/a"), "autograd").mode == "autograd"
    assert mode(("optimizer", "/runs/a"), qk_clip=True).mode == "autograd"


UNIFIED = {"scalevec_strategy": "unified"}
BY_AUTOGRAD = {**UNIFIED, "scalevec_executed": "autograd"}


@pytest.mark.parametrize(
    ("saved", "more", "expected"),
    [
        (BY_AUTOGRAD, {}, "autograd"),
        ({**UNIFIED, "scalevec_executed": "optimizer"}, {}, "optimizer"),
        # Weights alone, and what ``scalevec unfold`` writes, start in either mode.
        (BY_AUTOGRAD, {"finetune": True}, None),
        (BY_AUTOGRAD, {"no_load_optim": True}, None),
        (UNIFIED, {}, None),
        # The layer-wise optimizer loads its own mode's.
        (BY_AUTOGRAD, {"no_load_optim": True, "optimizer": "muon"}, "autograd"),
        (UNIFIED, {"optimizer": "dist_muon"}, "autograd"),
        (BY_AUTOGRAD, {"finetune": True, "optimizer": "lion"}, "autograd"),
        ({}, {"optimizer": "muon"}, None),
        (None, {}, None),
    ],
)
def test_the_mode_that_a_checkpoint_asks_for(tmp_path, monkeypatch, saved, more, expected):
    from megatron.core import dist_checkpointing

    def read(folder):
        if saved is None:
            raise OSError("cut short")
        return {"args": SimpleNamespace(**saved)}

    monkeypatch.setattr(dist_checkpointing, "load_common_state_dict", read)
    folder = tmp_path / "iter_0000005"
    folder.mkdir()
    args = _arguments(load=str(tmp_path), **more)
    assert execution_to_keep(args) is None  # the first start of a run that is to be resumed
    wanted = None if expected is None else (expected, str(folder))
    assert execution_to_keep(SimpleNamespace(**vars(args), ckpt_step=5)) == wanted
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    assert execution_to_keep(args) == wanted
    # Megatron fine-tunes from it: weights alone.
    pretrained = {"load": str(tmp_path / "new"), "pretrained_checkpoint": str(tmp_path)}
    alone = wanted if "optimizer" in more else None
    assert execution_to_keep(_arguments(**{**more, **pretrained})) == alone
    own = {"load": str(tmp_path), "pretrained_checkpoint": str(tmp_path / "other")}
    assert execution_to_keep(_arguments(**{**more, **own})) == wanted


@pytest.mark.parametrize(
    ("persistent", "newest", "more", "expected"),
    [
        (None, 3, {}, "beside/iter_0000003"),
        (5, 3, {}, "iter_0000005"),
        (5, 5, {}, "beside/iter_0000005"),
        (5, 8, {}, "beside/iter_0000008"),
        (5, 8, {"ckpt_step": 9}, "iter_0000009"),
        (5, 8, {"ckpt_step": 7}, "beside/iter_0000008"),
        ("release", 8, {}, "beside/iter_0000008"),
        (5, None, {}, "iter_0000005"),
        (None, None, {}, None),
        (None, 3, {"non_persistent_ckpt_type": None}, None),
        # Megatron looks at the one tracker file alone before it turns to this folder.
        (None, 3, {"pretrained_checkpoint": "pretrained", "optimizer": "muon"}, "pretrained/iter_0000002"),
        (None, 3, {"pretrained_checkpoint": "pretrained"}, None),
    ],
)
@pytest.mark.parametrize("apart", [False, True])
def test_the_checkpoint_that_will_be_loaded(tmp_path, monkeypatch, apart, persistent, newest, more, expected):
    """Non-persistent ones lie in the --load folder, or in one of their own."""
    from megatron.core import dist_checkpointing

    beside = "elsewhere" if apart else "run/non_persistent"
    if apart and expected is not None and "pretrained_checkpoint" in more:
        expected = "beside/iter_0000003"
    for root, tracked in (("run", persistent), (beside, newest), ("pretrained", 2)):
        for name in ("release", *(f"iter_{step:07d}" for step in range(10))):
            (tmp_path / root / name).mkdir(parents=True)
        if tracked is not None:
            (tmp_path / root / "latest_checkpointed_iteration.txt").write_text(str(tracked))
    read = {"args": SimpleNamespace(**BY_AUTOGRAD)}
    monkeypatch.setattr(dist_checkpointing, "load_common_state_dict", lambda folder: read)
    monkeypatch.chdir(tmp_path)
    given = {"load": "run", "non_persistent_ckpt_type": "global", **more}
    found = execution_to_keep(
        _arguments(**given, non_persistent_global_ckpt_dir="elsewhere" if apart else None)
    )
    if expected is None:
        assert found is None
    else:
        expected = expected.replace("beside", beside)
        if expected.startswith("iter"):
            expected = f"run/{expected}"
        assert found == ("autograd", expected)


def test_without_triton_the_torch_passes_run_and_the_audit_says_so(monkeypatch):
    """Where the device is a GPU."""
    gpu = torch.device("cuda")
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "megatron_scalevec.execution.kernels", raising=False)
    monkeypatch.delattr(execution, "kernels", raising=False)
    engine._kernels.cache_clear()
    try:
        assert engine.passes_for(gpu) is shard
        for device, said in (
            (gpu, "in plain torch, as Triton cannot be imported"),
            (torch.device("cpu"), ""),
        ):
            table = SimpleNamespace(flat_gamma=SimpleNamespace(device=device))
            remark = engine.Engine([SimpleNamespace(table=table, local=[])]).remark
            assert remark.startswith(said) and bool(remark) == bool(said)
    finally:
        engine._kernels.cache_clear()


@pytest.mark.parametrize("strategy", ["stock", "none", "iwd"])
def test_nothing_to_fold(strategy):
    assert choose_execution(_arguments(), ScaleVecConfig(strategy=strategy), MEGATRON).mode == "autograd"
    # γ − 1 in the norms: the scale moves to the linear.
    zero_centered = _arguments(apply_layernorm_1p=True)
    if strategy == "iwd":
        moved = choose_execution(
            zero_centered, ScaleVecConfig(strategy=strategy, execution="optimizer"), MEGATRON
        )
        assert moved.mode == "optimizer"
    if strategy != "stock":
        with pytest.raises(ScaleVecError, match="has no effect with --scalevec-strategy"):
            choose_execution(_arguments(), ScaleVecConfig(strategy=strategy, execution="optimizer"), MEGATRON)


OBSTACLES_MET = {
    "full-precision": {"bf16": False},
    "float32-vectors": {},
    "optimizer": {"optimizer": "adaptive_muon"},
    "muon-before-0.17": {"optimizer": "muon"},
    "optimizer-cpu-offload": {"optimizer_cpu_offload": True},
    "precision-aware-optimizer": {"use_precision_aware_optimizer": True},
    "fsdp": {"use_megatron_fsdp": True},
    "quantized-weights": {"fp8_param_gather": True},
    "gather-with-step": {"overlap_param_gather_with_optimizer_step": True},
    "optimizer-cuda-graph": {"optimizer_cuda_graph": True},
    "qk-clip": {"qk_clip": True},
    "checkpoint-format": {"save": "somewhere", "ckpt_format": "torch"},
    "checkpoint-conversion": {"ckpt_convert_format": "torch"},
    "local-checkpoints": {"non_persistent_ckpt_type": "local"},
}


def test_every_obstacle_leads_to_autograd_and_refuses_the_optimizer():
    """Entry by entry; each with its own reason."""
    assert OBSTACLES_MET.keys() == {obstacle.name for obstacle in OBSTACLES}
    for obstacle in OBSTACLES:
        dtype = "fp32" if obstacle.name == "float32-vectors" else None
        version = Version("0.16.1") if obstacle.versions else MEGATRON
        args = _arguments(**OBSTACLES_MET[obstacle.name])
        config = ScaleVecConfig(strategy="hg", vector_dtype=dtype)
        found = choose_execution(args, config, version)
        assert found.mode == "autograd" and found.reason.endswith(f"because {obstacle.reason}")
        with pytest.raises(ScaleVecError) as caught:
            choose_execution(args, dataclasses.replace(config, execution="optimizer"), version)
        assert obstacle.reason in str(caught.value) and "autograd" in str(caught.value)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("fold-nothing", "is not what the optimizer's master and the scale vectors come to"),
        ("leave-one-out", "is not what the optimizer's master and the scale vectors come to"),
        ("fold-twice", "is not what the optimizer's master and the scale vectors come to"),
        ("load-weights-alone", "is not what the optimizer's master and the scale vectors come to"),
        ("load-vectors-alone", "is not what the optimizer's master and the scale vectors come to"),
        ("wrong-kernels", "disagree about the gradients of weights"),
        ("forget-to-write", "stepped without folding its masters"),
    ],
)
def test_a_fault_stops_the_run(ranks, fault, message):
    with pytest.raises(RankFailure) as caught:
        ranks.run("compare_executions", cases=[_case("unified-foldable")], fault=fault)
    assert message in " ".join(str(caught.value).split())


@pytest.mark.parametrize("fault", ["leave-norms-alone", "load-norms-alone"])
def test_a_norm_without_its_scale_stops_the_run(ranks, fault):
    with pytest.raises(RankFailure, match="the scale of a norm is not what"):
        ranks.run("compare_executions", cases=[_case("unified")], fault=fault)


def test_norms_whose_vectors_are_cut(ranks):
    """Channels of one vector on two ranks, the scalar of it on one of them."""
    for found in ranks.run("split_cut_norms", 2):
        assert found["same"] and found["worst"] < 1e-6, found
    assert max(found["worst"] for found in ranks.run("split_cut_norms", 2, sabotage=True)) > 1e-2


def test_a_dropped_reduction_of_norms_shows(ranks):
    """Each tensor-parallel rank would have the gradient of its own heads."""
    cases, fault = [_case("unified")], "drop-reduction-of-norms"
    [result] = ranks.run("compare_executions", 2, cases=cases, fault=fault, **TP2)[0]
    assert result["optimizer"]["check"][-1]["vectors"] > 1e-2
    assert _differences(result)["vectors"] > 1e-3


def test_a_model_loaded_for_evaluation(ranks):
    """Without the optimizer: the norms' γ are those of the stored parts that were loaded."""
    [found] = ranks.run("load_for_evaluation")
    assert found["moved"] > 0.0 and found["same"] and found["norms"] == 7
    assert found["training"].startswith("the live weight of")
    assert found["of a stock model"] == {2.0} and found["as before"]
    assert found["cast"] == "torch.float64"
    assert "moved to another device or dtype" in found["training a cast one"]


def test_a_model_changed_from_outside(ranks):
    """Other weights in the parameters for an evaluation; copies; a vector that the masters do not know."""
    [found] = ranks.run("change_from_outside")
    assert found["moved"] > 0.1 and found["kept"] and found["as in training"] < 0.02 * found["moved"]
    assert found["copied"] and found["pickled"]
    assert "not what the optimizer's masters of its scale vector come to" in found["training"]
    assert found["trains after reload_model_params"]


@pytest.mark.parametrize("overlap", [False, True])
def test_an_optimizer_made_anew_on_the_same_model(ranks, overlap):
    [found] = ranks.run("set_up_again", overlap=overlap)
    np.testing.assert_allclose(found["optimizer"], found["autograd"], rtol=2e-2)


def test_what_is_changed_after_setting_up(ranks):
    [found] = ranks.run("change_after_setting_up")
    assert "the optimizer made last was not told: call" in found["another optimizer"]
    assert "no optimizer was told: call" in found["a copy"] and found["the copy's function"]
    assert "are copies that have lost what they are for" in found["a copy's optimizer"]
    for name in ("mlp.linear_fc1.weight", "mlp.linear_fc1.gamma", "q_layernorm.gamma"):
        assert "were frozen after the optimizer" in found[f"frozen {name}"]
    assert "stored scale vectors of folded linears are not the optimizer's" in found["another vector"]


def test_torchs_own_wrapper_must_not_wait_for_vectors(ranks):
    [found] = ranks.run("wrap_in_torch")
    assert "find_unused_parameters=True" in found.pop("nothing")
    assert found.keys() == {"find_unused_parameters", "static_graph", "ignored"}
    assert all("in no optimizer that keeps a float32 master" in error for error in found.values())


@pytest.mark.parametrize(("strategy", "cast"), [("dp", False), ("unified", False), ("unified", True)])
def test_a_training_loop_without_megatrons_wrapper(ranks, strategy, cast):
    [found] = ranks.run("train_without_ddp", strategy=strategy, cast=cast)
    assert found["autograd"][-1] < 0.98 * found["autograd"][0]
    np.testing.assert_allclose(found["optimizer"], found["autograd"], rtol=5e-3)


@pytest.mark.parametrize("kind", ["weight", "gamma"])
def test_frozen_weights_and_vectors_are_named(ranks, kind):
    name = f"layers.0.mlp.linear_fc1.{kind}"
    [error] = ranks.run("train_frozen", part=name)
    assert f"frozen (requires_grad is False; first: module.decoder.{name}" in error and "train them" in error


EXPERTS_SHARE = {"config": {"strategy": "hg", "experts": "shared"}, "experts": "shared"}


@pytest.mark.parametrize(
    ("sizes", "case"),
    [
        ({}, _case("unified-foldable")),
        (TP2, _case("unified-foldable")),
        # Over expert-parallel ranks besides.
        (EP2, {**EXPERTS_SHARE, "model": ONE_WITH_EXPERTS}),
    ],
    ids=["dp2", "tp2", "ep2"],
)
def test_a_dropped_reduction_shows(ranks, sizes, case):
    """What the comparisons are worth: without the sums over ranks they fail."""
    more = {"fault": "drop-reduction", "rounded": True}
    [result] = ranks.run("compare_executions", 2, cases=[case], **more, **sizes)[0]
    assert max(errors["vectors"] for errors in result["optimizer"]["check"]) > 1e-2
    assert _differences(result)["vectors"] > 1e-3
    with pytest.raises(AssertionError, match="'vectors'"):
        _assert_apart_as_roundings_are(result)


def test_a_hundredth_shows(ranks):
    """γ by so much larger in every fold, where the run does not look."""
    case = _case("unified-foldable")
    for results in ranks.run("compare_executions", 2, cases=[case], fault="scale-vectors", rounded=True):
        assert not results[0]["optimizer"]["live"]
        assert _differences(results[0])["losses"] > 1e-4
        with pytest.raises(AssertionError):
            _assert_apart_as_roundings_are(results[0])


def test_a_fold_after_the_gathering_shows(ranks):
    """Other ranks would have the shards of the step before."""
    [result] = ranks.run("compare_executions", 2, cases=[_case("unified-foldable")], fault="fold-late")[0]
    assert result["optimizer"]["live"] and _differences(result)["losses"] > 1e-4


# --- checkpoints --------------------------------------------------------------------------------------

# What the distributed optimizer calls the formats of its state; and the plain mixed-precision optimizer.
FORMS = ("fully_reshardable", "dp_reshardable", "plain")


@pytest.fixture(scope="module", params=[1, 2], ids=["dp2", "tp2"])
def loaded(request, ranks, tmp_path_factory):
    """Every form saved in each mode, on two ranks."""
    keys = [(written_by, form) for written_by in ("autograd", "optimizer") for form in FORMS]
    # The final norm is left alone, so that a stock model can load the model's part.
    config = {"strategy": "unified-foldable", "reparam": "unit", "sites": "attention,mlp"}
    cases = [
        {"config": config, "model": SMALL, "written_by": written_by, "form": form}
        for written_by, form in keys
    ]
    folder = tmp_path_factory.mktemp("modes")
    sizes = {"tensor_model_parallel_size": request.param}
    return dict(zip(keys, ranks.run("load_in_both_modes", 2, folder=str(folder), cases=cases, **sizes)[0]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("written_by", ["autograd", "optimizer"])
def test_a_checkpoint_goes_on_in_either_mode(loaded, written_by, form):
    """With float32 live weights beside float32 masters: no rounding hides an error."""
    result = loaded[written_by, form]
    assert result[written_by] == result["whole"][2:]
    for mode in ("autograd", "optimizer"):
        np.testing.assert_allclose(result[mode], result["whole"][2:], rtol=1e-6)
    assert result["live"]


@pytest.mark.parametrize("form", FORMS)
def test_a_stock_model_gets_no_raw_masters(loaded, form):
    """At any strictness: several values pass over keys that are missing."""
    for strictness, found in loaded["optimizer", form]["stock"].items():
        assert found != "loaded", strictness
        if strictness != "raise_all":
            assert "Global shape mismatch" in found and "optimizer." in found, (strictness, found)
    assert loaded["optimizer", form]["model"] < 1e-6


@pytest.mark.parametrize("form", FORMS)
def test_a_load_between_steps(ranks, tmp_path, form):
    [found] = ranks.run("load_between_steps", folder=str(tmp_path / "saved"), form=form)
    assert found["again"] == found["whole"][2:]
    assert "is not what the optimizer's master and the scale vectors come to" in found["alone"]


@pytest.mark.parametrize("reparam", ["none", "product", "unit"])
def test_by_autograd_a_start_without_masters_never_freezes_a_channel(ranks, tmp_path, reparam):
    [found] = ranks.run("revive_by_autograd", folder=str(tmp_path / "saved"), reparam=reparam)
    assert found == dict.fromkeys(("function_kept", "weights_at_zero", "learns"), True)
