"""Captures a step into a CUDA graph, and measures its success, its gradients and its time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

# DDP's documentation requires 11 steps before a capture.
_WARM_UP = 11
_TIMED_STEPS = 20


class _Repeat:
    """Replaces a graph without CUDA, so that all other code can run."""

    def __init__(self, step: Callable[[], object]) -> None:
        self.replay = step


def _captured(step: Callable[[], object], device: str) -> torch.cuda.CUDAGraph | _Repeat:
    if device == "cpu":
        return _Repeat(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def _median_ms(step: Callable[[], object], device: str) -> float:
    times = []
    for _ in range(_TIMED_STEPS):
        start = time.perf_counter()
        step()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return round(statistics.median(times), 4)


def capture(
    module: nn.Module, x: torch.Tensor, wrap: Callable[[nn.Module], nn.Module], device: str
) -> dict[str, object]:
    """Wraps, warms up, captures and replays. Raises the error of a step, a capture or a replay."""
    side = torch.cuda.Stream() if device != "cpu" else None
    with torch.cuda.stream(side):  # a stream of None has no effect
        model = wrap(module)

        def step() -> None:
            model.zero_grad()
            model(x).float().square().mean().backward()

        for _ in range(_WARM_UP):
            step()
        expected = [_copy(param.grad) for param in model.parameters()]
    if device != "cpu":
        torch.cuda.synchronize()
    eager_ms = _median_ms(step, device)
    graph = _captured(step, device)
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param.grad.fill_(float("nan"))  # shows what a replay does not write
    graph.replay()
    if device != "cpu":
        torch.cuda.synchronize()
    found = [_copy(param.grad) for param in model.parameters()]
    differences = [
        (a - b).abs().max().item() if a is not None and b is not None else float(a is not b)
        for a, b in zip(found, expected, strict=True)
    ]
    return {
        "captured": True,
        "identical": all(difference == 0 for difference in differences),
        "largest_difference": max((d for d in differences if d == d), default=0.0),
        "not_written": sum(difference != difference for difference in differences),
        "eager_ms": eager_ms,
        "replay_ms": _median_ms(graph.replay, device),
    }


def _copy(grad: torch.Tensor | None) -> torch.Tensor | None:
    return None if grad is None else grad.detach().clone()
