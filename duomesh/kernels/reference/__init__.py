"""The numpy reference of every op, its hand-written adjoint, and the model oracle built from both."""

from duomesh.kernels.reference.adjoints import ADJOINTS
from duomesh.kernels.reference.model import ReferenceModel
from duomesh.kernels.reference.ops import OPS

__all__ = ["ADJOINTS", "OPS", "ReferenceModel"]
