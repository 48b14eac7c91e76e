"""Lazy conjugates and negations as parameters, buffers, and in ``synchronized_grads``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from grad_kinds import TABLE, WORLD_SIZE, Given, dense, mean
from torch import nn

from ddpx import ReducerDDP

BACKENDS = ("gloo", "shm")


def _lazy_pair(factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A lazy conjugate, and a lazy negation of floats."""
    numbers = torch.arange(6.0).view(2, 3) * factor
    return torch.complex(numbers, numbers + 1).conj(), torch._neg_view(numbers)


class _LazyState(nn.Module):
    """Parameters and buffers differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        conj, neg = _lazy_pair(1.0 + dist.get_rank())
        self.conj, self.neg = nn.Parameter(conj), nn.Parameter(neg)
        conj, neg = _lazy_pair(3.0 + dist.get_rank())
        self.register_buffer("conj_buffer", conj)
        self.register_buffer("neg_buffer", neg)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = (self.conj.conj() * x).real.sum() + (self.conj * self.conj_buffer).imag.sum()
        return product + (self.neg * self.neg_buffer).sum() + (self.neg * x.imag).sum()


def _same_as_rank_0(module: nn.Module, factors: tuple[float, float]) -> None:
    expected = (*_lazy_pair(factors[0]), *_lazy_pair(factors[1]))
    for (name, tensor), value in zip(module.state_dict().items(), expected, strict=True):
        assert torch.equal(dense(tensor), dense(value)), name


def _check_state(backend: str, views: bool) -> None:
    module = _LazyState()
    assert module.conj.is_conj()
    assert module.neg.is_neg()
    group = dist.new_group(backend=backend)
    model = ReducerDDP(module, process_group=group, gradient_as_bucket_view=views)
    _same_as_rank_0(module, (1.0, 3.0))
    for step in range(3):
        with torch.no_grad():
            for buffer, value in zip(
                module.buffers(), _lazy_pair(step + 5.0 + dist.get_rank()), strict=True
            ):
                buffer.copy_(value)
        model.zero_grad()
        numbers = torch.arange(6.0).view(2, 3) + dist.get_rank()
        x = torch.complex(numbers, 2 * numbers)
        model(x).backward()
        _same_as_rank_0(module, (1.0, step + 5.0))
        bare = module.conj.detach().clone(), module.neg.detach().clone()
        conj, neg = (tensor.requires_grad_() for tensor in bare)
        loss = (conj.conj() * x).real.sum() + (conj * module.conj_buffer).imag.sum()
        loss = loss + (neg * module.neg_buffer).sum() + (neg * x.imag).sum()
        for param, grad in zip(
            module.parameters(), torch.autograd.grad(loss, (conj, neg)), strict=True
        ):
            assert param.grad is not None
            assert torch.equal(dense(param.grad), mean(dense(grad)))


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_lazy_params_and_buffers_are_broadcast_by_their_values(ranks, backend, views):
    ranks(WORLD_SIZE).run(_check_state, backend, views)


def _check_synchronized_grads(name: str) -> None:
    """In the second round, rank 1 does not use the last parameters."""
    module = Given({**TABLE[name], "another": next(iter(TABLE[name].values()))})
    model = ReducerDDP(module, find_unused_parameters=True)
    names = [name for name in module.named() if not module.kinds[name].by_user]
    for number in range(2):
        module.number = number
        module.clear()
        module.left_out = set(names[-3:]) if dist.get_rank() == 1 and number else set()
        params = [module.named()[name] for name in names]
        grads = model.synchronized_grads(model(torch.ones(1)), params, allow_unused=True)
        for name, grad in zip(names, grads, strict=True):
            expected = mean(module.local[name])
            assert grad is not None
            assert torch.equal(dense(grad), expected), name


@pytest.mark.parametrize("kinds", ["lazy", "layouts", "sparse"])
def test_synchronized_grads(ranks, kinds):
    ranks(WORLD_SIZE).run(_check_synchronized_grads, kinds)
