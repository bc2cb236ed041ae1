"""Settings of the whole suite: a quiet, small use of the machine, and the same matmuls everywhere; ranks for tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

# before any framework is imported; two test processes share the cores
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Rank processes, started when a test first needs them and shared by the tests of a test process."""
    pool = RankPool()
    yield pool
    pool.close()
