"""Process groups written in Python, over a real gloo group: one records calls, one fails."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class RecordingGroup(dist.ProcessGroup):
    """Forwards all-reduces to the default group and records each in ``log``."""

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
    """While ``broken`` is set, the waits for its all-reduces fail."""

    broken = False

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> dist.Work:
        return BrokenWork() if self.broken else super().allreduce(tensors, options)
