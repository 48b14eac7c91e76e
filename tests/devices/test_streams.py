"""On a device: gradients on several streams, wrapped under another stream, freed memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device_ranks import CUDA, Device, devices, run_on
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpx
from ddpx import ReducerDDP

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "batched": {"batched_grad_copy": True},
    "batched view": {"batched_grad_copy": True, "gradient_as_bucket_view": True},
}
options_of = pytest.mark.parametrize("mode", OPTIONS)
# One bucket of the model below, or several.
CAPS = {"one bucket": 1.0, "several buckets": 0.0005}
caps = pytest.mark.parametrize("cap", CAPS)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))


def _expected(
    model: nn.Module, x: torch.Tensor, before: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """The mean over ranks, by torch's DDP on CPU; with a micro-batch before it, if there is one."""
    wrapped = DistributedDataParallel(copy.deepcopy(model).cpu())
    if before is not None:
        with wrapped.no_sync():
            wrapped(before.cpu()).square().sum().backward()
    wrapped(x.cpu()).square().sum().backward()
    return [param.grad.clone() for param in wrapped.parameters()]  # type: ignore[union-attr]


def _check(device: Device, model: nn.Module, x: torch.Tensor) -> None:
    device.check(model.parameters(), _expected(model, x))


def _on_streams(device: Device, model: nn.Sequential, streams: list[Any], x: torch.Tensor) -> Any:
    """Runs the layers in turn on these streams; the output is for the current stream."""
    current = device.current_stream()
    for stream in streams:
        stream.wait_stream(current)
    before = current
    for number, layer in enumerate(model):
        stream = streams[number % len(streams)]
        stream.wait_stream(before)
        x.record_stream(stream)  # autograd keeps it for backward, and drops it while that runs
        with stream:
            x = layer(x)
        before = stream
    current.wait_stream(before)
    x.record_stream(current)
    return x


def _make_accumulators(device: Device, model: nn.Sequential, num_streams: int) -> list[Any]:
    """A graph that is alive when the module is wrapped: the accumulators of its parameters belong
    to the streams of the layers, in turn."""
    streams = [device.stream() for _ in range(num_streams)]
    for stream in streams:
        stream.wait_stream(device.current_stream())
    kept = []
    for number, layer in enumerate(model):
        with streams[number % num_streams]:
            kept.append(layer(torch.zeros(1, 8, device=device.kind)))
    return [streams, kept]


def gradients_on_several_streams(device: Device, mode: str, cap: str) -> None:
    model = _model().to(device.kind)
    device.synchronize()
    streams, kept = _make_accumulators(device, model, 2)
    ours = device.wrapped(ReducerDDP, model, bucket_cap_mb=CAPS[cap], **OPTIONS[mode])
    for number in range(4):
        torch.manual_seed(10 * number + dist.get_rank())
        x = torch.randn(3, 8, device=device.kind)
        ours.zero_grad()
        output = _on_streams(device, model, streams, x)
        output.square().sum().backward()
        _check(device, model, x)
    del kept


@devices
@caps
@options_of
def test_gradients_on_several_streams(on_device, device, mode, cap):
    """The wrapper is bypassed, so that each layer runs on a stream of its own."""
    run_on(on_device(device, 2), gradients_on_several_streams, device, mode, cap)


def accumulated_on_several_streams(device: Device, mode: str, cap: str) -> None:
    """Autograd adds to gradients on the streams of the layers."""
    model = _model().to(device.kind)
    device.synchronize()
    streams, kept = _make_accumulators(device, model, 2)
    ours = device.wrapped(ReducerDDP, model, bucket_cap_mb=CAPS[cap], **OPTIONS[mode])
    for number in range(4):
        torch.manual_seed(10 * number + dist.get_rank())
        before, x = torch.randn(2, 3, 8, device=device.kind)
        ours.zero_grad()
        with ours.no_sync():
            _on_streams(device, model, streams, before).square().sum().backward()
        _on_streams(device, model, streams, x).square().sum().backward()
        device.check(model.parameters(), _expected(model, x, before))
    del kept


@devices
@caps
@options_of
def test_accumulated_on_several_streams(on_device, device, mode, cap):
    run_on(on_device(device, 2), accumulated_on_several_streams, device, mode, cap)


def wrapped_under_another_stream(device: Device, mode: str, cap: str) -> None:
    model = _model().to(device.kind)
    device.synchronize()
    side = device.stream()
    with side:
        ours = device.wrapped(ReducerDDP, model, bucket_cap_mb=CAPS[cap], **OPTIONS[mode])
    device.current_stream().wait_stream(side)
    for number in range(4):
        torch.manual_seed(10 * number + dist.get_rank())
        x = torch.randn(3, 8, device=device.kind)
        ours.zero_grad()
        ours(x).square().sum().backward()
        _check(device, model, x)


@devices
@caps
@options_of
def test_wrapped_under_another_stream(on_device, device, mode, cap):
    """Gradient hooks then run on that stream, and the step's end on the caller's."""
    run_on(on_device(device, 2), wrapped_under_another_stream, device, mode, cap)


def backward_on_a_side_stream(device: Device, mode: str, cap: str) -> None:
    model = _model().to(device.kind)
    ours = device.wrapped(ReducerDDP, model, bucket_cap_mb=CAPS[cap], **OPTIONS[mode])
    side = device.stream()
    for number in range(4):
        torch.manual_seed(10 * number + dist.get_rank())
        x = torch.randn(3, 8, device=device.kind)
        side.wait_stream(device.current_stream())
        with side:
            ours.zero_grad()
            ours(x).square().sum().backward()
        device.current_stream().wait_stream(side)
        _check(device, model, x)


