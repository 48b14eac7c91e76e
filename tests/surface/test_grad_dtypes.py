"""``reduce_dtype`` and ``grad_dtype``: gradients of 16-bit models are summed in float32."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from modes import MODES_OF_DDPX as MODES
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ddpx import ReducerDDP

DTYPES: dict[str, dict[str, torch.dtype]] = {
    "reduce": {"reduce_dtype": torch.float32},
    "grad": {"grad_dtype": torch.float32},
    "both": {"reduce_dtype": torch.float32, "grad_dtype": torch.float32},
}
modes = pytest.mark.parametrize("mode", MODES)
dtypes = pytest.mark.parametrize("dtypes", DTYPES)
# Half a unit in the last place of bfloat16, plus a small float32 rounding error.
ONE_ROUNDING = 2.0**-8 * (1 + 2.0**-6)
FLOAT32 = 2.0**-21


class Net(nn.Module):
    """With a reentrant checkpoint, gradients of the first layer arrive in two parts."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7, dtype=dtype)
        self.second = nn.Linear(7, 3, dtype=dtype)
        self.wide = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) * self.wide


def _build() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def _micro_grads(plain: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of one micro-step of this rank, as autograd computes them."""
    return list(torch.autograd.grad(plain(x).float().square().sum(), list(plain.parameters())))


def _reference(plain: nn.Module, xs: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """The mean over ranks of the sum over micro-steps, in float64."""
    totals = [torch.zeros_like(param, dtype=torch.float64) for param in plain.parameters()]
    for x in xs:
        for total, grad in zip(totals, _micro_grads(plain, x), strict=True):
            total += grad
    for total in totals:
        dist.all_reduce(total, group=group)
        total /= dist.get_world_size(group)
    return totals


def _accumulate(model: ReducerDDP, xs: torch.Tensor) -> None:
    for number, x in enumerate(xs):
        model.require_backward_grad_sync = number == len(xs) - 1
        model(x).float().square().sum().backward()


def _check_error(
    mode: str, dtypes: str, num_micro_steps: int, to_none: bool = True, backend: str | None = None
) -> None:
    group = None if backend is None else dist.new_group(backend=backend)
    module = _build()
    plain = copy.deepcopy(module)
    model = ReducerDDP(
        module, bucket_cap_mb=0.0001, process_group=group, **MODES[mode], **DTYPES[dtypes]
    )
    for step in range(3):
        torch.manual_seed(100 * step + dist.get_rank())
        xs = torch.randn(num_micro_steps, 5, 6, dtype=torch.bfloat16)
        model.zero_grad(set_to_none=to_none)
        _accumulate(model, xs)
        params = zip(model.module.named_parameters(), _reference(plain, xs), strict=True)
        for (name, param), expected in params:
            assert param.grad is not None
            exact = dtypes != "reduce" or param.dtype is torch.float32
            assert param.grad.dtype is (torch.float32 if exact else torch.bfloat16), name
            # Sums cancel, so the error of float32 is relative to the summands.
            allowed = (0 if exact else ONE_ROUNDING) * expected.abs() + FLOAT32 * len(xs) * 8
            error = (param.grad.double() - expected).abs()
            assert (error <= allowed).all(), (step, name, (error - allowed).max())


@modes
@dtypes
@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("num_micro_steps", [1, 5, 64])
def test_error_is_that_of_one_rounding(ranks, mode, dtypes, world_size, num_micro_steps):
    ranks(world_size).run(_check_error, mode, dtypes, num_micro_steps, timeout=90.0)


@modes
@dtypes
@pytest.mark.full_only
@pytest.mark.parametrize("world_size", [5, 7])
@pytest.mark.parametrize("num_micro_steps", [1, 64])
def test_numbers_of_ranks_that_are_odd(ranks, mode, dtypes, world_size, num_micro_steps):
    ranks(world_size).run(_check_error, mode, dtypes, num_micro_steps, timeout=90.0)


@modes
@dtypes
def test_gradients_of_zeros(ranks, mode, dtypes):
    ranks(2).run(_check_error, mode, dtypes, 5, to_none=False)


@modes
@dtypes
def test_over_shm(ranks, mode, dtypes):
    ranks(3).run(_check_error, mode, dtypes, 5, backend="shm")


@modes
@dtypes
@pytest.mark.full_only
@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize("num_micro_steps", [1, 64])
def test_matrix_over_shm(ranks, mode, dtypes, world_size, num_micro_steps):
    pool = ranks(world_size)
    pool.run(_check_error, mode, dtypes, num_micro_steps, backend="shm", timeout=90.0)


def test_many_ranks_and_micro_steps_over_shm(ranks):
    ranks(8).run(_check_error, "default", "reduce", 64, backend="shm", timeout=90.0)


def _check_bits(mode: str) -> None:
    """A float32 model has the same bits with and without the arguments."""
    torch.manual_seed(0)
    module = Net(torch.float32)
    models = [
        ReducerDDP(copy.deepcopy(module), **MODES[mode], **options)
        for options in ({}, DTYPES["reduce"], DTYPES["grad"])
    ]
    for step in range(3):
        torch.manual_seed(step + 10 * dist.get_rank())
        xs = torch.randn(2, 5, 6)
        for model in models:
            model.zero_grad()
            _accumulate(model, xs)
        first, *others = ([p.grad for p in model.parameters()] for model in models)
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@modes
def test_nothing_changes_in_float32(ranks, mode):
    ranks(3).run(_check_bits, mode)


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True, dtype=torch.bfloat16)
        self.last = nn.Linear(4, 2, dtype=torch.bfloat16)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(index))


def _check_sparse(dtypes: str) -> None:
    torch.manual_seed(0)
    module = Lookup()
    plain = copy.deepcopy(module)
    model = ReducerDDP(module, **DTYPES[dtypes])
    index = torch.randint(0, 10, (6,))
    for _ in range(2):
        model.zero_grad()
        with model.no_sync():
            model(index).float().square().sum().backward()
        model(index).float().square().sum().backward()
    plain(index).float().square().sum().backward()
    total = 2 * plain.table.weight.grad.to_dense().double()
    dist.all_reduce(total)
    total /= dist.get_world_size()
    grad = model.module.table.weight.grad
    assert grad.is_sparse
    assert grad.dtype is (torch.bfloat16 if dtypes == "reduce" else torch.float32)
    error = (grad.to_dense().double() - total).abs()
    # On each rank, torch sums the entries of one row in bfloat16.
    assert (error <= 4 * ONE_ROUNDING * total.abs() + FLOAT32).all()


@dtypes
def test_sparse_gradients(ranks, dtypes):
    ranks(3).run(_check_sparse, dtypes)


def _check_hook(mode: str) -> None:
    """Communication hooks get buckets in the dtype of sums."""
    model = ReducerDDP(_build(), **MODES[mode], **DTYPES["reduce"])
    seen = set()

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.add(bucket.buffer().dtype)
        return allreduce_hook(None, bucket)

    model.register_comm_hook(None, hook)
    plain = _build()
    xs = torch.randn(2, 5, 6, dtype=torch.bfloat16)
    _accumulate(model, xs)
    assert seen == {torch.float32}
    for param, expected in zip(model.parameters(), _reference(plain, xs), strict=True):
        error = (param.grad.double() - expected).abs()
        assert (error <= ONE_ROUNDING * expected.abs() + 16 * FLOAT32).all()


@modes
def test_communication_hook(ranks, mode):
    ranks(2).run(_check_hook, mode)


def _check_failed_step() -> None:
    """No gradient gets lost, and the next step is correct."""
    model = ReducerDDP(_build(), **DTYPES["reduce"])
    plain = _build()
    xs = torch.randn(2, 5, 6, dtype=torch.bfloat16)

    def fail(grad: torch.Tensor) -> None:
        raise RuntimeError("on purpose")

    handle = model.module.first.weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        model(xs[0]).float().sum().backward()
    handle.remove()
    model.zero_grad()
    _accumulate(model, xs)
    for param, expected in zip(model.parameters(), _reference(plain, xs), strict=True):
        error = (param.grad.double() - expected).abs()
        assert (error <= ONE_ROUNDING * expected.abs() + 16 * FLOAT32).all()


def test_after_a_step_that_failed(ranks):
    ranks(2).run(_check_failed_step)


def _check_other_wrapper() -> None:
    """A later wrapper of the same module determines the dtypes.

    Without its hooks, gradients are plain.
    """
    module = _build()
    ReducerDDP(module, **DTYPES["grad"])
    model = ReducerDDP(module)
    x = torch.randn(5, 6, dtype=torch.bfloat16)
    model(x).float().sum().backward()
    assert module.first.weight.grad.dtype is torch.bfloat16
    for _ in range(2):
        model.zero_grad()
        model(x).float().sum().backward()
    model = ReducerDDP(module, **DTYPES["grad"])
    model(x).float().sum().backward()
    del model
    assert module.first.weight.grad.dtype is torch.bfloat16, "the wrapper is gone"
    module(x).float().sum().backward()
    assert module.first.weight.grad.dtype is torch.bfloat16
    model = ReducerDDP(module, **DTYPES["grad"])
    model._remove_autograd_hooks()
    assert module.first.weight.grad.dtype is torch.bfloat16
    model(x).float().sum().backward()
    assert module.first.weight.grad.dtype is torch.bfloat16


def test_other_wrappers(ranks):
    ranks(2).run(_check_other_wrapper)


def _check_alone(dtypes: str) -> None:
    """One rank does not communicate. Gradients have the same dtypes."""
    model = ReducerDDP(_build(), **DTYPES[dtypes])
    plain = _build()
    for step in range(3):
        torch.manual_seed(step)
        xs = torch.randn(1 + step, 5, 6, dtype=torch.bfloat16)
        model.zero_grad()
        _accumulate(model, xs)
        for param, expected in zip(model.parameters(), _reference(plain, xs), strict=True):
            wanted = DTYPES[dtypes].get("grad_dtype", param.dtype)
            assert param.grad.dtype is wanted
            error = (param.grad.double() - expected).abs()
            assert (error <= ONE_ROUNDING * expected.abs() + 16 * FLOAT32).all()


@dtypes
def test_one_rank(ranks, dtypes):
    ranks(1).run(_check_alone, dtypes)


def _check_wide_local_sums() -> None:
    """Sums of micro-steps have ``grad_dtype``, and sums over ranks have ``reduce_dtype``."""
    wide, narrow = torch.float32, torch.bfloat16
    module = nn.Linear(1, 1, bias=False, dtype=narrow)
    model = ReducerDDP(module, grad_dtype=wide, reduce_dtype=narrow, average="sum")
    with model.no_sync():
        for value in (256.0, 1.0):
            model(torch.tensor([[value]], dtype=narrow)).sum().backward()
    assert module.weight.grad.dtype is wide
    assert module.weight.grad.item() == 257  # has more digits than bfloat16
    model.zero_grad()
    model(torch.tensor([[255.0 * dist.get_rank() + 1]], dtype=narrow)).sum().backward()
    assert module.weight.grad.dtype is wide
    assert module.weight.grad.item() == 256  # 256 + 1, rounded


def test_local_sums_may_be_wider_than_sums_over_ranks(ranks):
    ranks(2).run(_check_wide_local_sums)


def _check_synchronized_dtype() -> None:
    """In 16 bits, a sum of 256, 1, 1 and 1 depends on which of them is the first."""
    module = nn.Linear(4, 1, bias=False, dtype=torch.bfloat16)
    model = ReducerDDP(module, reduce_dtype=torch.float32)
    x = torch.ones(1, 4, dtype=torch.bfloat16)
    x[0, dist.get_rank()] = 256
    (grad,) = model.synchronized_grads(model(x).sum(), [module.weight])
    assert grad.dtype is torch.bfloat16 and (grad == torch.tensor(64.75).bfloat16()).all()


def test_synchronized_grads_are_summed_in_the_reducers_dtype(ranks):
    ranks(4).run(_check_synchronized_dtype)


def _check_local_sums_of_another_wrapper() -> None:
    """The newer wrapper has no wide sums. Gradients have the dtype that optimizers expect."""
    module = _build()
    older = ReducerDDP(module, **DTYPES["reduce"])
    with older.no_sync():
        older(torch.randn(5, 6, dtype=torch.bfloat16)).float().sum().backward()
    assert module.first.weight.grad.dtype is torch.float32
    newer = ReducerDDP(module)
    assert module.first.weight.grad.dtype is torch.bfloat16
    newer(torch.randn(5, 6, dtype=torch.bfloat16)).float().sum().backward()
    assert module.first.weight.grad.dtype is torch.bfloat16


def test_local_sums_of_another_wrapper(ranks):
    ranks(2).run(_check_local_sums_of_another_wrapper)


def _check_frozen() -> None:
    """The gradient of a param that is no longer averaged has the dtype that the user expects."""
    model = ReducerDDP(_build(), **DTYPES["reduce"])
    x = torch.randn(5, 6, dtype=torch.bfloat16)
    with model.no_sync():
        model(x).float().sum().backward()
    assert model.module.first.weight.grad.dtype is torch.float32
    model.module.first.weight.requires_grad_(False)
    model(x).float().sum().backward()
    assert model.module.first.weight.grad.dtype is torch.bfloat16


def test_a_frozen_parameter(ranks):
    ranks(2).run(_check_frozen)


def _check_optimizer() -> None:
    """Master weights in float32, as in 16-bit trainings."""
    model = ReducerDDP(_build(), **DTYPES["grad"])
    masters = [param.detach().float() for param in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=0.01)
    for step in range(3):
        torch.manual_seed(step)
        model.zero_grad()
        _accumulate(model, torch.randn(4, 5, 6, dtype=torch.bfloat16))
        for master, param in zip(masters, model.parameters(), strict=True):
            master.grad = param.grad
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters, model.parameters(), strict=True):
                param.copy_(master)


def test_master_weights(ranks):
    ranks(2).run(_check_optimizer)
