"""Fixtures for all tests."""

from __future__ import annotations

import pytest
from ranks.pool import RankPool


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the tables in tests/golden anew (see CONTRIBUTING.md)",
    )


@pytest.fixture(scope="session")
def ranks():
    """A pool of forked gloo ranks that have Megatron imported."""
    pool = RankPool()
    yield pool
    pool.close()
