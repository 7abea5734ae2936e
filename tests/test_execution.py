"""Execution inside the optimizer: the same numbers as by autograd, or the run stops."""

import sys
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import pytest
import torch
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
        "vectors": max(
            np.abs(vector - theirs["vectors"][name]).max() for name, vector in ours["vectors"].items()
        ),
    }


def _assert_same(result):
    differences = _differences(result)
    assert differences["losses"] < 1e-6, differences
    assert differences["norms"] < 1e-6, differences
    # Where a scalar's gradient is zero but for rounding (a norm follows the weight), Adam's step is as
    # large as for any other.
    assert differences["vectors"] < 2e-4, differences
    own = result["optimizer"]
    for errors in own["check"]:
        assert errors["weight"] < 5e-7 and errors["vectors"] < 1e-6, errors
    assert own["live"]


def _assert_same_on_all(ranks, world_size, cases, **sizes):
    """Twenty steps with float32 live weights beside float32 masters: no rounding between the modes."""
    for results in ranks.run("compare_executions", world_size, cases=cases, **sizes):
        assert len(results) == len(cases)
        for result in results:
            _assert_same(result)
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
    """Together with the optimizer, distributed or not, that the layout's row names."""
    cases = [_case(strategy, **more) for strategy in FOLDING]
    results = _assert_same_on_all(ranks, world_size, cases, **sizes)
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
        (2, {**EP2, **TP2, "expert_tensor_parallel_size": 1, "sequence_parallel": True}, False),
    ],
    ids=["ep2-dp2", "tp2-ep2-etp1"],
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
            own = result["optimizer"]
            [errors] = own["check"]
            assert errors["weight"] < 5e-7 and errors["vectors"] < 1e-6, errors
            assert own["live"]


@pytest.mark.parametrize("reparam", ["none", "product", "unit"])
def test_a_start_without_masters_never_freezes_a_channel(ranks, reparam):
    """γ = 0 would leave W at zero, and neither would get a gradient again."""
    [found] = ranks.run("start_from_dead_channels", reparam=reparam)
    assert found == dict.fromkeys(("function_kept", "revived", "live_is_folded", "learns"), True)


def test_an_optimizer_that_was_not_told_stops_the_run(ranks):
    [found] = ranks.run("train_without_an_engine")
    assert "no optimizer was told: call megatron_scalevec.execution" in found["forward"]
    assert "does not fold 4 of 4 weights" in found["audit"]
    assert found["evaluation"] == "True" and found["execution"] == "optimizer"
    assert found["reason"].endswith("fp32 master; by other passes")
    assert "folds the model's weights already" in found["twice"]
    assert "in no optimizer that keeps a float32 master" in found["full precision"]


def _arguments(**more):
    return SimpleNamespace(**{"bf16": True, "optimizer": "adam", **more})


def test_the_optimizer_folds_where_it_can():
    asked = {mode: ScaleVecConfig(strategy="unified", execution=mode) for mode in ("optimizer", "autograd")}
    for config in (ScaleVecConfig(strategy="unified"), asked["optimizer"]):
        for name in ("adam", "sgd", "lion", "muon", "dist_muon"):
            assert choose_execution(_arguments(optimizer=name), config).mode == "optimizer"
        assert choose_execution(_arguments(bf16=False, fp16=True), config).mode == "optimizer"
    found = choose_execution(_arguments(), asked["autograd"])
    assert (found.mode, found.reason.split(";")[0]) == ("autograd", "as asked for")


def test_a_resumed_run_keeps_its_mode():
    """What was asked for, and what stands in the way, come first."""

    def mode(before, asked=None, **args):
        config = ScaleVecConfig(strategy="unified", execution=asked)
        return choose_execution(_arguments(**args), config, lambda: before)

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
    pretrained = {"load": str(tmp_path / "new"), "pretrained_checkpoint": str(tmp_path)}
    assert execution_to_keep(_arguments(**{**more, **pretrained})) == wanted


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
            remark = engine.Engine([SimpleNamespace(table=table)]).remark
            assert remark.startswith(said) and bool(remark) == bool(said)
    finally:
        engine._kernels.cache_clear()


@pytest.mark.parametrize("strategy", ["stock", "none", "iwd"])
def test_nothing_to_fold(strategy):
    assert choose_execution(_arguments(), ScaleVecConfig(strategy=strategy)).mode == "autograd"
    # γ − 1 in the norms: the scale moves to the linear.
    zero_centered = _arguments(apply_layernorm_1p=True)
    if strategy == "iwd":
        moved = choose_execution(zero_centered, ScaleVecConfig(strategy=strategy, execution="optimizer"))
        assert moved.mode == "optimizer"
    if strategy != "stock":
        with pytest.raises(ScaleVecError, match="has no effect with --scalevec-strategy"):
            choose_execution(_arguments(), ScaleVecConfig(strategy=strategy, execution="optimizer"))


OBSTACLES_MET = {
    "full-precision": {"bf16": False},
    "float32-vectors": {},
    "optimizer": {"optimizer": "soap"},
    "optimizer-cpu-offload": {"optimizer_cpu_offload": True},
    "precision-aware-optimizer": {"use_precision_aware_optimizer": True},
    "optimizer-instances": {"num_distributed_optimizer_instances": 2},
    "fsdp": {"use_megatron_fsdp": True},
    "quantized-weights": {"fp8_param_gather": True},
    "gather-with-step": {"overlap_param_gather_with_optimizer_step": True},
    "optimizer-cuda-graph": {"optimizer_cuda_graph": True},
    "qk-clip": {"qk_clip": True},
    "checkpoint-format": {"save": "somewhere", "ckpt_format": "torch"},
    "local-checkpoints": {"non_persistent_ckpt_type": "local"},
}


def test_every_obstacle_leads_to_autograd_and_refuses_the_optimizer():
    """Entry by entry; each with its own reason."""
    assert OBSTACLES_MET.keys() == {obstacle.name for obstacle in OBSTACLES}
    for obstacle in OBSTACLES:
        dtype = "fp32" if obstacle.name == "float32-vectors" else None
        args = _arguments(**OBSTACLES_MET[obstacle.name])
        found = choose_execution(args, ScaleVecConfig(strategy="hg", vector_dtype=dtype))
        assert found.mode == "autograd" and found.reason.endswith(f"because {obstacle.reason}")
        with pytest.raises(ScaleVecError) as caught:
            choose_execution(args, ScaleVecConfig(strategy="hg", vector_dtype=dtype, execution="optimizer"))
        assert obstacle.reason in str(caught.value) and "autograd" in str(caught.value)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
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


@pytest.mark.parametrize("sizes", [{}, {"tensor_model_parallel_size": 2}], ids=["dp2", "tp2"])
def test_a_dropped_reduction_shows(ranks, sizes):
    """What the comparison is worth: without the sums over ranks it fails."""
    [result] = ranks.run(
        "compare_executions", 2, cases=[_case("unified-foldable")], fault="drop-reduction", **sizes
    )[0]
    assert max(errors["vectors"] for errors in result["optimizer"]["check"]) > 1e-2
    assert _differences(result)["vectors"] > 1e-3


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
