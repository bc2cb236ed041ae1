"""Settings of the whole suite: a quiet, small use of the machine, and the same matmuls everywhere; ranks for tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

# before any framework is imported; two test processes share the cores
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # meshes of the JAX tests
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Rank processes, started when a test first needs them and shared by the tests of a test process."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def quick_compilation() -> Iterator[None]:
    """XLA without most of its passes: what is compared is what we ask of it."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
