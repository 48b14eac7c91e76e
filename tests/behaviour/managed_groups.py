"""Process groups in Python, in the manner of torchft, Monarch and NVRx, with a log of calls.

Each stands for one rank of its own job: the other members are replicas of the job, which exist only
as what they add. ``calls`` has the name, the dtype and the number of elements of each call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future

Tensors = list[torch.Tensor]
Future = torch.futures.Future[Any]


def completed(value: object) -> Future:
    future: Future = torch.futures.Future()
    future.set_result(value)
    return future


def averaged(tensor: torch.Tensor) -> torch.Tensor:
    """The mean with a replica, whose gradients are ones. Maps of used parameters do not change."""
    if tensor.is_sparse:
        return tensor / 2
    return (tensor + 1) / 2 if tensor.is_floating_point() or tensor.is_complex() else tensor


class PythonWork(dist.Work):
    """A work that overrides ``wait`` and ``get_future``, as those of torchft and NVRx do."""

    def __init__(self, future: Future) -> None:
        super().__init__()
        self.future = future

    def wait(self, timeout: Any = None) -> bool:
        self.future.wait()
        return True

    def get_future(self) -> Future:
        return self.future


class WaitOnlyWork(dist.Work):
    """A work without a future. DDP cannot use it."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class ManagedGroup(dist.ProcessGroup):
    """The C++ part has one rank. ``size()`` is the number of replicas, and may be 1."""

    def __init__(self, num_replicas: int = 2) -> None:
        super().__init__(0, 1)
        self.num_replicas = num_replicas
        self.calls: list[tuple[str, torch.dtype, int]] = []
        self.works: list[object] = []  # torch's C++ core does not keep works in Python

    def size(self) -> int:
        return self.num_replicas

    def getBackendName(self) -> str:
        return "managed"

    def work(self, future: Future) -> Any:
        self.works.append(_create_work_from_future(future))
        return self.works[-1]

    def log(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        self.calls += [(name, tensor.dtype, tensor.numel()) for tensor in tensors]

    def allreduce(self, tensors: Tensors, options: Any = None) -> Any:
        self.log("allreduce", tensors)
        for tensor in tensors:
            tensor.copy_(averaged(tensor))
        return self.work(completed(tensors))

    def broadcast(self, tensors: Tensors, options: Any = None) -> Any:
        self.log("broadcast", tensors)
        return self.work(completed(tensors))

    def allgather(self, outputs: list[Tensors], inputs: Tensors, options: Any = None) -> Any:
        self.log("allgather", inputs)
        for gathered, tensor in zip(outputs, inputs, strict=True):
            for output in gathered:
                output.copy_(tensor)
        return self.work(completed(outputs))


class ManagedInFuture(ManagedGroup):
    """The tensor stays as it is: the mean is the value of the future, after a ``then()``."""

    def allreduce(self, tensors: Tensors, options: Any = None) -> Any:
        self.log("allreduce", tensors)
        future = completed(tensors)
        return self.work(future.then(lambda done: [averaged(each) for each in done.value()]))


class ManagedLater(ManagedGroup):
    """As ``ManagedInFuture``. The future is completed later, by another thread."""

    def allreduce(self, tensors: Tensors, options: Any = None) -> Any:
        self.log("allreduce", tensors)
        future: Future = torch.futures.Future()
        threading.Timer(0.02, lambda: future.set_result(tensors)).start()
        return self.work(future.then(lambda done: averaged(done.value()[0])))


class ManagedWorks(ManagedInFuture):
    """Works are written in Python, too."""

    def work(self, future: Future) -> Any:
        self.works.append(PythonWork(future))
        return self.works[-1]


class WaitOnlyGroup(ManagedGroup):
    def work(self, future: Future) -> Any:
        self.works.append(WaitOnlyWork())
        return self.works[-1]


class WrappedGroup(dist.ProcessGroup):
    """Passes calls on to the default group, whose sums it halves in a ``then()``."""

    def __init__(self) -> None:
        inner = dist.group.WORLD
        assert inner is not None
        super().__init__(inner.rank(), inner.size())
        self.inner = inner
        self.calls: list[tuple[str, torch.dtype, int]] = []
        self.works: list[object] = []

    def getBackendName(self) -> str:
        return "wrapped"

    def _pass_on(
        self, name: str, tensors: Tensors, work: dist.Work, then: Callable[[Future], object]
    ) -> PythonWork:
        self.calls += [(name, tensor.dtype, tensor.numel()) for tensor in tensors]
        self.works.append(PythonWork(work.get_future().then(then)))
        return self.works[-1]  # type: ignore[return-value]

    def allreduce(self, tensors: Tensors, options: Any = None) -> Any:
        work = self.inner.allreduce(tensors)
        halves = tensors[0].is_floating_point()
        return self._pass_on(
            "allreduce",
            tensors,
            work,
            lambda done: [each / 2 if halves else each for each in done.value()],
        )

    def broadcast(self, tensors: Tensors, options: Any = None) -> Any:
        work = self.inner.broadcast(tensors, options) if options else self.inner.broadcast(tensors)
        return self._pass_on("broadcast", tensors, work, lambda done: done.value())

    def allgather(self, outputs: list[Tensors], inputs: Tensors, options: Any = None) -> Any:
        work = self.inner.allgather(outputs, inputs)
        return self._pass_on("allgather", inputs, work, lambda done: done.value())


IN_PLACE_OF_RANKS: dict[str, Callable[[], Any]] = {
    "in place": ManagedGroup,
    "in place, one replica": lambda: ManagedGroup(1),
    "value of a future": ManagedInFuture,
    "later": ManagedLater,
    "works in Python": ManagedWorks,
    "works in Python, one replica": lambda: ManagedWorks(1),
}
