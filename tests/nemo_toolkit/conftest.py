"""Fixtures for the tests on nemo-toolkit, which the main environment does not have."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from ranks.pool import RankPool

# Where it is missing there is nothing to collect; `make test-nemo` then fails for that very reason.
collect_ignore_glob = [] if importlib.util.find_spec("nemo_run") else ["*"]


@pytest.fixture(scope="session")
def nemo_ranks():
    """A pool of ranks that have nemo.collections.llm imported."""
    here = str(Path(__file__).resolve().parent)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, before]))
    try:
        pool = RankPool("nemo_jobs")
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    yield pool
    pool.close()
