"""Fixtures for the tests on TransformerEngine, which the main environment does not have."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from ranks.pool import RankPool

# Where it is missing there is nothing to collect; `make test-te` then fails for that very reason.
collect_ignore_glob = [] if importlib.util.find_spec("transformer_engine") else ["*"]


@pytest.fixture(scope="session")
def te_ranks():
    """A pool of ranks that have TransformerEngine imported, with plain torch for its kernels."""
    here = str(Path(__file__).resolve().parent)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, before]))
    try:
        pool = RankPool("te_jobs")
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    yield pool
    pool.close()
