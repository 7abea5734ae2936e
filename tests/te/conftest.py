"""Fixtures for the tests on TransformerEngine, which the main environment does not have."""

from __future__ import annotations

import importlib.util

import pytest
from ranks.pool import pool_with_jobs_beside

# Where it is missing there is nothing to collect; `make test-te` then fails for that very reason.
collect_ignore_glob = [] if importlib.util.find_spec("transformer_engine") else ["*"]


@pytest.fixture(scope="session")
def te_ranks():
    """A pool of ranks that have TransformerEngine imported, with plain torch for its kernels."""
    with pool_with_jobs_beside(__file__, "te_jobs") as pool:
        yield pool
