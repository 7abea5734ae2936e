"""The pool of ranks itself: nothing that it starts outlives it, or the job it was started for."""

import os
import signal
import time

import pytest
from forked import Child
from ranks.pool import RankFailure, RankPool


def _alive(folder):
    return [pid for pid in os.listdir(folder) if os.path.exists(f"/proc/{pid}")]


def _in_time(condition, seconds):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def test_no_process_of_a_rank_survives_its_job(ranks, tmp_path):
    with pytest.raises(RankFailure):  # the ranks end as after a crash
        ranks.run("leave_processes", 2, folder=str(tmp_path))
    assert len(os.listdir(tmp_path)) == 8
    assert _alive(tmp_path) == []


def test_no_rank_survives_the_test_process(tmp_path):
    """Killed in the middle of a job, as by a time limit."""

    def test_process(ready):
        RankPool().run("leave_processes", 2, folder=str(tmp_path), then_sleep=True)

    child = Child(test_process)
    assert _in_time(lambda: len(os.listdir(tmp_path)) == 8, 120)
    assert len(_alive(tmp_path)) == 8
    child.send(signal.SIGKILL)
    child.wait()
    assert _in_time(lambda: _alive(tmp_path) == [], 20)
