"""Parallel equals serial: ten iterations of Megatron's training loop in every layout."""

import numpy as np
import pytest
from ranks.arguments import LAYOUTS, tiny_gpt

pytestmark = pytest.mark.needs_training

STRATEGIES = ["stock", "none", "iwd", "hg", "post-qkv", "dp"]


@pytest.fixture(scope="module")
def train(ranks):
    """Run a layout once; several tests look at the same run."""
    runs = {}

    def run(strategy, layout, model="llama", **more):
        key = strategy, layout, model, tuple(more.items())
        if key not in runs:
            world_size, arguments = LAYOUTS[layout]
            argv = tiny_gpt(model, *arguments, "--scalevec-strategy", strategy)
            results = ranks.run("train", world_size, argv=argv, **more)
            # Losses are known to the last pipeline stage, vectors each to its own.
            vectors = {name: v for result in results for name, v in result["vectors"].items()}
            runs[key] = {**results[-1], "vectors": vectors, "all": results}
        return runs[key]

    return run


def assert_equal_runs(run, serial, tolerance=1e-5):
    assert len(run["losses"]) == len(serial["losses"]) == 10
    np.testing.assert_allclose(run["losses"], serial["losses"], rtol=tolerance)
    np.testing.assert_allclose(run["grad_norms"], serial["grad_norms"], rtol=tolerance)
    assert run["vectors"].keys() == serial["vectors"].keys()
    for name, vector in run["vectors"].items():
        np.testing.assert_allclose(vector, serial["vectors"][name], atol=1e-4, err_msg=name)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "serial"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parallel_equals_serial(train, strategy, layout):
    """Losses, gradient norms (clipping is on) and the vectors after ten updates."""
    assert_equal_runs(train(strategy, layout), train(strategy, "serial"))


@pytest.mark.parametrize(("model", "layout"), [("gpt2", "tp2-sp"), ("one-group", "tp2"), ("qk-norm", "tp2")])
def test_other_models(train, model, layout):
    """Biases and LayerNorm; a query group cut by the ranks; norms on q and k."""
    assert_equal_runs(train("dp", layout, model), train("dp", "serial", model))


def test_replicated_vectors_stay_equal_over_tensor_parallel_ranks(train):
    first, second = train("dp", "tp2")["all"]
    for name, vector in first["vectors"].items():
        np.testing.assert_array_equal(vector, second["vectors"][name], err_msg=name)


def test_the_comparison_sees_a_missing_tensor_parallel_sum(train):
    """Without the sum over ranks the same comparison fails, with the losses alone."""
    broken = train("hg", "tp2", sabotage="tensor-parallel-sum")
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(broken["losses"], train("hg", "serial")["losses"], rtol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_differ_from_each_other(train, strategy):
    """No strategy is another one in disguise: after ten iterations all losses differ."""
    own = train(strategy, "serial")["losses"][-1]
    for other in STRATEGIES:
        if other != strategy:
            assert abs(train(other, "serial")["losses"][-1] / own - 1) > 1e-5


@pytest.mark.parametrize("strategy", ["hg", "post-qkv", "dp"])
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
