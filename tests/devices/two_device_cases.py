"""What is known of a step of a module on two devices. The functions run on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import late_device
import torch
import torch.distributed as dist
from device_models import Pairs, backward, batch, layers, loss_of, pair_up
from device_ranks import controls, keep_busy
from torch import nn

import ddpx

BUSY_MS = 1000
SLOW_MS = 300.0


class _Net(nn.Module):
    """The first parameters are on the first device, and get their gradients first."""

    def __init__(self, device: str) -> None:
        super().__init__()
        stem = layers(device)
        self.devices = [torch.device(device, index) for index in (0, 1)]
        self.top = stem[2:].to(self.devices[0])
        self.bottom = stem[:2].to(self.devices[1])

    def forward(self, x: torch.Tensor, top_alone: bool = False) -> torch.Tensor:
        if not top_alone:
            x = self.bottom(x.to(self.devices[1])).to(self.devices[0])
        return self.top(x)


def _backward_with_a_busy_second_device(device: str) -> tuple[ddpx.ReducerDDP, torch.Stream]:
    """Returns the stream of the second device, too."""
    model = ddpx.ReducerDDP(_Net(device))
    for step in range(3):
        loss_of(model, batch(device, step)).backward()
    streams = [torch.accelerator.current_stream(name) for name in model.module.devices]
    loss = loss_of(model, batch(device, 3))
    for stream in streams:
        stream.synchronize()
    time.sleep(0.3)  # the steps are counted ten times a second
    weight = next(model.module.bottom.parameters())
    hook = weight.register_hook(lambda _: keep_busy(device, BUSY_MS))
    loss.backward()
    hook.remove()
    return model, streams[1]


def wait_for_gradients(device: str) -> bool:
    """Returns whether the second device has done the step after the wait."""
    model, stream = _backward_with_a_busy_second_device(device)
    ddpx.wait_for_gradients(model)
    return stream.query()


def count_steps(device: str) -> tuple[int, int]:
    """The number of steps whose averages are known to be right: before and after the last."""
    model, stream = _backward_with_a_busy_second_device(device)
    time.sleep(0.3)
    before = model.reducer.num_steps_averaged
    assert not stream.query(), "the device was not busy for long enough"
    stream.synchronize()
    _await(lambda: model.reducer.num_steps_averaged == 4)
    return before, model.reducer.num_steps_averaged


def leave_the_second_device_unused(device: str, **options: Any) -> Pairs:
    """On side streams, a step averages what earlier work has made of unused gradients.

    Returns the gradients on the second device.
    """
    net = _Net(device)
    streams = [torch.Stream(device=name) for name in net.devices]
    for stream, name in zip(streams, net.devices, strict=True):
        stream.wait_stream(torch.accelerator.current_stream(name))
    with streams[1], streams[0]:
        model = ddpx.ReducerDDP(net, find_unused_parameters=True, **options)
        pairs: Pairs = []
        for step in range(3):
            model.zero_grad()
            with model.no_sync():
                loss_of(model, batch(device, step)).backward()
            grads = [param.grad for param in net.bottom.parameters() if param.grad is not None]
            expected = [3 * grad.cpu() for grad in grads]
            for value in expected:
                dist.all_reduce(value)
            x = batch(device, step)
            if device == "late":
                controls().set_hold(late_device.milliseconds(5_000))
            with streams[1]:
                torch._foreach_mul_(grads, 3)
            backward(model(x, top_alone=True).square().mean())
            pairs += pair_up(net.bottom, [value / dist.get_world_size() for value in expected])
    return pairs


def record(device: str) -> tuple[float, float]:
    """Seconds until the second device has its last gradient: without and with a recording."""
    model = ddpx.ReducerDDP(_Net(device), bucket_cap_mb=0.0001)
    for step in range(3):
        loss_of(model, batch(device, step)).backward()
    with late_device.slow("allreduce", SLOW_MS):
        alone_s = _time_of_the_last_gradient(model, device)
        with ddpx.record(model):
            recorded_s = _time_of_the_last_gradient(model, device)
    return alone_s, recorded_s


def _time_of_the_last_gradient(model: ddpx.ReducerDDP, device: str) -> float:
    loss = loss_of(model, batch(device, 3))
    for name in model.module.devices:
        torch.accelerator.current_stream(name).synchronize()
    ends_s: list[float] = []

    def record(_: torch.Tensor) -> None:
        torch.accelerator.current_stream(model.module.devices[1]).synchronize()
        ends_s.append(time.monotonic())

    hook = next(model.module.bottom.parameters()).register_hook(record)
    start_s = time.monotonic()
    loss.backward()
    hook.remove()
    ddpx.wait_for_gradients(model)
    return ends_s[0] - start_s


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
