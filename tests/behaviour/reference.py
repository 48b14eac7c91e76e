"""The slow and simple reference: averages each gradient of a bare module by one all-reduce."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn


def average_grads(module: nn.Module) -> None:
    """Averages the gradients of ``module`` in place. A missing gradient counts as zeros."""
    for param in module.parameters():
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        dist.all_reduce(grad)
        param.grad = grad / dist.get_world_size()


def copy_from_rank_0(module: nn.Module) -> nn.Module:
    """A copy of ``module`` with the parameters of rank 0."""
    twin = copy.deepcopy(module)
    for param in twin.parameters():
        dist.broadcast(param.detach(), 0)
    return twin


def assert_grads_averaged(
    wrapped: nn.Module, plain: nn.Module, run: Callable[[nn.Module], None]
) -> None:
    """Checks that ``wrapped`` has the gradients of ``plain`` after ``run``, averaged over ranks.

    The tolerance covers the order of sums, which depends on the bucket layout.
    """
    run(plain)
    average_grads(plain)
    for (name, expected), actual in zip(
        plain.named_parameters(), wrapped.parameters(), strict=True
    ):
        assert actual.grad is not None, name
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-5, atol=1e-7, msg=name)
