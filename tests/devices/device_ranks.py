"""Ranks on a device: the late one, or CUDA where there is one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpx.testing import RankPool

LATE = "late"
CUDA = "cuda"

_LATE_DEVICE = str(Path(__file__).parents[1] / "late_device")

# A CUDA case skips where there is no device; the marker selects it where there is one.
DEVICES = [
    pytest.param(LATE, id="late"),
    pytest.param(
        CUDA,
        id="cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
        ],
    ),
]
devices = pytest.mark.parametrize("device", DEVICES)


class Device:
    """What a test needs of a device, on a rank."""

    def __init__(self, kind: str, hold_ms: float = 20.0, delay_us: float = 50.0) -> None:
        self.kind = kind
        self.late: Any = None
        self.wrong: list[str] = []  # gradients that are not what they should be
        self.group: dist.ProcessGroup | None = None
        if kind == LATE:
            sys.path.insert(0, _LATE_DEVICE)
            import late_device

            self.late = late_device
            self.extension = late_device.load(hold_ms, delay_us)
            self.group = late_device.new_group()

    def stream(self) -> torch.Stream:
        return torch.Stream(device=self.kind)

    def current_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream()

    def synchronize(self) -> None:
        torch.accelerator.synchronize()

    def check(self, params: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> None:
        """Compares gradients. Ranks go on together; what is wrong is raised when all are through.

        On the late device to the bit; another device multiplies in other orders.
        """
        for number, (param, right) in enumerate(zip(params, expected, strict=True)):
            assert param.grad is not None
            left = param.grad.cpu()
            same = torch.equal if self.kind == LATE else torch.allclose
            if not same(left, right):
                self.wrong.append(f"parameter {number}: off by {(left - right).abs().max():g}")

    def wrapped(self, cls: Callable[..., Any], module: torch.nn.Module, **options: Any) -> Any:
        """The module in a wrapper of this class, over the device's process group."""
        return cls(module, process_group=self.group, **options)


def run_on(pool: RankPool, function: Callable[..., Any], device: str, *args: Any) -> list[Any]:
    """Runs ``function(Device, *args)`` on every rank, under a time limit."""
    return pool.run(_with_device, function, device, args, timeout=60.0)


def _with_device(function: Callable[..., Any], kind: str, args: tuple[Any, ...]) -> Any:
    device = Device(kind)
    try:
        result = function(device, *args)
        assert not device.wrong, "; ".join(device.wrong)
        return result
    finally:
        device.synchronize()
        if device.group is not None:
            dist.barrier()
            dist.destroy_process_group(device.group)


def pools() -> Iterator[Callable[[str, int], RankPool]]:
    """Body of a fixture: pools by device and world size. Ranks are forks without the device."""
    made: dict[tuple[str, int], RankPool] = {}
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    sys.path.insert(0, _LATE_DEVICE)
    import late_device

    late_device.build()  # here, since ranks work under a time limit

    def get(device: str, world_size: int) -> RankPool:
        if (device, world_size) not in made:
            # NCCL refuses two ranks on one GPU; gloo takes CUDA tensors.
            backend = "nccl" if device == CUDA and world_size == 1 else "gloo"
            made[device, world_size] = RankPool(world_size, backend)
        return made[device, world_size]

    yield get
    for pool in made.values():
        pool.close()
