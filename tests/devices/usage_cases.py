"""Trainings on a device, for comparison with the same trainings on CPU. They run on every rank."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Collection
from typing import Any

import late_device
import torch
import torch.distributed as dist
from capture_cases import captured
from device_models import accumulate_on, backward, batch, layers, loss_of
from device_ranks import controls, keep_busy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

import ddpx
from ddpx import _C, ReducerDDP
from ddpx.timeline import Timeline

State = list[torch.Tensor]


def train(model: nn.Module, device: str, num_steps: int = 4) -> State:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(num_steps):
        optimizer.zero_grad()
        backward(loss_of(model, batch(device, step)))
        optimizer.step()
    return state_of(model)


def state_of(model: nn.Module) -> State:
    return [tensor.detach().cpu() for tensor in model.state_dict().values()]


class _OnTwoDevices(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        stem = layers(device)
        self.devices = ["cpu", "cpu"] if device == "cpu" else [f"{device}:0", f"{device}:1"]
        self.first = stem[:2].to(self.devices[0])
        self.second = stem[2:].to(self.devices[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x.to(self.devices[0])).to(self.devices[1]))


def backwards_in_inference_mode(device: str, **options: Any) -> State:
    ours = ReducerDDP(layers(device), bucket_cap_mb=0.001, **options)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(ours, batch(device, step))
        with torch.inference_mode() if step % 2 else contextlib.nullcontext():
            backward(loss)
        optimizer.step()
    return state_of(ours)


def on_two_devices(device: str, **options: Any) -> State:
    ours = ReducerDDP(_OnTwoDevices(device), **options)
    return train(ours, device)


class _CheckpointOnTwoDevices(_OnTwoDevices):
    """The checkpoint's own backward begins on one device and ends on the thread of the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first[0](x.to(self.devices[0]))
        return checkpoint(self._rest, x, use_reentrant=True)

    def _rest(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first[1](x).to(self.devices[1]))


def checkpoint_on_two_devices(device: str, **options: Any) -> State:
    """The forward bypasses the wrapper, so that the start of backward is not known."""
    ours = ReducerDDP(_CheckpointOnTwoDevices(device), **options)
    state = train(ours.module, device)
    assert ours.reducer.num_steps == 4
    return state


def optimizers_in_backward(device: str, numbers: Collection[int], **options: Any) -> State:
    """Optimizers of the layers with these numbers step in backward, the others afterwards."""
    module = layers(device)
    inside = [module[number].weight for number in numbers]
    _apply_optimizer_in_backward(torch.optim.SGD, inside, {"lr": 0.1})
    ours = ReducerDDP(module, bucket_cap_mb=0.0001, **options)
    outside = [layer.weight for number, layer in enumerate(module) if number not in numbers]
    optimizer = torch.optim.SGD(outside, lr=0.1) if outside else None
    for step in range(5):
        backward(loss_of(ours, batch(device, step)))
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return state_of(module)


def _shift(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Any]:
    """The hook's continuation runs its own work on the stream that the future gives."""
    summed = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
    return summed.then(lambda done: done.value()[0].div(dist.get_world_size()) + 0.01)


HOOKS = {
    "all-reduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "a continuation": _shift,
}
BUILTIN_HOOKS = {
    "built-in all-reduce": dist.BuiltinCommHookType.ALLREDUCE,
    "built-in fp16": dist.BuiltinCommHookType.FP16_COMPRESS,
}


def with_a_hook(device: str, name: str, **options: Any) -> State:
    ours = ReducerDDP(layers(device), bucket_cap_mb=0.0015, **options)
    if name in HOOKS:
        ours.register_comm_hook(dist.group.WORLD, HOOKS[name])
    else:
        ours._register_builtin_comm_hook(BUILTIN_HOOKS[name])
    return train(ours, device)


