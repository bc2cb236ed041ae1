"""duomesh: describe a language model once; train, convert and check it on PyTorch and JAX.

Importing this package loads neither framework: each loads when its backend is first asked for.
"""

from __future__ import annotations

from duomesh import spec
from duomesh.api import Model, ModelSource, build, draw, explain, explain_compiled, new_session, open_model
from duomesh.core.batch import IGNORE, Batch
from duomesh.core.dropout import DropoutKey
from duomesh.core.errors import DuomeshError
from duomesh.core.plan.plan import Plan
from duomesh.core.session import AdamW, Session
from duomesh.sides import verify

__version__ = "0.1.0"

__all__ = [
    "IGNORE",
    "AdamW",
    "Batch",
    "DropoutKey",
    "DuomeshError",
    "Model",
    "ModelSource",
    "Plan",
    "Session",
    "build",
    "draw",
    "explain",
    "explain_compiled",
    "new_session",
    "open_model",
    "spec",
    "verify",
]
