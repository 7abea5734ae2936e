"""Fixtures for all tests."""

from __future__ import annotations

import pytest
from ranks.pool import RankPool


@pytest.fixture(scope="session")
def ranks():
    """A pool of forked gloo ranks that have Megatron imported."""
    pool = RankPool()
    yield pool
    pool.close()
