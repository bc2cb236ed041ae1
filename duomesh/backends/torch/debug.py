"""What ranks really do: every collective that is issued, whether equal values are equal, how large tensors get.

These watch torch itself, below our own code; nothing here runs in a training step unless somebody asks for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from duomesh.backends.torch.groups import Groups
from duomesh.core.sharding.agree import check_digests
from duomesh.core.sharding.layouts import Layout
from duomesh.core.sharding.mesh import Mesh
from duomesh.core.sharding.program import ShardedModelProgram
from duomesh.core.sharding.transitions import INVARIANT, REPLICATED, Action

__all__ = [
    "CollectiveRecorder",
    "Digests",
    "LargestTensor",
    "Recorded",
    "check_invariants",
    "digest",
    "equal_axes",
    "equal_values",
]

# torch's own ops, in which every way to call a collective ends: (kind, which argument is the larger buffer; None: the
# result is)
_KINDS: dict[str, tuple[str, int | None]] = {
    "c10d::allreduce_": (Action.ALL_REDUCE.value, 0),
    "c10d::_allgather_base_": (Action.ALL_GATHER.value, 0),
    "c10d::_reduce_scatter_base_": (Action.REDUCE_SCATTER.value, 1),
    "c10d::alltoall_base_": (Action.ALL_TO_ALL.value, 1),
    "_c10d_functional::all_reduce": (Action.ALL_REDUCE.value, 0),
    "_c10d_functional::all_gather_into_tensor": (Action.ALL_GATHER.value, None),
    "_c10d_functional::reduce_scatter_tensor": (Action.REDUCE_SCATTER.value, 0),
    "_c10d_functional::all_to_all_single": (Action.ALL_TO_ALL.value, 0),
}
_NAMESPACES = ("c10d::", "_c10d_functional::")
_LOCAL = ("_c10d_functional::wait_tensor",)


@dataclass(frozen=True)
class Recorded:
    """A collective that this rank issued.

    stage: what the session was doing. axes: of the group, from major to minor; other groups go by their name.
    elements: of the larger buffer.
    """

    stage: str
    kind: str
    axes: tuple[str, ...]
    dtype: torch.dtype
    elements: int


class CollectiveRecorder(TorchDispatchMode):
    """Records collectives while it is entered, in the order in which this thread issues them.

    Args:
        groups: those of the session; its groups are named by their axes.
    """

    def __init__(self, groups: Groups) -> None:
        super().__init__()
        self._names = groups.names()
        self._stage = groups.stage
        self.recorded: list[Recorded] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, out = func.name(), func(*args, **(kwargs or {}))
        if name.startswith(_NAMESPACES) and name not in _LOCAL:
            kind, position = _KINDS.get(name, (name, 0))
            buffer = out if position is None else args[position]
            buffer = buffer[0] if isinstance(buffer, (list, tuple)) else buffer
            groups = [g for g in map(_group_name, args) if g is not None]
            axes = self._names.get(groups[-1], (groups[-1],)) if groups else ()
            self.recorded.append(Recorded(self._stage.name, kind, axes, buffer.dtype, buffer.numel()))
        return out


def _group_name(argument: Any) -> str | None:
    """The name of a process group, as an op takes it; None for an argument that is none."""
    if isinstance(argument, str):
        return argument
    if isinstance(argument, torch.ScriptObject):
        try:
            return str(dist.ProcessGroup.unbox(argument).group_name)
        except (RuntimeError, TypeError):  # a reduce operation, say
            return None
    return None


class LargestTensor(TorchDispatchMode):
    """Keeps the size of the largest float tensor that any op made while it is entered, in elements, and by which op."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.op = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            # storage, not elements: a view or an expanded tensor holds no more than what it is of
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                held = leaf.untyped_storage().nbytes() // leaf.element_size()
                if held > self.elements:
                    self.elements, self.op = held, func.name()
        return out


class Digests(dict[str, Tensor]):
    """A record for `LoweredModel` that keeps no value: `digests` has a few bytes of each, by global name."""

    def __init__(self) -> None:
        super().__init__()
        self.digests: dict[str, str] = {}

    def update(self, *values: Any, **named: Any) -> None:
        self.digests |= {name: digest(tensor) for name, tensor in dict(*values, **named).items()}


def digest(tensor: Tensor) -> str:
    """Equal for equal bits."""
    host = tensor.detach().to("cpu").contiguous().reshape(-1)
    return hashlib.blake2b(host.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()


def equal_axes(layout: Layout, mesh: Mesh) -> tuple[str, ...]:
    """Mesh axes whose ranks hold the same bits of what has this layout."""
    return tuple(axis for axis, state in layout.items() if state in (INVARIANT, REPLICATED) and mesh.size(axis) > 1)


def equal_values(sharded: ShardedModelProgram) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(global name, its `equal_axes`) of every op's output, in the order of execution."""
    for prefix, _, program in sharded.steps:
        for made in program.calls():
            for name in made.call.op.outputs:
                yield prefix + name, equal_axes(program.layouts[name], sharded.mesh)


def check_invariants(groups: Groups, what: str, found: Iterable[tuple[str, tuple[str, ...], str]]) -> None:
    """Compares across ranks, bit by bit, what they say is equal. Every rank calls it.

    Args:
        what: the things are, as "weight".
        found: (name, mesh axes on which it is equal, digest) of each.

    Raises:
        BackendError: on every rank, naming the first thing that differs, the axis and the ranks.
    """
    mine = {name: (axes, made) for name, axes, made in found}
    everyone: list[dict[str, tuple[tuple[str, ...], str]]] = [{} for _ in range(groups.mesh.world_size)]
    dist.all_gather_object(everyone, mine)
    held: dict[str, dict[int, str]] = {}  # of each thing, its digest by rank
    axes_of: dict[str, tuple[str, ...]] = {}
    for rank, said in enumerate(everyone):
        for name, (axes, made) in said.items():
            held.setdefault(name, {})[rank] = made
            axes_of[name] = axes
    for name, digests in held.items():
        check_digests(groups.mesh, f"{what} {name}", axes_of[name], digests)
