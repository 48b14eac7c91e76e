"""Backwards that are captured into a graph, after other work on another stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from device_models import Pairs, batch, expected_grads, layers, loss_of, pair_up
from device_ranks import controls

from ddpx import ReducerDDP

WARM_UP_STEPS = 11  # DDP's documentation asks for this number
BETWEEN = ("step", "local backward", "failed backward", "all before")


@contextlib.contextmanager
def captured(device: str, stream: torch.Stream) -> Iterator[None]:
    """Captures the work on the stream, and runs what was captured."""
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            yield
        graph.replay()
        return
    with stream:
        controls().begin_capture()
        try:
            yield
        finally:
            controls().end_capture()


def captured_after_work_on_another_stream(device: str, between: str, **options: Any) -> Pairs:
    """Warm-up and capture are on one stream. ``between`` runs on another stream.

    "all before": the module is wrapped and warmed up on the other stream, too.
    """
    warm, other = torch.Stream(device=device), torch.Stream(device=device)
    with other if between == "all before" else warm:
        module = layers(device)
        ours = ReducerDDP(module, **options)
        for step in range(WARM_UP_STEPS):
            loss_of(ours, batch(device, step)).backward()
    torch.accelerator.synchronize()
    with other:
        _between(ours, device, between)
    torch.accelerator.synchronize()
    expected = expected_grads(module, loss_of, 99)
    x = batch(device, 99)
    with captured(device, warm):
        ours.zero_grad()
        loss_of(ours, x).backward()
    torch.accelerator.synchronize()
    return pair_up(module, expected)


def _between(model: ReducerDDP, device: str, what: str) -> None:
    context: AbstractContextManager[None] = contextlib.nullcontext()
    if what == "local backward":
        context = model.no_sync()
    with context:
        loss = loss_of(model, batch(device, 98))
        if what != "failed backward":
            loss.backward()
            return
    hook = model.module[0].weight.register_hook(_fail)
    with contextlib.suppress(ZeroDivisionError):
        loss.backward()
    hook.remove()


def _fail(grad: torch.Tensor) -> None:
    raise ZeroDivisionError
