"""Parallel equals serial: ten iterations of Megatron's training loop in every layout."""

import numpy as np
import pytest
from ranks.arguments import LAYOUTS, tiny_gpt
from ranks.pool import RankFailure
from runs import once_per_layout

pytestmark = pytest.mark.needs_training

STRATEGIES = ["stock", "none", "iwd", "hg", "post-qkv", "dp"]
ALL_STRATEGIES = [*STRATEGIES, "dnp", "or", "unified", "unified-foldable"]


@pytest.fixture(scope="module")
def train(ranks):
    return once_per_layout(ranks, LAYOUTS)


def assert_equal_runs(run, serial):
    assert len(run["losses"]) == len(serial["losses"]) == 10
    np.testing.assert_allclose(run["losses"], serial["losses"], rtol=1e-5)
    np.testing.assert_allclose(run["grad_norms"], serial["grad_norms"], rtol=1e-5)
    assert run["vectors"].keys() == serial["vectors"].keys()
    for name, vector in run["vectors"].items():
        # Adam's step is as large for a tiny gradient as for a large one, so where a scalar's gradient
        # nearly cancels, rounding is amplified: measured against ten steps of the learning rate, 3e-2.
        atol = 1e-3 if name.endswith(("_beta", "_magnitude")) else 1e-4
        np.testing.assert_allclose(vector, serial["vectors"][name], atol=atol, err_msg=name)


@pytest.mark.parametrize("layout", ["tp2", "tp2-sp", "pp2", "dp2-distopt"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parallel_equals_serial(train, strategy, layout):
    """Losses, gradient norms (clipping is on) and the vectors after ten updates."""
    assert_equal_runs(train(strategy, layout), train(strategy, "serial"))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "serial"])
def test_unified_in_every_layout(train, layout):
    """Four ranks on two query groups, interleaved pipeline, context parallelism, recompute among them."""
    assert_equal_runs(train("unified", layout), train("unified", "serial"))


MTP = ("--mtp-num-layers", "1")


@pytest.mark.parametrize("layout", ["tp2-sp", "pp2", "dp2-distopt"])
def test_multi_token_prediction(train, layout):
    """Its layers carry the strategy as well, and its own norms are classified."""
    run = train("unified", layout, flags=MTP)
    assert_equal_runs(run, train("unified", "serial", flags=MTP))
    assert run["all"][0]["audit"]["linears_converted"] == 10
    assert run["all"][0]["audit"]["built_vectors"]["mtp enorm in alpha"] == 1


@pytest.mark.parametrize(
    "flags",
    [
        ("--scalevec-reparam", "unit"),
        ("--scalevec-sites", "attention,mlp,head,projections", "--scalevec-branches-off", "v"),
        ("--attention-output-gate",),
        ("--window-size", "8,0"),
    ],
    ids=lambda flags: flags[0].strip("-"),
)
def test_other_forms_of_unified(train, flags):
    assert_equal_runs(train("unified", "tp2-sp", flags=flags), train("unified", "serial", flags=flags))


@pytest.mark.parametrize(("model", "layout"), [("gpt2", "tp2-sp"), ("one-group", "tp2"), ("qk-norm", "tp2")])
def test_other_models(train, model, layout):
    """Biases and LayerNorm; a query group cut by the ranks; norms on q and k."""
    assert_equal_runs(train("dp", layout, model), train("dp", "serial", model))


def test_replicated_vectors_stay_equal_over_tensor_parallel_ranks(train):
    first, second = train("dp", "tp2")["all"]
    for name, vector in first["vectors"].items():
        np.testing.assert_array_equal(vector, second["vectors"][name], err_msg=name)


@pytest.mark.parametrize(
    ("sabotage", "seen_in"),
    [("tensor-parallel-sum", "losses"), ("row-map", "losses"), ("marked-as-sharded", "grad_norms")],
)
def test_the_comparison_sees_what_is_broken(train, sabotage, seen_in):
    """A gradient that is not summed, a wrong map from rows to branches, a vector counted twice."""
    broken, whole = train("dp", "tp2", sabotage=sabotage), train("dp", "serial")
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(broken[seen_in], whole[seen_in], rtol=1e-5)


def test_a_forgotten_mtp_layer_stops_the_run(ranks):
    argv = tiny_gpt("llama", *MTP, "--scalevec-strategy", "unified")
    with pytest.raises(RankFailure, match="linears with scale vectors: 8 built, 10 expected"):
        ranks.run("train", argv=argv, sabotage="mtp-forgotten")


def test_a_learning_rate_of_its_own(train):
    """The vectors of one role move further; the others' groups are as before."""
    plain = train("unified", "serial")
    run = train("unified", "serial", flags=("--scalevec-lr-mult", "input=4"))
    assert run["losses"][0] == plain["losses"][0]
    assert run["losses"][-1] != plain["losses"][-1]
    groups = {(g["weight_decay_multiplier"], g["max_learning_rate"]) for g in run["audit"]["decay_groups"]}
    assert (1.0, 0.012) in groups and (1.0, 0.003) in groups and (0.0, 0.012) not in groups


@pytest.mark.parametrize("strategy", ALL_STRATEGIES)
def test_strategies_differ_from_each_other(train, strategy):
    """No strategy is another one in disguise: after ten iterations all losses differ."""
    own = train(strategy, "serial")["losses"][-1]
    for other in ALL_STRATEGIES:
        if other != strategy:
            assert abs(train(other, "serial")["losses"][-1] / own - 1) > 1e-5


@pytest.mark.parametrize("strategy", ["hg", "post-qkv", "dp", "or", "unified-foldable"])
def test_the_first_loss_is_the_stock_models(ranks, strategy):
    """Every scale starts at one. Here with Megatron's own initialization."""
    losses = {}
    for name in ("stock", strategy):
        argv = tiny_gpt("llama", "--scalevec-strategy", name)
        [result] = ranks.run("train", argv=argv, by_name=False)
        losses[name] = result["losses"][0]
    assert losses[strategy] == pytest.approx(losses["stock"], rel=1e-6)


def test_bfloat16_with_everything_on(ranks):
    """bf16, distributed optimizer, both overlaps, tensor and sequence parallelism."""
    argv = tiny_gpt(
        "llama",
        *LAYOUTS["tp2-sp"][1],
        *LAYOUTS["dp2-distopt"][1],
        "--bf16",
        "--scalevec-strategy",
        "dp",
    )
    result = ranks.run("train", 2, argv=argv)[-1]
    assert result["losses"][-1] < result["losses"][0] - 0.3
    assert {v["dtype"] for v in result["audit"]["vectors"]} == {"bfloat16"}


def test_vectors_in_float32_in_a_bfloat16_model(ranks):
    argv = tiny_gpt("llama", *LAYOUTS["dp2-distopt"][1], "--bf16", "--scalevec-strategy", "unified")
    result = ranks.run("train", 2, argv=[*argv, "--scalevec-vector-dtype", "fp32"])[-1]
    assert result["losses"][-1] < result["losses"][0] - 0.2
    assert {v["dtype"] for v in result["audit"]["vectors"] if v["added"]} == {"float32"}
    for name, vector in result["vectors"].items():
        if "gamma" in name:
            assert (vector != vector.astype(np.float16)).any(), f"{name} looks rounded"


def test_float16_with_loss_scaling(ranks):
    argv = tiny_gpt(
        "llama", *LAYOUTS["tp2"][1], "--fp16", "--initial-loss-scale", "256", "--scalevec-strategy", "unified"
    )
    result = ranks.run("train", 2, argv=argv)[-1]
    assert result["losses"][-1] < result["losses"][0] - 0.2
