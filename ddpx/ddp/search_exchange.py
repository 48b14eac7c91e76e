"""Small collective calls of a search, in a forward, over the process group of a wrapper."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress

import torch
import torch.distributed as dist

from ddpx import health
from ddpx.comm import transforms
from ddpx.comm.process_group import device_of_calls

_numbers = itertools.count()  # of the searches of this process, which begin in the same order


class Exchange:
    """The calls of one search. Each method but the marks is a collective call.

    Args:
        group: The ranks.
        device: The device of the module.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device_of_calls(group, device)
        self._key = f"ddpx/plan_search/{next(_numbers)}"

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

    def leave_mark(self) -> None:
        """Leaves a mark in the store of the group, which all ranks can see."""
        with suppress(RuntimeError, AttributeError):  # torch did not make the group
            self._group.get_group_store().set(self._key, "1")

    def has_mark(self) -> bool:
        """Whether a rank has left a mark."""
        with suppress(RuntimeError, AttributeError):
            return self._group.get_group_store().check([self._key])
        return False
