"""nemo-toolkit's own loop: Lightning's trainer, NeMo's strategy, optimizer and checkpoints, on the CPU."""

from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs" / "nemo.md"
LINE = "model.config.transformer_layer_spec: megatron_scalevec.nemo.{}\n"


def pretrain(nemo_ranks, folder, strategy, steps, stop_after=None):
    yaml = LINE.format(strategy) if strategy else "log.name: default\n"
    lengths = {"steps": steps, "stop_after": stop_after or steps}
    [run] = nemo_ranks.run("pretrain", factory="llama32_1b", yaml=yaml, folder=str(folder), **lengths)
    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lightning")


@pytest.fixture(scope="module")
def whole(nemo_ranks, folder):
    """Twenty steps without a stop."""
    return pretrain(nemo_ranks, folder / "whole", "unified", 20)


@pytest.fixture(scope="module")
def half(nemo_ranks, folder):
    """Ten steps and a checkpoint."""
    return pretrain(nemo_ranks, folder / "half", "unified", 20, stop_after=10)


def test_the_recipe_trains_with_the_strategy(whole):
    assert whole["error"] is None and len(whole["losses"]) == 20
    assert whole["losses"][-1] < whole["losses"][0] - 1
    assert "linears converted 4 of 4" in whole["output"]
    decays = {name.removeprefix("module."): decay for name, decay in whole["decays"].items()}
    assert decays["decoder.layers.0.self_attention.linear_qkv.gamma_in_q_alpha"] == 0.1
    assert decays["decoder.layers.0.self_attention.q_layernorm.gamma_alpha"] == 0.0


def test_a_resumed_run_goes_on_as_the_one_that_never_stopped(nemo_ranks, whole, half, folder):
    assert half["error"] is None and half["losses"] == pytest.approx(whole["losses"][:10], rel=1e-6)
    resumed = pretrain(nemo_ranks, folder / "half", "unified", 20)
    assert resumed["error"] is None
    assert resumed["losses"] == pytest.approx(whole["losses"][10:], rel=1e-6)


@pytest.mark.parametrize(
    ("strategy", "kind", "text"),
    [
        (None, "RuntimeError", "Global shape mismatch"),
        ("hg", "ValueError", "Cannot merge two lists with different lengths"),
    ],
    ids=["stock", "another strategy"],
)
def test_a_resume_without_the_strategy_stops(nemo_ranks, whole, folder, strategy, kind, text):
    run = pretrain(nemo_ranks, folder / "whole", strategy, 22)
    assert run["losses"] == []
    # NeMo's own error: docs/nemo.md says what it means.
    assert run["error"][0] == kind and text in run["error"][1]
    assert f"`{kind}: " in DOCS.read_text() and text in DOCS.read_text()
