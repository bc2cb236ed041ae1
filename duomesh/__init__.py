"""duomesh: describe a language model once; train, convert and check it on PyTorch and JAX.

Importing this package loads neither framework: each loads when its backend is first asked for.
"""

from __future__ import annotations

__version__ = "0.1.0"
