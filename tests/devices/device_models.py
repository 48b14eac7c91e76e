"""Models, batches and expected gradients for trainings on a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import late_device
import torch
import torch.distributed as dist
from device_ranks import controls
from torch import nn

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "find unused": {"find_unused_parameters": True},
}

# The results of a case: pairs of a gradient and its expected value.
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def layers(device: str, number: int = 4, width: int = 16) -> nn.Sequential:
    """Layers with the same weights on every rank."""
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(number))).to(device)


def batch(device: str, step: int, rank: int | None = None, width: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(
        100 * step + (dist.get_rank() if rank is None else rank)
    )
    return torch.randn(4, width, generator=generator).to(device)


def expected_grads(
    module: nn.Module, forward: Callable[[nn.Module, torch.Tensor], torch.Tensor], step: int
) -> list[torch.Tensor]:
    """The mean over ranks of the gradients of ``module``. Each rank computes it on CPU."""
    copies = [param.detach().cpu() for param in module.parameters()]
    size = dist.get_world_size()
    total = [torch.zeros_like(copy) for copy in copies]
    for rank in range(size):
        alone = layers("cpu", len(copies), copies[0].shape[0])
        for param, copy in zip(alone.parameters(), copies, strict=True):
            param.data.copy_(copy)
        forward(alone, batch("cpu", step, rank, copies[0].shape[0])).backward()
        for sum_, param in zip(total, alone.parameters(), strict=True):
            assert param.grad is not None
            sum_ += param.grad / size
    return total


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def backward(loss: torch.Tensor) -> None:
    """Runs backward. On the late device, collectives then have time to run before other work."""
    if loss.device.type != "late":
        loss.backward()
        return
    controls().set_hold(late_device.milliseconds(5_000))
    try:
        loss.backward()
    finally:
        time.sleep(0.03)


def pair_up(module: nn.Module, expected: Sequence[torch.Tensor]) -> Pairs:
    """Pairs gradients with expected values.

    Must run on the stream on which the user reads gradients.
    """
    pairs = []
    for param, value in zip(module.parameters(), expected, strict=True):
        assert param.grad is not None
        pairs.append((param.grad.cpu(), value))
    return pairs


def check(per_rank: Sequence[Pairs]) -> None:
    for rank, pairs in enumerate(per_rank):
        check_rank(rank, pairs)


def check_rank(rank: int, pairs: Pairs) -> None:
    for number, (actual, expected) in enumerate(pairs):
        torch.testing.assert_close(
            actual, expected, msg=lambda text, n=number: f"rank {rank}, grad {n}: {text}"
        )


def accumulate_on(param: torch.Tensor, stream: torch.Stream) -> Any:
    """Makes the accumulation of the param's gradient, and its hooks, run on ``stream``.

    The accumulator keeps the stream that is current at its creation. It lives as long as the
    returned object.
    """
    with stream:
        return param.expand_as(param).grad_fn.next_functions[0][0]


def make_grads(module: nn.Module) -> None:
    for param in module.parameters():
        param.grad = torch.zeros_like(param)
