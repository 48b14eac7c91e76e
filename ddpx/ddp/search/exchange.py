"""Small collective calls of a search, behind the buckets of a step, over the group of a wrapper."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ddpx import health
from ddpx.comm import transforms
from ddpx.comm.process_group import device_of_calls


class Exchange:
    """The calls of one search. Each method is a collective call.

    Args:
        group: The ranks.
        device: The device of the module.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device_of_calls(group, device)

    def highest(self, values: Sequence[float]) -> list[float]:
        """The highest value of all ranks, for each element."""
        with transforms.outside(), torch.no_grad(), health.collective_call(self._group):
            tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
            work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group, async_op=True)
            health.wait_for(work, self._group, self._device)
            found: list[float] = tensor.tolist()
        return found

    def of_rank_0(self, values: Sequence[int]) -> list[int]:
        """The values of rank 0."""
        with transforms.outside(), torch.no_grad(), health.collective_call(self._group):
            tensor = torch.tensor(values, dtype=torch.int64, device=self._device)
            work = dist.broadcast(tensor, group=self._group, group_src=0, async_op=True)
            health.wait_for(work, self._group, self._device)
            found: list[int] = tensor.tolist()
        return found
