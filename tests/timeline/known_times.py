"""A model and a backend that take known times, and record the actual times.

Each recorded event lies between two instants of this module, in the order of the program. So the
distance of two instants is the tolerance of a recorded time, however busy the machine is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future
from torch.profiler import profile

from ddpx import _C

# Event name -> time in ns of its last occurrence. For this process.
instants: dict[str, int] = {}


def _now(what: str) -> None:
    instants[what] = _C.steady_now()


class _Sleep(torch.autograd.Function):
    """Takes a known time, and returns its input unchanged."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: SlowLayer) -> torch.Tensor:
        _now(f"forward {layer.number} begins")
        time.sleep(layer.forward_s)
        _now(f"forward {layer.number} ends")
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        _now(f"backward {ctx.layer.number} begins")
        time.sleep(ctx.layer.backward_s)
        _now(f"backward {ctx.layer.number} ends")
        return grads[0], None


class SlowLayer(nn.Module):
    """A layer whose gradient arrives ``backward_s`` after backward has reached it."""

    def __init__(self, number: int, numel: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.number = number
        self.weight = nn.Parameter(torch.ones(numel))
        self.forward_s = forward_s
        self.backward_s = backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The gradients of the product come after the sleep, so the weight's gradient arrives at its
        # end.
        return _Sleep.apply(x * self.weight.mean(), self)


def slow_model(times: Sequence[tuple[float, float]], numel: int = 1000) -> nn.Sequential:
    """A model of slow layers.

    Args:
        times: The seconds of forward and backward, layer by layer.
    """
    return nn.Sequential(*(SlowLayer(i, numel, *each) for i, each in enumerate(times)))


def timed_step(model: nn.Module) -> None:
    """Runs forward and backward of a wrapped slow model."""
    inputs = torch.ones(1, requires_grad=True) * 1
    inputs.register_hook(lambda grad: _now("backward reaches the input"))
    _now("forward is called")
    output = model(inputs)
    _now("forward returns")
    loss = output.sum()
    _now("backward is called")
    loss.backward()
    _now("backward returns")


def clock_error_ns(instant: str) -> int:
    """The error of an instant. torch's profiler converts its times to another clock."""
    return 100_000 if instant.startswith("wait ") else 0


def add_waits(steps: Sequence[dict[str, int]], profiled: profile) -> None:
    """Adds the instants around each wait of the reducer to the instants of steps.

    The reducer waits in C++. Each of its waits is an operation for torch's profiler.

    Args:
        steps: The instants of each profiled step.
        profiled: A profiler that has stopped.
    """
    to_steady_ns = _C.steady_now() - time.time_ns()
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    waits = sorted(
        (event.start_ns() + to_steady_ns, event.duration_ns())
        for event in profiled.profiler.kineto_results.events()
        if event.name() == "ddpx::wait"
    )
    assert waits and len(waits) % len(steps) == 0
    num_waits = len(waits) // len(steps)
    for index, (begin, duration) in enumerate(waits):
        step, number = divmod(index, num_waits)
        steps[step][f"wait {number} begins"] = begin
        steps[step][f"wait {number} ends"] = begin + duration


class DelayedGroup(dist.ProcessGroup):
    """A group of rank 0 of two, whose all-reduces end a given number of seconds after their
    launch.

    The delays follow each other in the list, which repeats. Tensors stay unchanged.
    """

    def __init__(self, delays: Sequence[float]) -> None:
        super().__init__(0, 2)
        self._delays = list(delays)
        self._num_launched = 0
        self._threads: list[threading.Thread] = []

    def restart(self) -> None:
        """Gives the next all-reduce the first delay."""
        self._num_launched = 0

    def join(self) -> None:
        """Waits until all launched all-reduces have set their instants."""
        while self._threads:
            self._threads.pop().join()

    def getBackendName(self) -> str:
        return "delayed"

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        future: Future[list[torch.Tensor]] = Future()
        number = self._num_launched % len(self._delays)
        self._num_launched += 1
        _now(f"all-reduce {number} begins")

        def end() -> None:
            time.sleep(self._delays[number])
            _now(f"all-reduce {number} ends")
            future.set_result(tensors)  # runs the callbacks that record the end
            _now(f"all-reduce {number} has told its end")

        self._threads.append(threading.Thread(target=end, daemon=True))
        self._threads[-1].start()
        _now(f"all-reduce {number} is on its way")
        return _create_work_from_future(future)

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        return self._done(tensors)

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        for output, source in zip(outputs, inputs, strict=True):
            for tensor in output:
                tensor.copy_(source)
        return self._done(outputs)

    def _done(self, result: Any) -> Any:
        future: Future[Any] = Future()
        future.set_result(result)
        return _create_work_from_future(future)
