"""The hand-made average: a bare module whose buffers and gradients are exchanged by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from slow_ddp import SlowDDP
from torch import nn


class HandMade(SlowDDP):
    """Broadcasts buffers in forward, and averages gradients after backward, in double precision.

    A param that no rank has used since the last average keeps its ``grad``. So does a param that
    all ranks have frozen, unless ranks look for unused params and a rank has a gradient of the
    param. Any other param gets the average on all ranks, also where the param is frozen. Sparse
    gradients become dense.

    Args:
        module: The module, with the same values on all ranks.
        syncs_buffers: Whether forwards broadcast buffers.
        mode: A key of ``programs.MODES``. In default mode, an undefined gradient counts as zeros.
            In other modes, it counts as no gradient. Until its first forward, a wrapper in default
            mode looks for unused params.
        mixed: The dtype in which forward and backward run. None: the dtypes of the params.
        average: ``"mean"``, ``"sum"`` or ``"weights"``, as for ReducerDDP.
        ignored: Names of params and buffers that stay local.
    """

    def __init__(
        self,
        module: nn.Module,
        syncs_buffers: bool,
        mode: str,
        mixed: torch.dtype | None,
        average: str = "mean",
        ignored: Collection[str] = (),
    ) -> None:
        super().__init__(module)
        for name in ignored:
            self.managed.pop(name, None)
        self.ignored = ignored
        self.average_kind = average
        self.weight = 0.0  # of the next forward
        self.sum_of_weights = 0.0  # of forwards since the last average
        self.mode = mode
        self.has_run = False  # whether a forward has recorded a graph
        self.syncs_buffers = syncs_buffers
        self.mixed = mixed
        self.factor = 1.0  # of a communication hook
        self.last_forward_was_synchronized = True
        self.buffers_from = 0  # the rank
        self.reached: set[str] = set()  # the params of backwards since the last average
        self.parts: Counter[str] = Counter()  # counts of the running backward
        # A node that nobody holds is made anew, without the hook.
        self._nodes = [self._count(name, param) for name, param in self.managed.items()]

    def _count(self, name: str, param: torch.Tensor) -> Any:
        node = torch.autograd.graph.get_gradient_edge(param).node

        def hook(_: Any, grads: tuple[torch.Tensor | None, ...]) -> None:
            if self.needs_all_params() or grads[0] is not None:
                self.reached.add(name)
            self.parts[name] += 1

        node.register_hook(hook)  # runs also for an undefined gradient
        return node

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self._broadcast_buffers()
        self.has_run = self.has_run or torch.is_grad_enabled()
        output = self._run(inputs, kwargs)
        self.count_weight()
        self.last_forward_was_synchronized = (
            torch.is_grad_enabled() and self.require_backward_grad_sync
        )
        return output

    def _broadcast_buffers(self) -> None:
        if self.syncs_buffers and self.last_forward_was_synchronized:
            for name, buffer in self.module.named_buffers():
                if name not in self.ignored:
                    dist.broadcast(buffer, self.buffers_from)

    def shadow_step(self) -> None:
        """A rank without inputs does its part of a step."""
        self._broadcast_buffers()
        self.has_run = self.last_forward_was_synchronized = True
        self.average(has_inputs=False)

    def _run(self, inputs: Any, kwargs: Any) -> Any:
        if self.mixed is None:
            return self.module(*inputs, **kwargs)
        cast = _casting_to(self.mixed)
        params = {name: cast(param) for name, param in self.module.named_parameters()}
        values = [cast(value) if isinstance(value, torch.Tensor) else value for value in inputs]
        return torch.func.functional_call(self.module, params, tuple(values), kwargs)

    def count_weight(self) -> None:
        """Counts the weight of a forward that records a graph."""
        if torch.is_grad_enabled():
            self.sum_of_weights += self.weight
            self.weight = 0.0

    def needs_all_params(self) -> bool:
        return self.mode == "default" and self.has_run

    def missing(self) -> list[str]:
        """The params that the last backward should have reached, but did not."""
        if not self.needs_all_params():
            return []
        return [n for n, p in self.managed.items() if p.requires_grad and not self.parts[n]]

    def forget(self) -> None:
        """Forgets a backward that failed. Without any gradient, uses before it still count."""
        if any(self.parts.values()):
            self.reached.clear()
        self.sum_of_weights = 0.0

    def average(self, has_inputs: bool = True) -> None:
        numbers = [_as_numbers(param) * has_inputs for param in self.managed.values()]
        finds_unused = self.mode != "static" and not self.needs_all_params()
        users = torch.tensor([float(name in self.reached) for name in self.managed])
        trainable = torch.tensor(
            [
                float(param.requires_grad or (finds_unused and param.grad is not None))
                for param in self.managed.values()
            ]
        )
        weight = torch.tensor([self.sum_of_weights * has_inputs], dtype=torch.float64)
        *totals, num_users, num_trainable, sum_of_weights = self.all_reduce(
            [*numbers, users.double(), trainable.double(), weight]
        )
        self.sum_of_weights *= not has_inputs
        divisor = {"mean": dist.get_world_size(), "sum": 1, "weights": sum_of_weights.item()}
        counted = num_users * num_trainable
        for param, total, count in zip(self.managed.values(), totals, counted, strict=True):
            if count > 0 and has_inputs:
                mean = total * (self.factor / divisor[self.average_kind])
                if param.is_complex():
                    mean = torch.view_as_complex(mean.reshape(-1, 2))
                param.grad = mean.reshape(param.shape).to(param.dtype)
        self.reached.clear()


def _as_numbers(param: torch.Tensor) -> torch.Tensor:
    """The gradient as a flat tensor of real numbers. Zeros if there is no gradient."""
    kind = torch.complex128 if param.is_complex() else torch.float64
    grad = torch.zeros(param.shape, dtype=kind)
    if param.grad is not None:
        grad = grad + param.grad.detach().to_dense().to(kind)
    return (torch.view_as_real(grad) if grad.is_complex() else grad).reshape(-1)


def _casting_to(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda value: value.to(dtype) if value.is_floating_point() else value
