"""Processes killed at random moments: what was whole stays, what is not whole is not taken for it."""

import pytest

from megatron_scalevec.checkpoint.keys import raw_master_key

FC1 = "decoder.layers.mlp.linear_fc1.weight"


def test_killed_tools_leave_no_checkpoint(ranks, tmp_path):
    [found] = ranks.run("kill_tools", folder=str(tmp_path), times=10)
    for command in ("unfold", "fold"):
        assert found[command]["wrong"] == []
        assert found[command]["steps"] >= 5, found


@pytest.mark.parametrize(("folding", "times"), [(False, 20), (True, 3)], ids=["tensors", "folding"])
def test_a_killed_save_is_never_taken_for_whole(ranks, tmp_path, folding, times):
    """Plain tensors; and what a run saves that folds inside the optimizer, raw masters and guards too."""
    [found] = ranks.run("kill_saves", folder=str(tmp_path), times=times, folding=folding)
    keys = found.pop("keys")
    for part in (raw_master_key("optimizer.state.param.", FC1), f"optimizer.state.param.{FC1}"):
        assert (part in keys) == folding, keys
    assert found["steps"] >= 5, found
    assert found["mixtures"] == 0, found
    assert found["refused"] >= found["steps"] - 1 and found["kept"] == found["refused"], found


def test_without_the_hook_mixtures_pass_for_whole(ranks, tmp_path):
    """What the hook on saving is there for."""
    [found] = ranks.run("kill_saves", folder=str(tmp_path), times=1, hooked=False)
    assert found["mixtures"] > 0, found
