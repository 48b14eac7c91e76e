"""Captures that ddpx refuses, and captures that fail. The wrapper then trains on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from capture_cases import captured
from device_models import Pairs, batch, expected_grads, layers, loss_of, pair_up

from ddpx import ReducerDDP

# Failures within a captured step.
FAILURES = (
    "error after forward",
    "host read after forward",
    "error in backward",
    "host read in backward",
    "host read after backward",
)
_kept: list[object] = []


def refused(device: str, by: str, steps_before: int = 4, **options: Any) -> tuple[str, Pairs]:
    """A forward under capture that raises. Returns the error's text, and results of later steps.

    ``by``: "join", "check_finite", or "" if the options or the number of steps are the reason.
    The capture stays valid, so its end raises nothing: the error is that of the forward.
    """
    stream = torch.Stream(device=device)
    with stream:
        module = layers(device)
        ours = ReducerDDP(module, **options)
        _train(ours, device, steps_before)
        if by == "check_finite":
            ours.set_check_finite()
    torch.accelerator.synchronize()
    x = batch(device, 99)
    text = ""
    try:
        with captured(device, stream), ours.join() if by == "join" else contextlib.nullcontext():
            ours(x)
    except RuntimeError as error:
        text = str(error)
    if by == "check_finite":
        ours.set_check_finite(False)
    pairs = _pairs_of_eager_steps(ours, device, stream)
    if not options.get("find_unused_parameters"):
        pairs += _pairs_of_capture(ours, device, stream)
    return text, pairs


def failed(device: str, failure: str, **options: Any) -> tuple[str, Pairs]:
    """A step fails under capture. Returns the type of the error, and results of later steps."""
    stream = torch.Stream(device=device)
    with stream:
        module = layers(device)
        ours = ReducerDDP(module, bucket_cap_mb=0.0015, **options)
        _train(ours, device, 4)
    torch.accelerator.synchronize()
    x = batch(device, 99)
    raised = ""
    with _current_stream_restored():
        try:
            with _captured(device, stream):
                ours.zero_grad()
                _fail(ours, x, failure)
        except Exception as error:  # CUDA's error, or that of the step
            raised = type(error).__name__
    pairs = _pairs_of_eager_steps(ours, device, stream)
    return raised, pairs + _pairs_of_capture(ours, device, stream)


def calls_of_a_failed_capture() -> tuple[int, int]:
    """On the late device: the collectives and allocations that follow an error in backward."""
    backend: Any = dist.group.WORLD._get_backend(torch.device("late"))  # type: ignore[union-attr]
    stream = torch.Stream(device="late")
    with stream:
        module = layers("late")
        ours = ReducerDDP(module, bucket_cap_mb=0.0015)
        _train(ours, "late", 4)
    torch.accelerator.synchronize()
    x = batch("late", 99)
    numbers = []

    def count_and_fail(grad: torch.Tensor) -> None:
        numbers.append((backend.num_calls, backend.num_allocations))
        raise ZeroDivisionError

    # The gradient of the second layer comes when only the bucket of the first layer is missing.
    hook = module[0].weight.register_post_accumulate_grad_hook(count_and_fail)
    with contextlib.suppress(ZeroDivisionError), captured("late", stream):
        try:
            loss_of(ours, x).backward()
        finally:
            ours.set_check_finite(False)  # waits until the reducer knows of the abort
    hook.remove()
    calls, allocations = numbers[0]
    return backend.num_calls - calls, backend.num_allocations - allocations


def _fail(ours: ReducerDDP, x: torch.Tensor, failure: str) -> None:
    loss = loss_of(ours, x)
    if failure == "error after forward":
        raise ZeroDivisionError
    if failure == "host read after forward":
        loss.item()
    actions: dict[str, Callable[[torch.Tensor], object]] = {
        "error in backward": lambda grad: 1 / 0,
        "host read in backward": lambda grad: grad.sum().item(),
    }
    if failure in actions:
        action = actions[failure]
        hook = ours.module[0].weight.register_hook(lambda grad: action(grad) and None)
        try:
            loss.backward()
        finally:
            hook.remove()
            ours.set_check_finite(False)  # waits until the reducer knows of the abort
        return
    loss.backward()
    loss.item()


@contextlib.contextmanager
def _captured(device: str, stream: torch.Stream) -> Iterator[None]:
    """As :func:`captured`, without a replay. The graph object lives on.

    torch's allocator may refer to the object of a failed capture.
    """
    if device == "late":
        with captured(device, stream):
            yield
        return
    graph = torch.cuda.CUDAGraph()
    _kept.append(graph)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        yield


@contextlib.contextmanager
def _current_stream_restored() -> Iterator[None]:
    """torch.cuda.graph leaves its stream current if the end of the capture raises."""
    before = torch.accelerator.current_stream()
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def _train(ours: ReducerDDP, device: str, num_steps: int) -> None:
    for step in range(num_steps):
        ours.zero_grad()
        loss_of(ours, batch(device, step)).backward()


def _pairs_of_eager_steps(ours: ReducerDDP, device: str, stream: torch.Stream) -> Pairs:
    pairs: Pairs = []
    with stream:
        for step in range(4):
            expected = expected_grads(ours.module, loss_of, step)
            ours.zero_grad()
            loss_of(ours, batch(device, step)).backward()
            pairs += pair_up(ours.module, expected)
    torch.accelerator.synchronize()
    return pairs


def _pairs_of_capture(ours: ReducerDDP, device: str, stream: torch.Stream) -> Pairs:
    expected = expected_grads(ours.module, loss_of, 98)
    x = batch(device, 98)
    with captured(device, stream):
        ours.zero_grad()
        loss_of(ours, x).backward()
    torch.accelerator.synchronize()
    return pair_up(ours.module, expected)
