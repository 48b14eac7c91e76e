"""Ranks whose tensors are on a device: the late device or CUDA."""

from __future__ import annotations

import datetime
import functools
import itertools
import os
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import late_device
import pytest
import torch
import torch.distributed as dist

from ddpx import _C
from ddpx.testing import RankPool
from ddpx.testing.rank_pool import StartMethod

# CUDA cases have the marker of `pytest -m gpu`.
_CUDA_MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


# "spawn" keeps the ranks of device tests apart from a fork server.
START_METHOD = cast(StartMethod, os.environ.get("DDPX_TEST_START_METHOD", "forkserver"))


class NcclRanks(int):
    """A number of NCCL ranks, which share one GPU. A plain number of ranks uses gloo."""

    def __repr__(self) -> str:
        return f"NcclRanks({int(self)})"


def on_devices(*world_sizes: int) -> pytest.MarkDecorator:
    """Parametrizes a test's ``device`` and ``world_size``.

    CUDA gets 1 to 4 NCCL ranks, and gloo with these sizes and with 3.
    """
    late = [pytest.param("late", size, id=f"late-{size}") for size in world_sizes]
    cuda = [
        *((NcclRanks(size), f"cuda-nccl-{size}") for size in (1, 2, 3, 4)),
        *((size, f"cuda-gloo-{size}") for size in sorted({*world_sizes, 3} - {1})),
    ]
    on_cuda = [pytest.param("cuda", size, marks=_CUDA_MARKS, id=id_) for size, id_ in cuda]
    return pytest.mark.parametrize("device, world_size", [*late, *on_cuda])


def on_nccl(*late_sizes: int) -> pytest.MarkDecorator:
    """Parametrizes a test's ``device`` and ``world_size``.

    The late device gets these sizes. CUDA gets 1 to 3 NCCL ranks.
    """
    late = [pytest.param("late", size, id=f"late-{size}") for size in late_sizes]
    cuda = [
        pytest.param("cuda", NcclRanks(size), marks=_CUDA_MARKS, id=f"cuda-nccl-{size}")
        for size in (1, 2, 3)
    ]
    return pytest.mark.parametrize("device, world_size", [*late, *cuda])


def skip_gloo_on_cuda(device: str, world_size: int, reason: str) -> None:
    """Skips the test for gloo ranks with tensors on a GPU."""
    if device == "cuda" and not isinstance(world_size, NcclRanks):
        pytest.skip(reason)


class DeviceRanks:
    """A :class:`RankPool` whose default group communicates on ``device``.

    Several ranks share a GPU, over NCCL or gloo. gloo supports CUDA tensors. Two ranks copy each
    gradient when it arrives, so that tests cover this way, too, although their gradients are small.
    """

    def __init__(self, device: str, world_size: int) -> None:
        if device == "late":
            late_device.build()  # the build must not count against a rank's time limit
        # Ranks are forked from a process without the device, since the device has threads of its
        # own.
        # gloo: some tests train the same module on CPU, for comparison.
        backend = "cpu:gloo,cuda:nccl" if isinstance(world_size, NcclRanks) else "gloo"
        self._pool = RankPool(world_size, backend, START_METHOD)
        self._device = device
        self._directory = tempfile.TemporaryDirectory(prefix="ddpx-late-")
        self._numbers = itertools.count()

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        may_fail: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """See :meth:`RankPool.run`.

        ``may_fail``: the function may end with an aborted group.
        """
        rendezvous = str(Path(self._directory.name, str(next(self._numbers))))
        call = functools.partial(function, *args, **kwargs)
        small_bytes = "0" if self._pool.world_size == 2 else ""
        run = functools.partial(
            _run_on_device, self._device, rendezvous, small_bytes, may_fail, call
        )
        run.__name__ = function.__name__  # type: ignore[attr-defined]
        return self._pool.run(run, timeout=timeout)

    def close(self) -> None:
        self._pool.close()
        self._directory.cleanup()


class OnePool:
    """The ranks on CUDA of a test process: one pool at a time.

    Each rank takes about 1 GiB of GPU memory. Several test processes share a GPU, so a pool ends
    when a test needs another number of ranks or another backend.
    """

    def __init__(self) -> None:
        self._kind: tuple[type, int] | None = None
        self._ranks: DeviceRanks | None = None

    def __enter__(self) -> OnePool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def get(self, world_size: int) -> DeviceRanks:
        kind = (type(world_size), int(world_size))
        if self._ranks is None or self._kind != kind:
            self.close()
            self._kind, self._ranks = kind, DeviceRanks("cuda", world_size)
        return self._ranks

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
        self._kind = self._ranks = None


def _run_on_device(
    device: str, rendezvous: str, small_bytes: str, may_fail: bool, call: Callable[[], Any]
) -> Any:
    os.environ["DDPX_FORCE_COMM"] = "1"  # a single rank runs the whole communication path, too
    os.environ["DDPX_SMALL_GRAD_BYTES"] = small_bytes
    if device == "late":
        _enter_late_group(rendezvous)
        controls().set_hold(late_device.milliseconds(HOLD_MS))
        for index in range(controls().NUM_DEVICES):  # work of the previous function
            controls().synchronize(index)
    torch.accelerator.set_device_index(0)
    result = call()
    group = dist.group.WORLD
    monitor = None if group is None else _C.monitor_of(group)
    if monitor is not None and not may_fail:
        monitor.raise_if_failed()  # after an abort, results may be wrong
    return result


def _enter_late_group(rendezvous: str) -> None:
    """Gives the default group the backend of the late device, once per rank."""
    if dist.is_initialized() and "late" in str(dist.get_backend_config()):
        return
    late_device.load()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(
        "cpu:gloo,late:late",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=60),
    )


# Time for which the device holds work that nothing demands.
HOLD_MS = float(os.environ.get("LATE_HOLD_MS", "20"))


def controls() -> types.ModuleType:
    """The controls of the late device, in a rank."""
    return late_device.load()


def keep_busy(device: str, time_ms: float) -> None:
    """Queues work on the current stream that takes about ``time_ms``."""
    if device == "late":
        controls().sleep(late_device.milliseconds(time_ms))
    else:
        torch.cuda._sleep(round(time_ms * 1_500_000))  # the argument is in cycles
