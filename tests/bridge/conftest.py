"""Fixtures for the tests on Megatron-Bridge, which the main environment does not have."""

from __future__ import annotations

import importlib.util

import pytest
from ranks.pool import pool_with_jobs_beside

# Where it is missing there is nothing to collect; `make test-bridge` then fails for that very reason.
collect_ignore_glob = [] if importlib.util.find_spec("megatron.bridge") else ["*"]


@pytest.fixture(scope="session")
def bridge_ranks():
    """A pool of ranks that have Megatron-Bridge imported."""
    with pool_with_jobs_beside(__file__, "bridge_jobs") as pool:
        yield pool