def uneven_inputs(device: str, **options: Any) -> State:
    ours = ReducerDDP(layers(device), **options)
    with ours.join():
        train(ours, device, 3 + dist.get_rank())
    return state_of(ours)


def in_mixed_precision(device: str, **options: Any) -> State:
    precision = _MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16
    )
    ours = ReducerDDP(layers(device), mixed_precision=precision, **options)
    return train(ours, device)


def in_sixteen_bits(device: str, dtypes: dict[str, torch.dtype], **options: Any) -> State:
    """Gradients of two steps with three micro-steps each, summed in float32."""
    ours = ReducerDDP(layers(device).to(torch.bfloat16), bucket_cap_mb=0.0015, **options, **dtypes)
    grads = []
    for step in range(2):
        ours.zero_grad()
        for micro_step in range(3):
            ours.require_backward_grad_sync = micro_step == 2
            x = batch(device, 3 * step + micro_step).to(torch.bfloat16)
            backward(loss_of(ours, x))
        grads += [param.grad.cpu() for param in ours.parameters()]
    return grads


# Half a unit in the last place of bfloat16, plus a small float32 rounding error.
_ONE_ROUNDING = 2.0**-8 * (1 + 2.0**-6)
_FLOAT32 = 2.0**-21


def sums_against_float64(
    device: str, dtypes: dict[str, torch.dtype], num_micro_steps: int, **options: Any
) -> None:
    """The error of sums over micro-steps and ranks equals that of one rounding at the end."""
    module = layers(device).to(torch.bfloat16)
    plain = copy.deepcopy(module)
    params = list(plain.parameters())
    ours = ReducerDDP(module, bucket_cap_mb=0.0015, **options, **dtypes)
    for step in range(2):
        ours.zero_grad()
        totals = [torch.zeros_like(param, dtype=torch.float64) for param in params]
        for micro_step in range(num_micro_steps):
            x = batch(device, num_micro_steps * step + micro_step).to(torch.bfloat16)
            for total, grad in zip(
                totals, torch.autograd.grad(loss_of(plain, x), params), strict=True
            ):
                total += grad.double()
            ours.require_backward_grad_sync = micro_step == num_micro_steps - 1
            if ours.require_backward_grad_sync:
                backward(loss_of(ours, x))
            else:
                loss_of(ours, x).backward()
        for param, total in zip(ours.parameters(), totals, strict=True):
            expected = total.cpu()
            dist.all_reduce(expected)
            expected /= dist.get_world_size()
            assert param.grad is not None
            rounds = "grad_dtype" not in dtypes
            assert param.grad.dtype is (torch.bfloat16 if rounds else torch.float32)
            error = (param.grad.cpu().double() - expected).abs()
            # Sums cancel, so the error of float32 is relative to the summands.
            allowed = (_ONE_ROUNDING if rounds else 0) * expected.abs()
            allowed += _FLOAT32 * num_micro_steps
            assert (error <= allowed).all(), (step, (error - allowed).max())


def steps_without_synchronisation(device: str, **options: Any) -> None:
    module = layers(device, 8)
    ours = ReducerDDP(module, **options)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, foreach=True)
    x = batch(device, 0)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(ours, x).backward()
        optimizer.step()

    for _ in range(3):  # agreeing on buckets may synchronize
        step()
    torch.accelerator.synchronize()
    if device == "late":
        controls().reset_counts()
        for _ in range(5):
            step()
        assert controls().num_synchronisations() == 0
        assert controls().counts(0)["fallback"] == {}
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


