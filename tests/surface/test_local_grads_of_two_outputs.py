"""``torch.autograd.grad`` of one output, beside the backward of another output."""

from __future__ import annotations

import torch
from both_wrappers import WRAPPERS, Wrapper
from torch import nn

from ddpx import ReducerDDP
from ddpx.testing import compare_traces, record_training


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 2)
        self.right = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x), self.right(x)


def _two_backwards(model: Wrapper, number: int) -> None:
    """autograd.grad of the output whose backward comes last."""
    left, right = model(torch.randn(3, 4))
    torch.autograd.grad(right.sum(), model.module.right.weight, retain_graph=True)
    left.sum().backward()
    right.square().sum().backward()


def _check_two_backwards() -> None:
    traces = [record_training(_TwoHeads, cls, _two_backwards) for cls in WRAPPERS]
    compare_traces(*traces).raise_if_different()


def _check_unreached() -> None:
    """autograd.grad returns None for a parameter that the loss does not depend on."""
    model = ReducerDDP(_TwoHeads(), find_unused_parameters=True)
    for _ in range(3):
        x = torch.randn(3, 4, requires_grad=True)
        weight = model.module.right.weight
        _, found = torch.autograd.grad(model(x)[0].sum(), [x, weight], allow_unused=True)
        assert found is None
        with torch.no_grad():
            weight.mul_(2)


def test_unreached_parameter(ranks):
    ranks(2).run(_check_unreached)


def test_the_output_may_have_its_backward_later(ranks):
    ranks(2).run(_check_two_backwards)
