"""What a step costs on a device: operations and bytes, by the late device's counters."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from device_ranks import LATE, Device, run_on
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP
from ddpx.testing import RankPool

NUM_PARAMS = 200
WRAPPERS = {"DDP": DistributedDataParallel, "ReducerDDP": ReducerDDP}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "batched": {"batched_grad_copy": True},
    "batched, views": {"batched_grad_copy": True, "gradient_as_bucket_view": True},
    "find unused": {"find_unused_parameters": True},
}
CHECKED = "views, check_finite()"


@dataclass(frozen=True)
class Cost:
    """Beyond those of the bare module's forward and backward, on one rank of two."""

    operations: int
    kilobytes: float


class _ManyParams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.params = nn.ParameterList(nn.Parameter(torch.ones(64)) for _ in range(NUM_PARAMS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(list(self.params)).sum() * x


def _count(device: Device, wrapper: str | None, setting: str) -> tuple[int, int]:
    options = SETTINGS["views" if setting == CHECKED else setting]
    model: Any = _ManyParams().to(LATE)
    if wrapper is not None:
        model = device.wrapped(WRAPPERS[wrapper], model, bucket_cap_mb=0.01, **options)
    if setting == CHECKED and wrapper == "ReducerDDP":
        model.check_finite()
    x = torch.ones((), device=LATE)
    for number in range(5):
        model.zero_grad()
        if number == 4:
            device.synchronize()
            device.extension.reset_costs()
        model(x).backward()
        device.synchronize()
    operations, num_bytes = device.extension.costs()
    return operations, num_bytes


def measure() -> dict[tuple[str, str], Cost]:
    """The costs by setting and wrapper. Collective calls are not operations."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    costs = {}
    with RankPool(2) as pool:
        bare = run_on(pool, _count, LATE, None, "default")[0]
        for setting in (*SETTINGS, CHECKED):
            for wrapper in WRAPPERS:
                if setting == CHECKED and wrapper == "DDP":
                    continue
                found = run_on(pool, _count, LATE, wrapper, setting)[0]
                operations, num_bytes = (f - b for f, b in zip(found, bare, strict=True))
                costs[setting, wrapper] = Cost(operations, num_bytes / 1024)
    return costs
