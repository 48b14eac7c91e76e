"""Sparse gradients: used or unused, on some ranks or all, shared between embeddings."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from both_wrappers import SMALL_CAP, WRAPPERS, Wrapper, assert_trains_alike
from modes import MODES
from one_thread_gloo import one_thread_group
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ddpx import ReducerDDP

_VIEW_UNUSED = {"find_unused_parameters": True, "gradient_as_bucket_view": True}
_ALL_MODES: dict[str, dict[str, Any]] = {**MODES, "find unused view": _VIEW_UNUSED}


class _Tables(nn.Module):
    """Two tables with sparse gradients. The second may stay unused."""

    def __init__(self, kind: type[nn.Module] = nn.Embedding) -> None:
        super().__init__()
        self.first = kind(20, 8, sparse=True)
        self.second = kind(20, 8, sparse=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor, use_second: bool) -> torch.Tensor:
        hidden = self.first(tokens)
        if use_second:
            hidden = hidden * self.second(tokens)
        return self.head(hidden)


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def _always(model: nn.Module, number: int) -> None:
    model(torch.randint(20, (4, 5)), True).square().mean().backward()


def _never(model: nn.Module, number: int) -> None:
    model(torch.randint(20, (4, 5)), False).square().mean().backward()


def _by_rank(model: nn.Module, number: int) -> None:
    model(torch.randint(20, (4, 5)), dist.get_rank() == 0).square().mean().backward()


def _by_step(model: nn.Module, number: int) -> None:
    model(torch.randint(20, (4, 5)), number % 2 == 0).square().mean().backward()


def _accumulated(model: Any, number: int) -> None:
    if number:
        with model.no_sync():
            _always(model, number)
    _always(model, number)


def _bag() -> nn.Module:
    return _Tables(nn.EmbeddingBag)


def _check(
    build: Callable[[], nn.Module], step: Any, mode: str, caps: dict[str, float], hook: bool
) -> None:
    def wrap(cls: Callable[..., Wrapper], module: nn.Module) -> Wrapper:
        model = cls(module, process_group=one_thread_group(), **_ALL_MODES[mode], **caps)
        if hook:
            model.register_comm_hook(one_thread_group(), allreduce_hook)
        return model

    assert_trains_alike(build, wrap, step, make_optimizer=_sgd)


@pytest.mark.parametrize("mode", _ALL_MODES)
@pytest.mark.parametrize("caps", [{}, SMALL_CAP], ids=["default caps", "small caps"])
@pytest.mark.parametrize("step", [_always, _accumulated], ids=["plain", "accumulated"])
@pytest.mark.parametrize("build", [_Tables, _bag], ids=["Embedding", "EmbeddingBag"])
def test_used(ranks, build, step, caps, mode):
    ranks(2).run(_check, build, step, mode, caps, False)


@pytest.mark.parametrize("mode", _ALL_MODES)
def test_used_with_a_hook(ranks, mode):
    ranks(2).run(_check, _Tables, _always, mode, {}, True)


def _mean_of_grads(model: nn.Module, step: Any, number: int) -> dict[str, torch.Tensor | None]:
    """The gradients of a bare module, averaged densely. None for params that no rank used."""
    torch.manual_seed(10 * number + dist.get_rank())
    model.zero_grad()
    step(model, number)
    means: dict[str, torch.Tensor | None] = {}
    for name, param in model.named_parameters():
        used = torch.tensor(float(param.grad is not None))
        dist.all_reduce(used)
        grad = torch.zeros_like(param) if param.grad is None else param.grad.to_dense()
        dist.all_reduce(grad)
        means[name] = grad / dist.get_world_size() if used else None
    return means


def _check_against_mean(
    build: Callable[[], nn.Module], step: Any, options: dict[str, Any], num_steps: int = 6
) -> None:
    torch.manual_seed(0)
    module = build()
    twin = copy.deepcopy(module)
    model = ReducerDDP(module, process_group=one_thread_group(), **options)
    for number in range(num_steps):
        expected = _mean_of_grads(twin, step, number)
        torch.manual_seed(10 * number + dist.get_rank())
        model.zero_grad()
        step(model, number)
        for name, param in module.named_parameters():
            mean = expected[name]
            assert (param.grad is None) == (mean is None), (number, name)
            if mean is not None:
                torch.testing.assert_close(param.grad.to_dense(), mean, msg=f"{number}, {name}")


_UNUSED = [
    (step, mode)
    for step in (_never, _by_rank, _by_step)
    for mode in ("find unused", "find unused view", "static")
    # a static graph requires the same graph in every step
    if not (mode == "static" and step is _by_step)
]


@pytest.mark.parametrize("caps", [{}, SMALL_CAP], ids=["default caps", "small caps"])
@pytest.mark.parametrize("step, mode", _UNUSED)
def test_unused(ranks, step, caps, mode):
    """DDP raises if a sparse param is unused on all ranks."""
    ranks(2).run(_check_against_mean, _Tables, step, _ALL_MODES[mode] | caps)


class _Added(nn.Module):
    """The gradients of both tables share one tensor of values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(20, 8, sparse=True)
        self.second = nn.Embedding(20, 8, sparse=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.first(tokens) + self.second(tokens)


def _added_step(model: nn.Module, number: int) -> None:
    model(torch.randint(20, (4, 5))).square().mean().backward()


@pytest.mark.parametrize("mode", _ALL_MODES)
def test_added_embeddings(ranks, mode):
    ranks(2).run(_check_against_mean, _Added, _added_step, _ALL_MODES[mode])


def _check_ddp_is_wrong() -> None:
    """If torch fixes this, a row of docs/divergences.md must be removed."""
    torch.manual_seed(0)
    module = _Added()
    expected = _mean_of_grads(copy.deepcopy(module), _added_step, 0)
    too_small = []
    for cls in WRAPPERS:
        model = cls(copy.deepcopy(module), process_group=one_thread_group())
        torch.manual_seed(dist.get_rank())
        _added_step(model, 0)
        grads = {name: param.grad.to_dense() for name, param in model.module.named_parameters()}
        too_small.append(any(grads[name].norm() < 0.9 * expected[name].norm() for name in grads))
    assert too_small == [True, False]


def test_added_embeddings_are_wrong_under_ddp(ranks):
    ranks(2).run(_check_ddp_is_wrong)


class _Mixed(nn.Module):
    """One table is read both sparsely and densely, the other densely."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.Embedding(20, 8, sparse=True)
        self.dense = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.sparse(tokens) + self.sparse(tokens + 1) + self.dense(tokens))


def _mixed_step(model: nn.Module, number: int) -> None:
    model(torch.randint(18, (4, 5))).square().mean().backward()


@pytest.mark.parametrize("mode", _ALL_MODES)
def test_sparse_and_dense(ranks, mode):
    """The table's gradient is uncoalesced, since the table is read twice."""
    ranks(2).run(_check_against_mean, _Mixed, _mixed_step, _ALL_MODES[mode])


# The loss of the last rank, if the others use a row of a sparse table.
OF_THE_LAST_RANK: dict[str, Callable[[nn.Module], torch.Tensor]] = {
    "sparse": lambda table: table(torch.tensor([1, 3])),
    "dense": lambda table: table.module.weight,
    "unused": lambda table: torch.ones(2, requires_grad=True),
}


def _check_synchronized_grads_of_a_table(last: str) -> None:
    """The mean is sparse if the gradients of all ranks are sparse."""
    model = ReducerDDP(nn.Embedding(4, 2, sparse=True))
    rank, world = dist.get_rank(), dist.get_world_size()
    used = OF_THE_LAST_RANK[last if rank == world - 1 else "sparse"](model)
    (grad,) = model.synchronized_grads(used.sum(), [model.module.weight], allow_unused=True)
    rows = {"sparse": [0.0, 1, 0, 1], "dense": [1.0] * 4, "unused": [0.0] * 4}
    of_others = torch.tensor(rows["sparse"]) * (world - 1)
    mean = (of_others + torch.tensor(rows[last])) / world
    assert grad is not None and grad.is_sparse == (last == "sparse")
    torch.testing.assert_close(grad.to_dense(), mean[:, None].expand(4, 2))


@pytest.mark.parametrize("last", OF_THE_LAST_RANK)
def test_synchronized_grads_of_a_table(ranks, last):
    ranks(3).run(_check_synchronized_grads_of_a_table, last)
