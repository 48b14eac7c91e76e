"""Trains one model under torch's DDP and under ReducerDDP, with the same additions of a test."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from replicated import Replicated
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP
from ddpx.testing import compare_traces, record_training

# an instance of either class, whose methods are the same; torch annotates few of them
Wrapper = Any
# `make test-replicate` runs the same tests with the other front.
OURS = Replicated if os.environ.get("DDPX_TEST_FRONT") == "replicate" else ReducerDDP
WRAPPERS: tuple[Callable[..., Wrapper], ...] = (DistributedDataParallel, OURS)
WORLD_SIZES = (2, 3)

# Small, so that the models below have several buckets.
SMALL_CAP = {"bucket_cap_mb": 0.002}


class Mlp(nn.Module):
    """Three layers. ``wide`` layers are large enough for compression."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(16, 24, dtype=dtype)
        self.second = nn.Linear(24, 24, dtype=dtype)
        self.third = nn.Linear(24, 4, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Normed(nn.Module):
    """A model whose buffers differ between ranks after each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.norm(x))


def mlp_step(model: nn.Module, number: int = 0) -> None:
    """Forward and backward on random inputs. Inputs differ between ranks if the seed does."""
    model(torch.randn(6, 16)).square().mean().backward()


def assert_trains_alike(
    build: Callable[[], nn.Module],
    wrap: Callable[[Callable[..., Wrapper], nn.Module], Wrapper],
    step: Callable[[nn.Module, int], None],
    **training: Any,
) -> None:
    """Checks that gradients, parameters and buffers of all steps are equal, bit for bit.

    Args:
        wrap: Wraps a module in the given class, and sets up the wrapper.
        training: As for ``ddpx.testing.record_training``.
    """
    traces = [
        record_training(build, lambda module, cls=cls: wrap(cls, module), step, **training)  # type: ignore[misc]
        for cls in WRAPPERS
    ]
    comparison = compare_traces(*traces)
    assert comparison.num_tensors > 0
    comparison.raise_if_different()


def assert_same_on_all_ranks(*tensors: torch.Tensor | None) -> None:
    """Checks that every rank has the same bits."""
    for tensor in tensors:
        assert tensor is not None
        reference = tensor.detach().clone()
        dist.broadcast(reference, 0)
        assert torch.equal(reference, tensor.detach())


def grads_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Copies of the gradients, by name without the wrapper's prefix."""
    return {
        name.removeprefix("module."): None if param.grad is None else param.grad.clone()
        for name, param in model.named_parameters()
    }
