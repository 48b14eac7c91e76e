"""Memory of buckets that is dropped while streams still use it. The functions run on every rank."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import late_device
import torch
import torch.distributed as dist
from abort_cases import fail
from capture_cases import captured
from device_models import Pairs, batch, expected_grads, layers, loss_of, pair_up
from device_ranks import controls
from side_stream_group import SideStreamGroup
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ddpx import ReducerDDP

WIDTH = 24
_VALUE = 7.0

HOOKS: dict[str, Callable[[ReducerDDP], None]] = {
    "none": lambda model: None,
    "built in": lambda model: model._register_builtin_comm_hook(
        dist.BuiltinCommHookType.FP16_COMPRESS
    ),
    "fp16": lambda model: model.register_comm_hook(None, default_hooks.fp16_compress_hook),
}


def _synchronize() -> None:
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)


def _slow(part: str, device: str, time_ms: float = 200) -> AbstractContextManager[None]:
    return late_device.slow(part, time_ms) if device == "late" else contextlib.nullcontext()


def _of_the_script(device: str) -> list[torch.Tensor]:
    """Tensors that may get memory of dropped buckets."""
    numels = [4 * WIDTH * WIDTH] * 8 + [WIDTH * WIDTH] * 12
    return [torch.full((numel,), _VALUE, device=device) for numel in numels]


def _unchanged(tensors: list[torch.Tensor]) -> Pairs:
    """The tensors after all work of the devices, with the values that they were made with."""
    if tensors[0].device.type == "late":  # the device makes the values before slow work ends
        _ = [tensor.cpu() for tensor in tensors]
    _synchronize()
    return [(tensor.cpu(), torch.full(tensor.shape, _VALUE)) for tensor in tensors]


def _step(model: ReducerDDP, device: str, step: int) -> None:
    model.zero_grad()
    loss_of(model, batch(device, step, width=WIDTH)).backward()


def a_step_fails_before_hooks_end(device: str, hook: str, **options: Any) -> Pairs:
    """The backward raises on all ranks while the hook's work is queued.

    Returns tensors of the script that were allocated afterwards.
    """
    module = layers(device, width=WIDTH)
    ours = ReducerDDP(module, bucket_cap_mb=0.0001, **options)
    HOOKS[hook](ours)
    for step in range(4):
        _step(ours, device, step)
    ours.zero_grad()
    _synchronize()
    raising = module[1].weight.register_hook(fail)
    with _slow("allreduce", device):
        with contextlib.suppress(ValueError):
            loss_of(ours, batch(device, 4, width=WIDTH)).backward()
        ours.reset()
        ours.zero_grad()
        raising.remove()
        return _unchanged(_of_the_script(device))


def a_result_is_refused_before_hooks_end(device: str, **options: Any) -> Pairs:
    """At the end of the step, the hook's first result is refused. Others are queued."""
    module = layers(device, width=WIDTH)
    ours = ReducerDDP(module, bucket_cap_mb=0.0001, **options)
    refused = [False]

    def hook(state: object, bucket: Any) -> Any:
        future = default_hooks.fp16_compress_hook(None, bucket)
        if not refused[0] or bucket.index() > 0:
            return future
        wrong: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        wrong.set_result(torch.zeros(3))
        return wrong

    hook.__annotations__ = {}
    ours.register_comm_hook(None, hook)
    for step in range(4):
        _step(ours, device, step)
    ours.zero_grad()
    _synchronize()
    refused[0] = True
    with _slow("allreduce", device):
        try:
            loss_of(ours, batch(device, 4, width=WIDTH)).backward()
        except RuntimeError as error:
            assert "communication hook" in str(error)
        else:
            raise AssertionError("the result was accepted")
        ours.zero_grad()
        return _unchanged(_of_the_script(device))


def a_wrapper_is_dropped_before_its_work_ends(device: str, **options: Any) -> Pairs:
    """The module is wrapped on one stream, and trained on another. Buckets are never rebuilt."""
    module = layers(device, width=WIDTH)
    ours = ReducerDDP(module, find_unused_parameters=True, **options)
    main, side = torch.accelerator.current_stream(), torch.Stream(device=device)
    side.wait_stream(main)
    with side:
        for step in range(3):
            _step(ours, device, step)
        expected = expected_grads(module, loss_of, 3)
        ours.zero_grad()
        x = batch(device, 3, width=WIDTH)
    _synchronize()
    if device == "late":
        controls().set_hold(late_device.milliseconds(300))  # the collection takes some 100 ms
    with side:
        loss_of(ours, x).backward()
    del ours
    gc.collect()
    tensors = _of_the_script(device)
    _ = [tensor.cpu() for tensor in tensors]
    with side:
        return pair_up(module, expected)


