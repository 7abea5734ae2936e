"""Whole runs with every optimizer: five steps, a checkpoint, five steps are ten steps, bit for bit."""

import numpy as np
import pytest
from ranks.arguments import LAYOUTS, tiny_gpt

pytestmark = pytest.mark.needs_training

TP2 = LAYOUTS["tp2"][1]
OVERLAPS = LAYOUTS["dp2-distopt"][1]
UNIFIED = ["--scalevec-strategy", "unified"]
HG = ["--scalevec-strategy", "hg"]


def _names(values):
    return " ".join(values).replace("--", "").replace("scalevec-strategy ", "")


@pytest.mark.parametrize(
    ("world_size", "arguments", "kinds"),
    [
        (1, ["--optimizer", "adam", *UNIFIED], {"adam"}),
        (2, ["--optimizer", "adam", *OVERLAPS, *UNIFIED], {"adam"}),
        (1, ["--optimizer", "sgd", "--ckpt-format", "torch", *UNIFIED], {"sgd"}),
        (2, ["--optimizer", "muon", *TP2, *UNIFIED], {"adam", "muon"}),
        (2, ["--optimizer", "muon", "--bf16", *OVERLAPS, *HG], {"adam", "muon"}),
        (2, ["--optimizer", "dist_muon", "--bf16", *UNIFIED], {"adam", "muon"}),
        (1, ["--optimizer", "muon", "--muon-scalar-optimizer", "lion", *HG], {"lion", "muon"}),
        (2, ["--optimizer", "soap", *TP2, *UNIFIED], {"adam", "soap"}),
        (2, ["--optimizer", "soap", "--bf16", "--use-distributed-optimizer", *HG], {"adam", "soap"}),
        (1, ["--optimizer", "lion", *UNIFIED], {"adam", "lion"}),
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
