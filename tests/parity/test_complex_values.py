"""Signed zeros and infinities of complex gradients have the bits of DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_arguments import skip_unless_ddp_takes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP

PARTS = (-0.0, 0.0, 1.0, -1.0, 5.3, 0.77, float("inf"))
GRAD = torch.tensor([complex(real, imag) for real in PARTS for imag in PARTS])
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "batched": {"batched_grad_copy": True},
    "batched view": {"batched_grad_copy": True, "gradient_as_bucket_view": True},
    "kept": {"zeros": True},
    "kept view": {"zeros": True, "gradient_as_bucket_view": True},
    "kept batched view": {
        "zeros": True,
        "batched_grad_copy": True,
        "gradient_as_bucket_view": True,
    },
    "hook": {"hook": True},
    "hook view": {"hook": True, "gradient_as_bucket_view": True},
    "hook static": {"hook": True, "static_graph": True},
}


class _WithGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(len(GRAD), dtype=torch.complex64))
        self.weight.register_hook(lambda _: GRAD.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


# DDP refuses annotations that are texts.
def _as_it_is(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _bits(
    wrapper: type[nn.Module], zeros: bool = False, hook: bool = False, **options: Any
) -> list[list[int]]:
    module = _WithGrad()
    model = wrapper(module, **options)
    if hook:
        model.register_comm_hook(None, _as_it_is)
    bits = []
    for _ in range(3):
        model.zero_grad(set_to_none=not zeros)
        model(torch.ones(len(GRAD))).abs().sum().backward()
        grad = torch.view_as_real(module.weight.grad.detach().clone())
        bits.append(grad.view(torch.int32).flatten().tolist())
    return bits


def _both(options: dict[str, Any]) -> list[list[list[int]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDPX_FORCE_COMM", "1")  # DDP of one rank takes the product, too
        return [_bits(wrapper, **options) for wrapper in (DistributedDataParallel, ReducerDDP)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_bits_match(ranks, mode, world_size):
    if world_size == 1 and mode == "kept view":
        pytest.skip("DDP divides by 1, which makes NaN of infinity; ddpx leaves the values")
    skip_unless_ddp_takes({name: True for name in MODES[mode] if name not in ("zeros", "hook")})
    for theirs, ours in ranks(world_size).run(_both, MODES[mode]):
        assert ours == theirs


def _sums(options: dict[str, Any]) -> list[list[int]]:
    module = _WithGrad()
    model = ReducerDDP(module, average="sum", **options)
    if dist.get_rank() == 1:
        module.weight.register_hook(torch.zeros_like)  # after the hook of the module
    bits = []
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(len(GRAD))).abs().sum().backward()
        bits.append(torch.view_as_real(module.weight.grad).view(torch.int32).flatten().tolist())
    return bits


@pytest.mark.parametrize("mode", ["default", "view", "static", "batched"])
def test_a_sum_is_not_multiplied(ranks, mode):
    expected = torch.view_as_real(GRAD + 0.0).view(torch.int32).flatten().tolist()
    for bits in ranks(2).run(_sums, MODES[mode]):
        assert bits == [expected] * 3
