"""Trainings in which ranks use different params. Each also returns the expected results.

The functions run on every rank, on "late" or "cuda".
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import late_device
import torch
import torch.distributed as dist
from device_models import Pairs, backward, batch, layers, loss_of
from torch import nn

from ddpx import _C, ReducerDDP


def expected_of_used(
    module: nn.Module, number_used: Callable[[int, int], int], step: int
) -> list[torch.Tensor | None]:
    """As :func:`expected_grads`, where each rank uses the first ``number_used(step, rank)`` layers.

    None for a parameter that no rank uses.
    """
    size = dist.get_world_size()
    before = [param.detach().cpu() for param in module.parameters()]
    total: list[torch.Tensor | None] = [None] * len(before)
    for rank in range(size):
        alone = layers("cpu", len(before))
        for param, value in zip(alone.parameters(), before, strict=True):
            param.data.copy_(value)
        loss_of(alone[: number_used(step, rank)], batch("cpu", step, rank)).backward()
        for number, param in enumerate(alone.parameters()):
            if param.grad is not None:
                part = param.grad / size
                known = total[number]
                total[number] = part if known is None else known + part
    return total


def used_differently_by_rank(device: str, **options: Any) -> Pairs:
    """With find_unused_parameters. Predictions are wrong in some steps, and are corrected."""
    module = layers(device)
    ours = ReducerDDP(module, find_unused_parameters=True, bucket_cap_mb=0.0001, **options)
    pairs: Pairs = []

    def number_used(step: int, rank: int) -> int:
        return 4 if step in (0, 4) else (2 if step < 3 else (2 + rank % 2 * 2))

    for step in range(7):
        ours.zero_grad()
        total = expected_of_used(module, number_used, step)
        used = module[: number_used(step, dist.get_rank())]
        backward(loss_of(used, batch(device, step)))
        for param, expected in zip(module.parameters(), total, strict=True):
            assert (param.grad is None) == (expected is None), f"step {step}"
            if param.grad is not None and expected is not None:
                pairs.append((param.grad.cpu(), expected))
    return pairs


def use_read_on_another_stream(device: str, **options: Any) -> list[list[int]]:
    """Another thread reads the agreed use of the step before, while a step waits for its hook.

    No rank has read the use in its own step, because every rank used every parameter.
    """
    ours = ReducerDDP(layers(device), find_unused_parameters=True, **options)
    side = torch.Stream(device=device)
    readings: list[list[int]] = []

    def read_and_complete(future: torch.futures.Future[Any], buffer: torch.Tensor) -> None:
        with side:
            while ours.reducer.phase != _C.Phase.FINALIZING:
                time.sleep(0.001)
            while not ours.reducer.used_by_ranks:  # the step before is not waited for yet
                time.sleep(0.001)
            readings.append(ours.reducer.used_by_ranks)
        future.set_result(buffer)

    def keep_local(step: list[int], bucket: dist.GradBucket) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        if step[0] == 0:
            future.set_result(bucket.buffer())
        else:
            threading.Thread(target=read_and_complete, args=(future, bucket.buffer())).start()
        return future

    current = [0]
    ours.register_comm_hook(current, keep_local)
    for step in range(4):
        current[0] = step
        ours.zero_grad()
        loss_of(ours, batch(device, step)).backward()
    return readings


def use_read_while_sums_are_slow(device: str) -> list[list[int]]:
    """On the late device, the sums over ranks take 200 ms."""
    slow = late_device.slow("allreduce", 200) if device == "late" else contextlib.nullcontext()
    with slow:
        return use_read_on_another_stream(device)
