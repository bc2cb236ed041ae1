"""Settings of the whole suite: a quiet, small use of the machine, and the same matmuls everywhere."""

from __future__ import annotations

import os

# before any framework is imported; two test processes share the cores
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
