"""Processes killed at random moments: what was whole stays, what is not whole is not taken for it."""


def test_killed_tools_leave_no_checkpoint(ranks, tmp_path):
    [found] = ranks.run("kill_tools", folder=str(tmp_path), times=20)
    for command in ("unfold", "fold"):
        assert found[command]["wrong"] == []
        assert found[command]["killed"] >= 5, found


def test_killed_saves_are_never_taken_for_whole(ranks, tmp_path):
    [found] = ranks.run("kill_saves", folder=str(tmp_path), times=20)
    assert found["mixtures"] == 0, found
    assert found["whole"] >= 5, found
    assert found["other whole"] == found["refused"], found
