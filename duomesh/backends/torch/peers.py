"""The ranks of a job as `core.peers` sees them."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.distributed as dist

from duomesh.core.activity import doing

__all__ = ["JobPeers"]


class JobPeers:
    """All ranks of this process's job. They talk over the hosts' network, never through GPUs, so no step waits.

    Every rank makes one at the same point.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo")

    def exchange(self, text: str) -> list[str]:
        data = torch.from_numpy(np.frombuffer(bytearray(text.encode()), np.uint8))
        with doing("waiting for what the other ranks have to say", stall_s=math.inf, waits=True):
            sizes = self._gather(torch.tensor([len(data)]))
            longest = max(int(size) for size in sizes)
            if longest == 0:
                return [""] * self.world_size
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(data)] = data
            parts = self._gather(padded)
        return [bytes(part[: int(size)].numpy()).decode() for part, size in zip(parts, sizes, strict=True)]

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(parts, mine, group=self._group)
        return parts
