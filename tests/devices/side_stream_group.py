"""A process group in Python whose sums belong to a stream of the group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

Tensors = list[torch.Tensor]


class _Summed(dist.Work):
    """The value of the future is the sum. The future does not know a device."""

    def __init__(self, sums: Tensors) -> None:
        super().__init__()
        self._future: torch.futures.Future[Tensors] = torch.futures.Future()
        self._future.set_result(sums)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Tensors]:
        return self._future


class SideStreamGroup(dist.ProcessGroup):
    """Sums copies of the tensors over the default group. The current stream waits for the sums."""

    def __init__(self, stream: torch.Stream) -> None:
        inner = dist.group.WORLD
        assert inner is not None
        super().__init__(inner.rank(), inner.size())
        self._inner = inner
        self._stream = stream
        self._works: list[dist.Work] = []  # torch's C++ core does not keep works in Python

    def getBackendName(self) -> str:
        return "side stream"

    def allreduce(self, tensors: Tensors, options: Any = None) -> dist.Work:
        current = torch.accelerator.current_stream()
        self._stream.wait_stream(current)
        with self._stream:
            sums = [tensor.clone() for tensor in tensors]
            self._inner.allreduce(sums).wait()
        current.wait_stream(self._stream)
        self._works.append(_Summed(sums))
        return self._works[-1]

    def forget_works(self) -> None:
        """Drops the works, which refer to the sums. To be called between steps."""
        self._works.clear()

    def broadcast(self, tensors: Tensors, options: Any = None) -> dist.Work:
        return self._inner.broadcast(tensors, options or dist.BroadcastOptions())

    def allgather(self, outputs: list[Tensors], inputs: Tensors, options: Any = None) -> dist.Work:
        return self._inner.allgather(outputs, inputs)
