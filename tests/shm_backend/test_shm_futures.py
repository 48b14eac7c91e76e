"""Callbacks of futures over ``shm``: they may wait for further operations, as over gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mortal_ranks import run_mortal
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import ddpx

Future = torch.futures.Future[Any]
_OPTIONS = dist.AllreduceCoalescedOptions()
# By the way of the operation: through shared memory, or through gloo.
STARTS: dict[str, Callable[[torch.Tensor], dist.Work]] = {
    "shm": lambda tensor: dist.all_reduce(tensor, async_op=True),
    "gloo": lambda tensor: dist.group.WORLD.allreduce_coalesced([tensor], _OPTIONS),
}


def _run_chains(way: str) -> list[float]:
    """Callbacks wait for the future of a second operation, and later for a third operation."""
    torch.set_num_interop_threads(1)  # as on a machine with one core
    start = STARTS[way]

    def second(_: Future) -> torch.Tensor:
        tensor = torch.ones(10)
        start(tensor).get_future().wait()
        return tensor

    def third(future: Future) -> torch.Tensor:
        start(tensor := future.value()).wait()
        return tensor

    sums = []
    for size in (10, 100_000):
        first = start(torch.ones(size)).get_future()
        sums.append(float(first.then(second).then(third).wait()[0]))
    return sums


@pytest.mark.parametrize("way", STARTS)
def test_callbacks_wait_for_operations(way):
    assert [outcome.value for outcome in run_mortal(2, _run_chains, way)] == [[4.0, 4.0]] * 2


def _train_with_power_sgd() -> bool:
    torch.set_num_interop_threads(1)
    torch.manual_seed(0)
    model = ddpx.ReducerDDP(nn.Linear(300, 300))
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        model.zero_grad()
        model(torch.randn(4, 300)).square().mean().backward()
    return model.module.weight.grad is not None


def test_power_sgd_needs_no_pool_of_threads():
    """Its callbacks wait for futures."""
    assert [outcome.value for outcome in run_mortal(2, _train_with_power_sgd)] == [True] * 2


def _value_and_error() -> tuple[int, str]:
    value = STARTS["gloo"](torch.ones(3)).get_future().then(lambda future: len(future.value()))
    refused = dist.all_reduce(torch.ones(3).to_sparse(), async_op=True).get_future()

    def fail(_: Future) -> None:
        raise ValueError("of the callback")

    with pytest.raises((ValueError, RuntimeError), match="of the callback"):
        refused.then(fail).wait()
    return value.wait(), "raised"


def test_futures_through_gloo_have_values_and_errors():
    outcomes = run_mortal(2, _value_and_error)
    assert [outcome.value for outcome in outcomes] == [(1, "raised")] * 2
