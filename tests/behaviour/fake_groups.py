"""Process groups written in Python: one that records, one that fails, over a real gloo group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class RecordingGroup(dist.ProcessGroup):
    """Passes all-reduces on to the default group and notes each in ``log``."""

    def __init__(self, log: list[str]) -> None:
        inner = dist.group.WORLD
        assert inner is not None
        super().__init__(inner.rank(), inner.size())
        self.inner = inner
        self.log = log

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> dist.Work:
        self.log.append("launch")
        return self.inner.allreduce(tensors)

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> dist.Work:
        self.log.append("broadcast")
        return self.inner.broadcast(tensors)


class BrokenWork(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        raise RuntimeError("the cable is cut")


class BreakableGroup(RecordingGroup):
    """While ``broken`` is set, its all-reduces fail when they are waited for."""

    broken = False

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> dist.Work:
        return BrokenWork() if self.broken else super().allreduce(tensors, options)
