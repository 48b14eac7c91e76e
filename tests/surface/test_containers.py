"""A wrapper over a container whose forward never runs: its layers act within another model.

LoRA networks are of this kind. Under DDP, such backwards stay local, and scripts average the
gradients by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from both_wrappers import SMALL_CAP, WRAPPERS, Mlp, Wrapper
from slow_ddp import assert_in_step
from torch import nn

from ddpx import ReducerDDP

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "find unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


class Adapters(nn.Module):
    """Low-rank adapters of all linear layers of a model. This module has no forward."""

    def __init__(self, model: nn.Module, unused: int = 1) -> None:
        super().__init__()
        layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
        self.down = nn.ModuleList(nn.Linear(layer.in_features, 2, bias=False) for layer in layers)
        self.up = nn.ModuleList(nn.Linear(2, layer.out_features, bias=False) for layer in layers)
        for layer, down, up in zip(layers, self.down, self.up, strict=True):
            layer.register_forward_hook(_adding(down, up))
        self.spare = nn.ModuleList(nn.Linear(2, 2) for _ in range(unused))


def _adding(down: nn.Module, up: nn.Module) -> Callable[..., torch.Tensor]:
    return lambda layer, args, output: output + up(down(args[0]))


class WithForward(Adapters):
    """A forward that the script does not call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up[0](self.down[0](x))


def _average_by_hand(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


def _train(
    cls: Callable[..., Wrapper], container: type[Adapters], mode: str, num_local: int, by_hand: bool
) -> list[torch.Tensor]:
    """Returns the weights after each step."""
    torch.manual_seed(0)
    model = Mlp().requires_grad_(False)
    wrapper = cls(container(model), **MODES[mode], **SMALL_CAP)
    optimizer = torch.optim.SGD(wrapper.parameters(), 0.1, momentum=0.9)
    weights = []
    for number in range(5):
        torch.manual_seed(10 * number + dist.get_rank())
        optimizer.zero_grad()
        with wrapper.no_sync():
            for _ in range(num_local):
                model(torch.randn(6, 16)).square().mean().backward()
        model(torch.randn(6, 16)).square().mean().backward()
        if by_hand:
            _average_by_hand(wrapper)
        assert all(param.grad is None for param in wrapper.module.spare.parameters())
        optimizer.step()
        weights += [param.detach().clone() for param in wrapper.parameters()]
    return weights


def _check_by_hand(container: type[Adapters], mode: str, num_local: int) -> None:
    theirs, ours = (_train(cls, container, mode, num_local, by_hand=True) for cls in WRAPPERS)
    assert all(map(torch.equal, theirs, ours))
    assert_in_step()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_local", [0, 2])
@pytest.mark.parametrize("container", [Adapters, WithForward])
def test_averaged_by_hand(ranks, container, num_local, mode):
    ranks(2).run(_check_by_hand, container, mode, num_local)


def _check_not_by_hand(mode: str) -> None:
    """Without an average by hand, weights of ranks stay equal. Under DDP they diverge."""
    for weight in _train(ReducerDDP, Adapters, mode, num_local=0, by_hand=False):
        everywhere = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, weight)
        assert all(torch.equal(other, weight) for other in everywhere)


@pytest.mark.parametrize("mode", MODES)
def test_weights_stay_equal(ranks, mode, world):
    ranks(world).run(_check_not_by_hand, mode)


def _check_forward_later() -> None:
    """From the first forward of the wrapper on, a backward must reach every parameter."""
    torch.manual_seed(0)
    model = Mlp().requires_grad_(False)
    wrapper = ReducerDDP(WithForward(model, unused=0), **SMALL_CAP)
    x = torch.ones(6, 16)
    for _ in range(3):
        model(x).sum().backward()
    with pytest.raises(RuntimeError, match="got no gradient in this backward"):
        wrapper(x).sum().backward()
    (wrapper(x).sum() + model(x).sum()).backward()
    assert_in_step()


def test_forward_after_backwards_without_forward(ranks):
    ranks(2).run(_check_forward_later)


def _check_used_by_one_rank(mode: str) -> None:
    """Every rank gets the average of a parameter that one rank used."""
    torch.manual_seed(0)
    model = Mlp().requires_grad_(False)
    wrapper = ReducerDDP(Adapters(model), **MODES[mode], **SMALL_CAP)
    spare = wrapper.module.spare[0]
    for number in range(4):
        wrapper.zero_grad()
        loss = model(torch.randn(6, 16)).square().mean()
        if dist.get_rank() == 1 and number >= 1:
            loss = loss + spare(torch.randn(3, 2)).sum()
        loss.backward()
        if number == 0:
            assert spare.weight.grad is None
        else:
            torch.testing.assert_close(spare.bias.grad, torch.full((2,), 1.5))


@pytest.mark.parametrize("mode", ["default", "view", "find unused"])
def test_used_by_one_rank(ranks, mode):
    ranks(2).run(_check_used_by_one_rank, mode)


def _check_rank_without_inputs() -> None:
    """In join(), a rank without inputs never runs a forward, and makes the steps of the others."""
    torch.manual_seed(0)
    wrapper = ReducerDDP(Mlp(), **SMALL_CAP)
    with wrapper.join():
        for _ in range(3 * dist.get_rank()):
            wrapper(torch.ones(6, 16)).sum().backward()
    assert_in_step()


def test_rank_without_inputs(ranks):
    ranks(2).run(_check_rank_without_inputs)
