"""Fixtures for the tests on nemo-toolkit, which the main environment does not have."""

from __future__ import annotations

import importlib.util

import pytest
from ranks.pool import pool_with_jobs_beside

# Where it is missing there is nothing to collect; `make test-nemo` then fails for that very reason.
collect_ignore_glob = [] if importlib.util.find_spec("nemo_run") else ["*"]


@pytest.fixture(scope="session")
def nemo_ranks():
    """A pool of ranks that have nemo.collections.llm imported."""
    with pool_with_jobs_beside(__file__, "nemo_jobs") as pool:
        yield pool
