"""Whole runs with every optimizer: five steps, a checkpoint, five steps are ten steps, bit for bit."""

import numpy as np
import pytest
from ranks.arguments import LAYOUTS, tiny_gpt
from ranks.pool import RankFailure

pytestmark = pytest.mark.needs_training

TP2 = LAYOUTS["tp2"][1]
OVERLAPS = LAYOUTS["dp2-distopt"][1]
# The format in which Megatron can save SOAP at all, and load SGD again.
TORCH = ["--ckpt-format", "torch"]
OFFLOAD = (
    "--bf16 --use-distributed-optimizer --optimizer-cpu-offload --use-precision-aware-optimizer "
    "--optimizer-offload-fraction 0.5"
).split()
UNIFIED = ["--scalevec-strategy", "unified"]
DNP = ["--scalevec-strategy", "dnp"]
HG = ["--scalevec-strategy", "hg"]
# Half-precision runs of the other mode are in test_execution_checkpoints, and one of Lion's here.
BY_AUTOGRAD = ["--scalevec-execution", "autograd"]


def _names(values):
    return " ".join(values).replace("--", "").replace("scalevec-strategy ", "")


@pytest.mark.parametrize(
    ("world_size", "arguments", "kinds"),
    [
        (1, ["--optimizer", "adam", *UNIFIED], {"adam"}),
        (2, ["--optimizer", "adam", *OVERLAPS, *UNIFIED], {"adam"}),
        (2, ["--optimizer", "adam", *OFFLOAD, *UNIFIED], {"adam"}),
        (1, ["--optimizer", "sgd", *TORCH, *UNIFIED], {"sgd"}),
        (2, ["--optimizer", "muon", *TP2, *UNIFIED], {"adam", "muon"}),
        (2, ["--optimizer", "muon", "--bf16", *OVERLAPS, *BY_AUTOGRAD, *HG], {"adam", "muon"}),
        (2, ["--optimizer", "dist_muon", "--bf16", *BY_AUTOGRAD, *UNIFIED], {"adam", "muon"}),
        (1, ["--optimizer", "muon", "--muon-scalar-optimizer", "lion", *HG], {"lion", "muon"}),
        (2, ["--optimizer", "soap", *TP2, *TORCH, *UNIFIED], {"adam", "soap"}),
        (2, ["--optimizer", "lion", "--bf16", "--use-distributed-optimizer", *HG], {"adam", "lion"}),
    ],
    ids=lambda value: _names(value) if isinstance(value, list) else "",
)
def test_five_and_five_steps_are_ten(ranks, tmp_path, world_size, arguments, kinds):
    """Losses, gradient norms, vectors and moments; the audit says which optimizer has what."""
    argv = tiny_gpt("llama", *arguments)
    whole = ranks.run("train", world_size, argv=[*argv, "--save", str(tmp_path), "--save-interval", "5"])
    resume = [*argv, "--load", str(tmp_path), "--ckpt-step", "5"]
    resumed = ranks.run("train", world_size, argv=resume, by_name=False)
    for first, second in zip(whole, resumed):
        assert len(first["losses"]) == 10
        assert second["losses"] == first["losses"][5:]
        assert second["grad_norms"] == first["grad_norms"][5:]
        for name, vector in first["vectors"].items():
            np.testing.assert_array_equal(second["vectors"][name], vector, err_msg=name)
        assert second["moments"] == first["moments"]
        groups = first["audit"]["decay_groups"]
        assert {group["optimizer"] for group in groups} == kinds
    assert any(run["moments"] for run in whole)


@pytest.fixture(scope="module")
def checkpoint(ranks, tmp_path_factory):
    """Five steps of ``dnp`` with Adam and a weight decay of 0.1, plain and with the distributed optimizer."""
    folders = {}
    for name, more in (("plain", []), ("distributed", ["--use-distributed-optimizer"])):
        folder = folders[name] = tmp_path_factory.mktemp(name)
        argv = tiny_gpt("llama", *DNP, *more, "--save", str(folder), "--save-interval", "5")
        ranks.run("train", argv=[*argv, "--exit-interval", "5"])
    return folders


@pytest.mark.parametrize(
    ("flag", "used"),
    [
        ("--override-opt_param-scheduler", [0.5, 0.5, 0.5]),
        # Megatron reads the checkpoint's decay after it has set that of the next step.
        ("--use-checkpoint-opt_param-scheduler", [0.5, 0.1, 0.1]),
    ],
)
def test_a_changed_weight_decay_takes_effect_on_the_first_step(ranks, checkpoint, flag, used):
    argv = ["--load", str(checkpoint["plain"]), "--weight-decay", "0.5", flag, "--exit-interval", "8"]
    [run] = ranks.run("train", argv=tiny_gpt("llama", *DNP, *argv), by_name=False)
    assert run["weight_decay"] == [[0.0, value] for value in used]


def test_without_either_flag_megatron_stops_at_a_changed_weight_decay(ranks, checkpoint):
    argv = ["--load", str(checkpoint["plain"]), "--weight-decay", "0.5"]
    with pytest.raises(RankFailure, match="class input value 0.5 and checkpointvalue 0.1 for start weight"):
        ranks.run("train", argv=tiny_gpt("llama", *DNP, *argv), by_name=False)


@pytest.mark.parametrize("optimizer", ["plain", "distributed"])
def test_groups_that_differ_from_the_checkpoints_are_named(ranks, checkpoint, optimizer):
    more = ["--use-distributed-optimizer"] if optimizer == "distributed" else []
    argv = ["--load", str(checkpoint[optimizer]), "--lr", "6e-3", "--override-opt_param-scheduler", *more]
    with pytest.raises(RankFailure) as caught:
        ranks.run("train", argv=tiny_gpt("llama", *DNP, *argv), by_name=False)
    assert (
        "the optimizer's state in the checkpoint has a parameter group with max_lr 0.003, min_lr 0.0003, "
        "wd_mult 1.0, lr_mult 1.0, and this run has a parameter group with max_lr 0.006"
    ) in str(caught.value)
    assert "give the checkpoint's --lr and --min-lr, or resume with --no-load-optim." in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--optimizer", "muon", "--use-distributed-optimizer"], "takes no step in float32 .* add --bf16"),
        (["--optimizer", "soap", "--save", "nowhere"], "SOAP's preconditioners .* add --ckpt-format torch"),
    ],
    ids=["layer-wise in float32", "soap in torch_dist"],
)
def test_what_megatron_itself_cannot_do_is_refused_at_the_start(ranks, arguments, sentence):
    with pytest.raises(RankFailure, match=sentence):
        ranks.run("train", argv=tiny_gpt("llama", *DNP, *arguments))
