"""The record itself: names, counts over pipelines and data-parallel shards, the file."""

import json

import pytest
from ranks.arguments import LAYOUTS, tiny_gpt


@pytest.mark.needs_training
@pytest.mark.parametrize("layout", ["serial", "tp2", "pp2", "pp2-vpp", "dp2-distopt"])
def test_the_record_is_the_same_in_every_layout(ranks, layout):
    """Counts are of the whole model, whatever part of it this rank holds."""
    argv = tiny_gpt("llama", "--train-iters", "4", "--lr-warmup-iters", "1", "--scalevec-strategy", "unified")
    [serial] = ranks.run("train", argv=argv)
    world_size, more = LAYOUTS[layout]
    for result in ranks.run("train", world_size, argv=[*argv, *more]):
        assert result["audit"] == serial["audit"]


@pytest.mark.needs_training
def test_what_it_says_is_true(ranks):
    argv = tiny_gpt("llama", "--train-iters", "4", "--lr-warmup-iters", "1", "--scalevec-strategy", "unified")
    [result] = ranks.run("train", argv=argv)
    audit = result["audit"]
    names = [vector["name"] for vector in audit["vectors"]]
    assert len(set(names)) == len(names)
    trained = {name for name in result["vectors"] if "gamma" in name}
    assert len(trained) == len(names)
    # 4 layers: gamma_in of q, k, v, gate, up [32]; gamma_out of q, k, v [8], gate, up [64]; two factors
    # each. The final norm has two factors too. Nine norm scales of 32 are retired.
    added = 4 * (5 * (32 + 1) + 3 * (8 + 1) + 2 * (64 + 1)) + (32 + 1) - 9 * 32
    assert audit["parameters_added"] == added
    assert sum(group["tensors"] for group in audit["decay_groups"]) == len(names) + 2 + 4 * 4
    decaying = {v["branch"] + v["side"] for v in audit["vectors"] if not v["decays"]}
    assert decaying == {"qout", "kout"}


def test_the_file_is_written_whole_or_not_at_all(tmp_path, ranks):
    """An interrupted write leaves the earlier file, and no other."""
    path = tmp_path / "deep" / "audit.json"
    [found] = ranks.run("write_audit", path=str(path))
    assert found["interrupted"] == "OSError"
    assert json.loads(path.read_text())["strategy"] == "hg"
    assert [p.name for p in path.parent.iterdir()] == ["audit.json"]
    assert "cannot be written" in found["refused"]


@pytest.mark.parametrize("strategy", ["none", "iwd"])
def test_strategies_without_own_vectors_say_so(ranks, strategy):
    [table] = ranks.run("audit_table", config={"strategy": strategy})
    assert "nothing is formed" in table
    assert ("no vectors" in table) == (strategy == "none")
