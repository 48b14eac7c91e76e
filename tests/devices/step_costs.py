"""The cost that a wrapper adds to a step of 200 parameters: device operations and bytes moved."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import late_device
import torch
import torch.distributed as dist
from device_ranks import controls
from nccl_classes import make_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from ddpx import ReducerDDP

NUM_PARAMS = 200
WIDTH = 32
_BF16 = _MixedPrecision(
    param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16
)


@dataclass(frozen=True)
class Setting:
    """Options of both wrappers. DDP has no ``check_finite`` and runs without it."""

    options: dict[str, Any]
    check_finite: bool = False


SETTINGS = {
    "default": Setting({}),
    "view": Setting({"gradient_as_bucket_view": True}),
    "default, find unused": Setting({"find_unused_parameters": True}),
    "view, find unused": Setting({"gradient_as_bucket_view": True, "find_unused_parameters": True}),
    "default, check_finite": Setting({}, check_finite=True),
    "view, check_finite": Setting({"gradient_as_bucket_view": True}, check_finite=True),
    "default, mixed precision": Setting({"mixed_precision": _BF16}),
    "view, mixed precision": Setting({"gradient_as_bucket_view": True, "mixed_precision": _BF16}),
}


@dataclass(frozen=True)
class Cost:
    """The cost of one step, less the cost of the bare module's step.

    Attributes:
        operations: Kernels and copies.
        bytes: Bytes that the operations read and write.
        collectives: The number of collective calls.
        collective_bytes: The size of their tensors.
        synchronisations: How often the host waited for the device.
        memory_bytes: Device memory in use after the step.
    """

    operations: int
    bytes: int
    collectives: int
    collective_bytes: int
    synchronisations: int
    memory_bytes: int

    def __sub__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, name) - getattr(other, name) for name in vars(self)))


def cost_of(name: str, wrapper: str, num_large: int = 0) -> Cost | str:
    """The cost of ``wrapper``, "ddpx" or "DDP", on every rank.

    A text if it does not run on the device. ``num_large`` parameters of 1 MiB lie between others.
    """
    measure = functools.partial(_measure, num_large=num_large)
    os.environ["DDPX_SMALL_GRAD_BYTES"] = ""
    controls().set_hold(late_device.milliseconds(0))  # the counts do not depend on the hold time
    setting = SETTINGS[name]
    dtype = torch.bfloat16 if "mixed_precision" in setting.options else torch.float32
    bare = measure(lambda module: module.to(dtype), dtype)
    if wrapper == "ddpx":
        return measure(functools.partial(_ours, setting), torch.float32) - bare
    try:
        wrap = functools.partial(DistributedDataParallel, **setting.options)
        return measure(wrap, torch.float32) - bare
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]


def events_of_later_steps() -> tuple[int, int]:
    """The events that five steps make after many steps, and their collective calls.

    The host comes far ahead of the device once, so that the largest number of events exists.
    """
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).to("late")
    group = make_group("nccl2")[0]  # as over NCCL, ranks publish the progress of their devices
    model = ReducerDDP(module, process_group=group)
    x = torch.randn(4, 8, device="late")
    controls().set_hold(late_device.milliseconds(2_000))
    for _ in range(20):  # at most 16 steps have events at a time
        model(x).sum().backward()
    controls().set_hold(late_device.milliseconds(0))
    # On a busy machine the host may come further ahead later, which makes events once.
    return min(_events_of_five_steps(model, x) for _ in range(4))


def _events_of_five_steps(model: nn.Module, x: torch.Tensor) -> tuple[int, int]:
    torch.accelerator.synchronize()
    controls().reset_counts()
    for _ in range(5):
        model(x).sum().backward()
    made = controls().num_events_made()
    torch.accelerator.synchronize()
    return made, sum(calls for calls, _ in controls().counts(0)["collective"].values())


def _ours(setting: Setting, module: nn.Module) -> nn.Module:
    ours = ReducerDDP(module, **setting.options)
    ours.set_check_finite(setting.check_finite)
    return ours


class _Large(nn.Module):
    """One parameter of 1 MiB in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1024 * 1024 // 4 // WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.sum()


def _measure(wrap: Callable[[nn.Module], nn.Module], dtype: torch.dtype, num_large: int) -> Cost:
    # Torch keeps a bucket of the last step of DDP in this process until the step of a wrapper.
    model = ReducerDDP(nn.Linear(1, 1).to("late"))
    model(torch.ones(1, 1, device="late")).sum().backward()
    del model
    gc.collect()  # modules of earlier measurements hold memory
    _drop_tensors_of_collectives()
    assert controls().memory_in_use(0) == 0
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(NUM_PARAMS // 2)]
    for number in range(num_large):
        layers.insert(10 * (number + 1), _Large())
    module = nn.Sequential(*layers).to("late")
    model = wrap(module)
    x = torch.randn(4, WIDTH, device="late", dtype=dtype)
    for _ in range(4):
        cost = _measure_step(model, x)
    return cost


def _drop_tensors_of_collectives() -> None:
    """The backend drops those that nothing waited for in its next call, if they have ended."""
    torch.accelerator.synchronize()
    dist.all_reduce(torch.zeros(1, device="late"))
    torch.accelerator.synchronize()


def _measure_step(model: nn.Module, x: torch.Tensor) -> Cost:
    for param in model.parameters():
        param.grad = None
    torch.accelerator.synchronize()
    controls().reset_counts()
    model(x).sum().backward()
    counts = controls().counts(0)
    synchronisations = controls().num_synchronisations()
    assert counts["fallback"] == {}, counts["fallback"]
    native, collective = counts["native"].values(), counts["collective"].values()
    _drop_tensors_of_collectives()
    return Cost(
        sum(operations for operations, _ in native),
        sum(num_bytes for _, num_bytes in native),
        sum(operations for operations, _ in collective),
        sum(num_bytes for _, num_bytes in collective),
        synchronisations,
        controls().memory_in_use(0),
    )
