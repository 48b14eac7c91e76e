"""Trainings that call the autograd engine themselves, within a forward or a backward.

A usage takes a function that wraps a module, trains, and returns the tensors to compare.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

State = list[torch.Tensor]
Wrap = Callable[[nn.Module], nn.Module]
NUM_STEPS = 4


def _train(model: nn.Module) -> State:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        model(torch.randn(5, 8)).square().mean().backward()
        optimizer.step()
    return [value.clone() for value in model.state_dict().values()]


class _Forces(nn.Module):
    """A potential of molecular dynamics: the output is the gradient of an energy."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 1, bias=False))

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        positions.requires_grad_()
        (forces,) = torch.autograd.grad(self.energy(positions).sum(), positions, create_graph=True)
        return -forces


def forces_in_forward(wrap: Wrap) -> State:
    return _train(wrap(_Forces()))


class _Equilibrium(nn.Module):
    """A fixed point of a layer. A hook solves for the gradient of the fixed point in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
        nn.init.normal_(self.inner.weight, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def layer(point: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.inner(point) + self.outer(x))

        point = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(10):
                point = layer(point)
        result = layer(point)
        start = result.detach().requires_grad_()
        end = layer(start)

        def solve(grad: torch.Tensor) -> torch.Tensor:
            solution = grad
            for _ in range(5):
                solution = grad + torch.autograd.grad(end, start, solution, retain_graph=True)[0]
            return solution

        result.register_hook(solve)
        return result


def equilibrium_solved_in_backward(wrap: Wrap) -> State:
    return _train(wrap(_Equilibrium()))


def scale_from_norms_of_gradients(wrap: Wrap) -> State:
    """Callbacks of the engine compare local gradients with averages, as fairscale's AdaScale does.

    A callback that a hook queues may run before the averages are written. So that callback queues
    another one, which calls a collective operation.
    """
    model = wrap(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
    engine = torch.autograd.Variable._execution_engine
    local, ratios = torch.zeros(()), []
    queued = False

    def end() -> None:
        nonlocal queued
        queued = False
        dist.all_reduce(local)
        ratios.append(local / sum(param.grad.square().sum() for param in model.parameters()))
        local.zero_()

    def queue_end() -> None:
        nonlocal queued
        if not queued:
            queued = True
            engine.queue_callback(end)

    def hook(grad: torch.Tensor) -> None:
        local.add_(grad.square().sum())
        engine.queue_callback(queue_end)

    for param in model.parameters():
        param.register_hook(hook)
    state = _train(model)
    assert len(ratios) == NUM_STEPS
    return [*state, *ratios]


USAGES: dict[str, Callable[[Wrap], State]] = {
    name.replace("_", " "): usage
    for name, usage in dict(globals()).items()
    if not name.startswith("_") and getattr(usage, "__module__", "") == __name__
}
