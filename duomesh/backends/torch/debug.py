"""What ranks really do: every collective that is issued, whether equal values are equal, how large tensors get.

These watch torch itself, below our own code; nothing here runs in a training step unless somebody asks for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from duomesh.backends.torch.groups import Groups
from duomesh.core.errors import BackendError
from duomesh.core.sharding.program import ShardedModelProgram
from duomesh.core.sharding.transitions import INVARIANT, REPLICATED, Action

__all__ = ["CollectiveRecorder", "LargestTensor", "Recorded", "check_invariants"]

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


def check_invariants(sharded: ShardedModelProgram, groups: Groups, record: Mapping[str, Tensor]) -> None:
    """Compares across ranks, bit by bit, every value that its type calls invariant or replicated.

    Args:
        record: op outputs of this rank by global name, as `LoweredModel` records them.

    Raises:
        BackendError: on every rank, naming the first value that differs, its axis and the ranks.
    """
    mine = {name: _digest(record[name]) for name, _ in _equal_values(sharded)}
    everyone: list[dict[str, str]] = [{} for _ in range(groups.mesh.world_size)]
    dist.all_gather_object(everyone, mine)
    for name, axes in _equal_values(sharded):
        for axis in axes:
            for ranks in groups.mesh.groups(axis):
                odd = [rank for rank in ranks if everyone[rank][name] != everyone[ranks[0]][name]]
                if odd:
                    raise BackendError(
                        f"{name} should be equal on the ranks of {axis}, and rank {odd[0]} has other values than rank "
                        f"{ranks[0]}. A reduction is missing before it, or ranks were fed differently."
                    )


def _equal_values(sharded: ShardedModelProgram) -> Iterator[tuple[str, list[str]]]:
    """(global name, mesh axes on which it is equal) of every op's output, in the order of execution."""
    for prefix, _, program in sharded.steps:
        for made in program.calls():
            for name in made.call.op.outputs:
                layout = program.layouts[name]
                equal = [a for a, s in layout.items() if s in (INVARIANT, REPLICATED) and sharded.mesh.size(a) > 1]
                if equal:
                    yield prefix + name, equal


def _digest(tensor: Tensor) -> str:
    host = tensor.detach().to("cpu").contiguous().reshape(-1)
    return hashlib.blake2b(host.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
