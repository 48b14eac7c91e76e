"""On a device: the bits of torch's DDP on CPU, in every mode, with work as late as waits allow."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device_ranks import CUDA, Device, devices, run_on
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static view": {"static_graph": True, "gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "unused view": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "batched": {"batched_grad_copy": True},
    "batched view": {"batched_grad_copy": True, "gradient_as_bucket_view": True},
}
NUM_STEPS = 5


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return self.last(self.layers(x))


class Tied(nn.Module):
    """One weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Branches(nn.Module):
    """Which branch is used differs by rank and by step."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        branch = self.branches[(number + dist.get_rank()) % 3]
        return self.last(torch.tanh(branch(x)))


MODELS: dict[str, Callable[[], nn.Module]] = {"MLP": Mlp, "tied": Tied, "branches": Branches}
# How gradients are zeroed before a step; "keep": they are added to.
STYLES = {"none": True, "zeros": False, "keep": None}


def _train(device: Device, model: str, options: dict[str, Any], style: str, micro: int) -> None:
    torch.manual_seed(0)
    module = MODELS[model]()
    options = {"bucket_cap_mb": 0.0005, **options}
    expected = DistributedDataParallel(copy.deepcopy(module), **options)
    ours = device.wrapped(ReducerDDP, module.to(device.kind), **options)
    for number in range(NUM_STEPS):
        for wrapped, place in ((expected, "cpu"), (ours, device.kind)):
            torch.manual_seed(100 * number + dist.get_rank())
            if STYLES[style] is not None:
                wrapped.zero_grad(set_to_none=STYLES[style])
            with wrapped.no_sync():
                for _ in range(micro):
                    wrapped(torch.randn(3, 8).to(place), number).square().sum().backward()
            wrapped(torch.randn(3, 8).to(place), number).square().sum().backward()
        for left, right in zip(ours.parameters(), expected.parameters(), strict=True):
            assert (left.grad is None) == (right.grad is None), f"step {number}"
            if left.grad is not None:
                _assert_equal(left.grad, right.grad, exactly=device.kind != CUDA)


def _assert_equal(left: torch.Tensor, right: torch.Tensor, exactly: bool) -> None:
    if exactly:
        assert torch.equal(left.cpu(), right), (left.cpu() - right).abs().max()
    else:
        torch.testing.assert_close(left.cpu(), right)  # another device multiplies in other orders


@devices
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("style", STYLES)
def test_bits_match(on_device, device, world_size, model, mode, style):
    if model == "branches" and "unused" not in mode:
        pytest.skip("use differs by rank: for find_unused_parameters alone")
    run_on(on_device(device, world_size), _train, device, model, MODES[mode], style, 0)


@devices
@pytest.mark.parametrize("mode", MODES)
def test_accumulated_gradients(on_device, device, mode):
    run_on(on_device(device, 2), _train, device, "MLP", MODES[mode], "none", 2)