class _Busy(torch.autograd.Function):
    """Keeps the device busy in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, time_ms: int) -> torch.Tensor:
        ctx.time_ms = time_ms
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        keep_busy(grads[0].device.type, ctx.time_ms)
        return grads[0], None


class _BusyLayer(nn.Module):
    def __init__(self, time_ms: int) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.time_ms = time_ms

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(_Busy.apply(x, self.time_ms))


def recorded_busy_layers(device: str, time_ms: int) -> tuple[Timeline, float]:
    """Returns also the time in ns for which each layer keeps the device busy."""
    if device == "late":
        controls().set_hold(late_device.milliseconds(0))
    begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    keep_busy(device, time_ms)
    begin.record()
    keep_busy(device, time_ms)
    end.record()
    torch.accelerator.synchronize()
    torch.manual_seed(0)
    module = nn.Sequential(*(_BusyLayer(time_ms) for _ in range(4))).to(device)
    model = ReducerDDP(module, bucket_cap_mb=0.0001)
    x = torch.randn(16, 64, device=device, requires_grad=True)
    for _ in range(3):
        model(x).sum().backward()
    with ddpx.record(model) as timeline:
        for _ in range(4):
            model(x).sum().backward()
    return timeline, 1e6 * begin.elapsed_time(end)


def recorded_on_two_streams(device: str, time_ms: int) -> Timeline:
    """The gradient of the last layer, which arrives first, takes long on a stream of its own."""
    if device == "late":
        controls().set_hold(late_device.milliseconds(0))
    module = layers(device)
    side, main = torch.Stream(device=device), torch.accelerator.current_stream()
    weight = list(module.parameters())[-1]
    node = accumulate_on(weight, side)
    weight.register_hook(lambda grad: keep_busy(device, time_ms))
    model = ReducerDDP(module)
    for _ in range(2):
        loss_of(model, batch(device, 0)).backward()
        side.wait_stream(main)
    with ddpx.record(model) as timeline:
        for step in range(2):
            loss_of(model, batch(device, step)).backward()
            side.wait_stream(main)
    assert node is not None  # keeps the accumulator, and thus its stream
    return timeline


def unequal_at_first(device: str) -> State:
    """Ranks construct different modules.

    Rank 0's parameters are used, and its buffers at each forward.
    """
    torch.manual_seed(dist.get_rank())
    module = _WithBuffer().to(device)
    ours = ReducerDDP(module)
    states = state_of(module)
    for step in range(3):
        if dist.get_rank() > 0:
            module.shift.fill_(step)
        backward(loss_of(ours, batch(device, step)))
        states += state_of(module)
        ours.zero_grad()
    return states


def errors_under_capture(options: dict[str, Any], check_finite: bool) -> list[str]:
    """Error texts of five backwards.

    The fourth one is captured, without its forward.
    """
    stream = torch.Stream(device="late")
    texts = []
    with stream:
        ours = ReducerDDP(layers("late"), **options)
        ours.set_check_finite(check_finite)
        for step in range(5):
            ours.zero_grad()
            loss = loss_of(ours, batch("late", step))
            capture = captured("late", stream) if step == 3 else contextlib.nullcontext()
            try:
                with capture:
                    loss.backward()
                texts.append("")
            except RuntimeError as error:
                texts.append(str(error))
    return texts


class _WithBuffer(nn.Module):
    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("shift", torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.shift


def error_of_recording_while_busy(device: str) -> float:
    """The error in ns of the times of a recording that begins while the device is busy.

    Such a recording is one that an environment variable starts. ``ddpx.record`` communicates first,
    which waits for the device.
    """
    keep_busy(device, 100)
    return _C.Recording(64, torch.device(device, 0), 0).device_error_ns


def recorded_late(device: str, late_ranks: Collection[int]) -> Timeline:
    """The devices of ``late_ranks`` hold work until something waits for it.

    Other devices do not.
    """
    model = ReducerDDP(layers(device))
    for step in range(3):
        loss_of(model, batch(device, step)).backward()
    torch.accelerator.synchronize()
    hold_ms = 5_000 if dist.get_rank() in late_ranks else 0
    controls().set_hold(late_device.milliseconds(hold_ms))
    with ddpx.record(model) as timeline:
        time.sleep(0.3)
        for step in range(3):
            loss_of(model, batch(device, step)).backward()
    return timeline