@devices
@caps
@options_of
def test_backward_on_a_side_stream(on_device, device, mode, cap):
    run_on(on_device(device, 2), backward_on_a_side_stream, device, mode, cap)


def loss_that_reaches_no_parameter(device: Device, mode: str, cap: str) -> None:
    """Rank 1 takes part with zeros, on the stream on which its output lies."""

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = _model()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.inner(x), x * 2

    model = Beside().to(device.kind)
    ours = device.wrapped(ReducerDDP, model, bucket_cap_mb=CAPS[cap], **OPTIONS[mode])
    side = device.stream()
    for number in range(4):
        torch.manual_seed(10 * number)
        x = torch.randn(3, 8, device=device.kind, requires_grad=True)
        side.wait_stream(device.current_stream())
        with side:
            ours.zero_grad()
            output, beside = ours(x)
            skips = number > 1 and dist.get_rank() == 1
            (beside if skips else output).square().sum().backward()
        device.current_stream().wait_stream(side)
        expected = copy.deepcopy(model.inner).cpu()
        expected.zero_grad()
        expected(x.detach().cpu()).square().sum().backward()
        users = dist.get_world_size() - (number > 1)
        share = users / dist.get_world_size()  # 1 or a half: exact
        device.check(model.inner.parameters(), [p.grad * share for p in expected.parameters()])


@devices
@caps
def test_loss_that_reaches_no_parameter(on_device, device, cap):
    run_on(on_device(device, 2), loss_that_reaches_no_parameter, device, "unused", cap)


def _two_devices(device: Device, mode: str, cap: str) -> None:
    if device.kind == CUDA and torch.cuda.device_count() < 2:
        return
    model = _model()
    places = [torch.device(device.kind, index) for index in (0, 1)]
    for number, layer in enumerate(model):
        layer.to(places[number // 3])

    class Moving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number, layer in enumerate(self.layers):
                x = layer(x.to(places[number // 3]))
            return x

    moving = Moving()
    ours = device.wrapped(ReducerDDP, moving, bucket_cap_mb=CAPS[cap], **OPTIONS[mode])
    plain = _model()
    for number in range(4):
        torch.manual_seed(10 * number + dist.get_rank())
        x = torch.randn(3, 8)
        ours.zero_grad()
        ours(x.to(places[0])).square().sum().backward()
        device.check(model.parameters(), _expected(plain, x))


@devices
@caps
@options_of
def test_two_devices_in_one_module(on_device, device, mode, cap):
    run_on(on_device(device, 2), _two_devices, device, mode, cap)


def _replaced_gradients(device: Device, mode: str) -> None:
    """A hook of a later parameter replaces an earlier gradient: the one that arrived counts."""
    model = _model().to(device.kind)
    ours = device.wrapped(ReducerDDP, model, **OPTIONS[mode])
    last = model[-1]

    def replace(_: torch.Tensor) -> None:
        last.weight.grad = torch.full_like(last.weight, 1000.0)
        last.bias.grad = None

    for number in range(4):
        torch.manual_seed(10 * number + dist.get_rank())
        x = torch.randn(3, 8, device=device.kind)
        ours.zero_grad()
        handle = model[0].weight.register_hook(replace) if number > 1 else None
        ours(x).square().sum().backward()
        if handle is not None:
            handle.remove()
        _check(device, model, x)


@devices
@options_of
def test_replaced_gradients(on_device, device, mode):
    run_on(on_device(device, 2), _replaced_gradients, device, mode)


def _captured(device: Device, mode: str) -> None:
    model = _model().to(device.kind)
    ours = device.wrapped(ReducerDDP, model, **OPTIONS[mode])
    if mode != "unused":
        ours.check_finite()
    x = torch.randn(3, 8, device=device.kind)
    loss = ours(x).square().sum()
    device.extension.set_capturing(True)
    try:
        with pytest.raises(RuntimeError, match="captured into a CUDA graph"):
            loss.backward()
    finally:
        device.extension.set_capturing(False)
    ours.zero_grad()
    ours(x).square().sum().backward()


@pytest.mark.parametrize("mode", ["default", "unused"])
def test_what_reads_on_the_host_is_refused_under_capture(on_device, mode):
    """On the late device, which says that it captures; a torch before 2.12 cannot tell."""
    run_on(on_device("late", 2), _captured, "late", mode)


def _recorded(device: Device) -> None:
    model = _model().to(device.kind)
    ours = device.wrapped(ReducerDDP, model, bucket_cap_mb=0.0005)
    x = torch.randn(3, 8, device=device.kind)
    for _ in range(2):
        ours(x).square().sum().backward()
    with ddpx.record(ours) as timeline:
        for _ in range(3):
            ours(x).square().sum().backward()
    assert len(timeline.steps) == 3
    for step in timeline.steps:
        for rank_step in step.ranks.values():
            for bucket in rank_step.buckets:
                assert bucket is not None
                assert bucket.ready <= bucket.launched <= bucket.completed <= bucket.written_back


@devices
def test_a_recording_has_the_devices_times(on_device, device):
    run_on(on_device(device, 2), _recorded, device)
