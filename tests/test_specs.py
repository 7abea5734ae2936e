"""Layer specs: the three doors are one, in every form a spec can have."""

import numpy as np
import pytest
from ranks.arguments import LAYOUTS, tiny_gpt
from ranks.pool import RankFailure


@pytest.mark.needs_training
@pytest.mark.parametrize(
    ("layout", "strategy", "doors"),
    [
        (
            "serial",
            "unified",
            ["spec", "flag+spec", "call", "plain spec", "plain own layer", "plain own block"],
        ),
        ("tp2", "unified", ["spec", "call", "plain spec"]),
        ("serial", "unified-foldable", ["spec", "plain spec"]),
        ("pp2-vpp", "unified-foldable", ["plain spec"]),
    ],
)
def test_the_doors_are_one(ranks, layout, strategy, doors):
    """Modules, parameters, their values, dtypes and attributes at the start; losses and vectors after ten
    iterations. Bit for bit: the same run."""
    world_size, arguments = LAYOUTS[layout]
    argv = tiny_gpt("llama", *arguments)
    flag = ranks.run("train_by_door", world_size, door="flag", argv=argv, strategy=strategy)
    assert len(flag[-1]["losses"]) == 10 and flag[0]["audit"]["linears_converted"] == 8
    for door in doors:
        run = ranks.run("train_by_door", world_size, door=door, argv=argv, strategy=strategy)
        for ours, expected in zip(run, flag, strict=True):
            assert ours["start"] == expected["start"], door
            assert ours["losses"] == expected["losses"], door
            assert ours["grad_norms"] == expected["grad_norms"], door
            for name, vector in expected["vectors"].items():
                np.testing.assert_array_equal(ours["vectors"][name], vector, err_msg=f"{door} {name}")
            if door != "call":
                assert ours["audit"] == expected["audit"], door


@pytest.mark.needs_training
def test_a_spec_reaches_the_multi_token_prediction_layers_that_megatron_gives_another_spec(ranks):
    argv = tiny_gpt("llama", "--mtp-num-layers", "1")
    [flag] = ranks.run("train_by_door", door="flag", argv=argv, strategy="unified")
    [plain] = ranks.run("train_by_door", door="plain spec", argv=argv, strategy="unified")
    assert plain["start"] == flag["start"] and plain["losses"] == flag["losses"]
    assert plain["audit"]["linears_converted"] == plain["audit"]["linears_expected"] == 10


@pytest.mark.parametrize("form", ["layer", "block", "module-block", "builder", "copy", "by-path", "mtp"])
def test_every_form_of_a_spec_builds_what_the_call_builds(ranks, form):
    [found] = ranks.run("build_from_spec", case=form)
    assert found["error"] is None
    assert found["same"] and found["base_unchanged"]
    assert "strategy='unified'" in found["asks"]
    linears = 6 if form == "mtp" else 4
    assert f"linears converted {linears} of {linears}" in found["audit"]
    assert "head logits in" in found["audit"]


def test_stock_is_the_spec_itself(ranks):
    [found] = ranks.run("build_from_spec", case="stock")
    assert found["same"] and found["asks"] == "None"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("norm", "was given WrappedTorchNorm, which is no spec of transformer layers"),
        ("linear", "was given Linear, which is no spec of transformer layers"),
        ("no-attention", "a layer without self-attention"),
        ("string", "needs a ScaleVecConfig as its second argument, not 'hg'"),
        ("twice", "asks for unified: .* already, so it cannot ask for hg"),
        ("outside", "nothing has built them: that happens at the end of GPTModel's construction"),
        ("differs", "already carries scale vectors"),
        ("named", "take their layers from Megatron's command line"),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(ranks, case, message):
    import re

    [found] = ranks.run("build_from_spec", case=case)
    assert re.search(message, found["error"] or ""), found
    assert "\n" not in found["error"]


@pytest.mark.needs_training
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--spec", "megatron_scalevec.specs", "post-qkv"], "Did you mean 'post_qkv'"),
        (
            [
                "--spec",
                "megatron_scalevec.specs",
                "hg",
                "--optimizer",
                "sgd",
                "--qk-l2-norm",
                "--apply-wd-to-qk-layernorm",
            ],
            "--apply-wd-to-qk-layernorm",
        ),
    ],
)
@pytest.mark.parametrize("plugin", [True, False], ids=["launcher", "plain"])
def test_a_spec_that_cannot_be_stops_the_run(ranks, arguments, message, plugin):
    with pytest.raises(RankFailure) as caught:
        ranks.run("train", argv=tiny_gpt("llama", *arguments), plugin=plugin)
    assert message in " ".join(str(caught.value).split())
    assert "ScaleVecError" in str(caught.value)


@pytest.mark.needs_training
@pytest.mark.parametrize("spec", [["megatron_scalevec.specs", "dp"], ["ranks.own_specs", "layer"]])
def test_a_spec_and_a_flag_that_differ_stop_the_run(ranks, spec):
    argv = tiny_gpt("llama", "--spec", *spec, "--scalevec-strategy", "hg")
    with pytest.raises(RankFailure, match="drop one of the two"):
        ranks.run("train", argv=argv)


@pytest.mark.needs_training
def test_another_spec_stays_stock(ranks):
    """A module that makes scale-vector specs, of which the run uses the stock one."""
    argv = tiny_gpt("llama", "--spec", "ranks.own_specs", "stock")
    [found] = ranks.run("train", argv=argv, by_name=False)
    [stock] = ranks.run("train", argv=tiny_gpt("llama"), by_name=False)
    assert found["losses"] == stock["losses"] and found["audit"] is None


@pytest.mark.needs_training
def test_a_strategy_from_a_spec_is_kept_in_the_checkpoint(ranks, tmp_path):
    """Saved by plain Megatron with --spec alone; resumed through the flag, and refused without."""
    save = ["--save", str(tmp_path), "--save-interval", "10"]
    ranks.run("train_by_door", door="plain spec", argv=tiny_gpt("llama", *save), strategy="hg")
    assert (tmp_path / "scalevec_audit.json").is_file()
    longer = ["--train-iters", "12", "--load", str(tmp_path)]
    argv = tiny_gpt("llama", *longer, "--override-opt_param-scheduler")
    [resumed] = ranks.run("train_by_door", door="flag", argv=argv, strategy="hg")
    assert len(resumed["losses"]) == 2
    with pytest.raises(RankFailure, match="was trained with hg"):
        ranks.run("train", argv=argv)
