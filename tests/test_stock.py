"""With the plugin off, nothing is different: same losses, same gradients, same saved tensors."""

from pathlib import Path

import numpy as np
import pytest
from ranks.arguments import LAYOUTS, tiny_gpt

pytestmark = pytest.mark.needs_training

SCRIPT = "pretrain_as_users_do.py"


@pytest.mark.parametrize("layout", ["serial", "tp2"])
def test_stock_is_bit_identical_to_no_plugin(ranks, tmp_path, layout):
    world_size, arguments = LAYOUTS[layout]
    runs, tensors = {}, {}
    for plugin in (False, True):
        save = tmp_path / str(plugin)
        argv = tiny_gpt("llama", *arguments, "--save", str(save), "--save-interval", "10")
        if plugin:
            argv += ["--scalevec-strategy", "stock"]
        runs[plugin] = ranks.run("train", world_size, argv=argv, plugin=plugin, by_name=False, script=SCRIPT)
        [tensors[plugin]] = ranks.run("checkpoint_tensors", folder=str(save / "iter_0000010"))
    for without, with_plugin in zip(runs[False], runs[True]):
        assert len(without["losses"]) == 10
        assert with_plugin["losses"] == without["losses"]
        assert with_plugin["grad_norms"] == without["grad_norms"]
        assert with_plugin["audit"] is None
    assert len(tensors[False]) > 20
    assert tensors[True].keys() == tensors[False].keys()
    for name, tensor in tensors[False].items():
        np.testing.assert_array_equal(tensors[True][name], tensor, err_msg=name)
    assert not list(Path(tmp_path).rglob("scalevec*"))


def test_the_same_script_takes_a_strategy(ranks):
    """The user's script, not a line changed, and its own argument understood."""
    argv = tiny_gpt("llama", "--my-loss-scale", "0.5", "--scalevec-strategy", "hg")
    [result] = ranks.run("train", argv=argv, script=SCRIPT)
    assert result["audit"]["linears_converted"] == 8
    assert result["losses"][0] < 3  # ln(128) = 4.9, halved