def local_gradients_in_another_dtype(device: str, **options: Any) -> Pairs:
    """The bucket of two layers is predicted to be unused, but has gradients of a local backward.

    These gradients are in float64, and belong to the stream on which the module was wrapped. They
    are packed and replaced on the stream that called backward.
    """
    module = layers(device, width=WIDTH)
    cap_mb = 2 * WIDTH * WIDTH * 4 / 2**20  # two layers
    unused = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    main, side = torch.accelerator.current_stream(), torch.Stream(device=device)
    side.wait_stream(main)
    with side:
        ours = ReducerDDP(
            module, bucket_cap_mb=cap_mb, reduce_dtype=torch.float64, **unused, **options
        )
    main.wait_stream(side)

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return loss_of(model, x) + loss_of(model[:2], x)

    loss_of(module[:2], batch(device, 0, width=WIDTH)).backward()
    expected = expected_grads(module, forward, 1)
    ours.zero_grad()
    x = batch(device, 1, width=WIDTH)
    with ours.no_sync():
        loss_of(ours, x).backward()
    with _slow("_foreach_copy_", device):
        loss_of(module[:2], x).backward()
        with side:
            tensors = _of_the_script(device)
        return pair_up(module, expected) + _unchanged(tensors)


def a_result_of_a_side_stream(device: str, **options: Any) -> Pairs:
    """The results of the hook belong to a side stream, and their futures do not know a device."""
    module = layers(device, width=WIDTH)
    ours = ReducerDDP(module, bucket_cap_mb=0.0001, **options)
    side = torch.Stream(device=device)

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        main = torch.accelerator.current_stream()
        side.wait_stream(main)
        with side:
            result = bucket.buffer() / dist.get_world_size()
            dist.all_reduce(result)
        main.wait_stream(side)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(result)
        return future

    ours.register_comm_hook(None, hook)
    pairs: Pairs = []
    for step in range(4):
        expected = expected_grads(module, loss_of, step)
        _step(ours, device, step)
        with side:
            tensors = _of_the_script(device)
        pairs += pair_up(module, expected) + _unchanged(tensors)
    return pairs


def a_sum_of_a_side_stream(device: str, **options: Any) -> Pairs:
    """The sums of a process group in Python belong to a side stream."""
    module = layers(device, width=WIDTH)
    side = torch.Stream(device=device)
    group = SideStreamGroup(side)
    ours = ReducerDDP(module, bucket_cap_mb=0.0001, process_group=group, **options)
    pairs: Pairs = []
    for step in range(4):
        expected = expected_grads(module, loss_of, step)
        _step(ours, device, step)
        group.forget_works()
        with side:
            tensors = _of_the_script(device)
        pairs += pair_up(module, expected) + _unchanged(tensors)
    return pairs


def use_exchanged_on_alternating_streams(device: str) -> Pairs:
    """Each step runs on another stream than the step before.

    Returns tensors that the script allocated on the stream of the step before, after each step.
    """
    module = layers(device, width=WIDTH)
    ours = ReducerDDP(module, find_unused_parameters=True)
    for step in range(3):
        _step(ours, device, step)
    streams = [torch.Stream(device=device) for _ in range(2)]
    _synchronize()
    tensors = []
    with _slow("allreduce", device):
        for step in range(3):
            before, now = streams[step % 2], streams[(step + 1) % 2]
            now.wait_stream(before)
            with now:
                _step(ours, device, step)
            with before:
                tensors += [torch.full((len(module),), _VALUE, device=device) for _ in range(4)]
    return _unchanged(tensors)


def allocated_in_a_capture(device: str, **options: Any) -> int:
    """The number of allocations by the backend in a step of lazy buckets that is captured."""
    stream = torch.Stream(device=device)
    with stream:
        module = layers(device)
        ours = ReducerDDP(module, bucket_cap_mb=0.0001, lazy_bucket_allocation=True, **options)
        x = batch(device, 0)
        for _ in range(4):
            ours.zero_grad()
            loss_of(ours, x).backward()
    torch.accelerator.synchronize()
    backend = dist.group.WORLD._get_backend(torch.device(device))
    before = backend.num_allocations
    assert before > 0
    with captured(device, stream):
        ours.zero_grad()
        loss_of(ours, x).backward()
    return int(backend.num_allocations) - before
