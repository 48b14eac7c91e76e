"""The CPU time and the calls of a step grow with the number of things, not with its square."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddpx import _C, ReducerDDP

SMALL, LARGE = 250, 2000
# The square would be 8 times more: 64. Caches make large cases slower.
MOST_GROWTH = 3 * LARGE / SMALL


class _OneParam(nn.Module):
    """A module with one used parameter, whose output `make` computes."""

    def __init__(self, make: Callable[[torch.Tensor], Any] = torch.sum) -> None:
        super().__init__()
        self.param = nn.Parameter(torch.ones(4))
        self.make = make

    def forward(self, *_: object) -> Any:
        return self.make(self.param * 2)


def _module_with(attach: Callable[[nn.Module, int], None], count: int) -> nn.Module:
    module = _OneParam()
    for number in range(count):
        attach(module, number)
    return module


def _steps(wrappers: list[ReducerDDP], *inputs: object) -> Callable[[], None]:
    """Forward and backward of each wrapper, through all outputs."""

    def run() -> None:
        for wrapper in wrappers:
            output = wrapper(*inputs)
            if isinstance(output, dict):
                output = output["loss"]
            outputs = [output] if isinstance(output, torch.Tensor) else output
            torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
            wrapper.zero_grad()

    return run


def _several(count: int, local: bool) -> Callable[[], None]:
    """Many forwards before one backward, or many local backwards before one average."""
    wrapper = ReducerDDP(_OneParam())

    def run() -> None:
        with wrapper.no_sync():
            for _ in range(count if local else 0):
                wrapper().backward()
        losses = [wrapper() for _ in range(1 if local else count)]
        torch.stack(losses).sum().backward()
        wrapper.zero_grad()

    return run


def _of(module: nn.Module, **options: Any) -> Callable[[], None]:
    return _steps([ReducerDDP(module, **options)])


CASES: dict[str, Callable[[int], Callable[[], None]]] = {
    "outputs of one node": lambda n: _of(_OneParam(lambda x: x.expand(n, 4).unbind())),
    "outputs of many nodes": lambda n: _of(_OneParam(lambda x: [x * 2 for _ in range(n)])),
    "nested outputs": lambda n: _of(_OneParam(lambda x: {"loss": x.sum(), "rest": _pairs(x, n)})),
    "inputs": lambda n: _steps([ReducerDDP(_OneParam())], [torch.ones(1) for _ in range(n)]),
    "parameters": lambda n: _of(_Params(n, n)),
    "unused parameters": lambda n: _of(_Params(n, 1), find_unused_parameters=True),
    "frozen parameters": lambda n: _of(
        _module_with(lambda m, i: m.register_parameter(f"p{i}", _frozen()), n)
    ),
    "buffers": lambda n: _of(_module_with(lambda m, i: m.register_buffer(f"b{i}", _frozen()), n)),
    "submodules": lambda n: _of(_module_with(lambda m, i: m.add_module(f"m{i}", nn.Tanh()), n)),
    "wrappers": lambda n: _steps([ReducerDDP(_OneParam()) for _ in range(n // 5)]),
    "forwards before a backward": lambda n: _several(n, local=False),
    "local backwards": lambda n: _several(n, local=True),
}


class _Params(nn.Module):
    def __init__(self, count: int, used: int) -> None:
        super().__init__()
        self.params = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(count)])
        self.used = used

    def forward(self) -> torch.Tensor:
        return torch.stack(list(self.params)[: self.used]).sum()


def _pairs(x: torch.Tensor, count: int) -> list[dict[str, torch.Tensor]]:
    x = x.detach()
    return [{"a": x, "b": x} for _ in range(count)]


def _frozen() -> nn.Parameter:
    return nn.Parameter(torch.ones(4), requires_grad=False)


def _cpu_time(run: Callable[[], None]) -> float:
    """The shortest of several steps, in seconds of CPU time."""
    run()
    times = []
    for _ in range(5):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times)


def _check(case: str) -> None:
    torch.set_num_threads(1)
    small, large = (_cpu_time(CASES[case](count)) for count in (SMALL, LARGE))
    assert large < MOST_GROWTH * small, (
        f"{LARGE}: {large * 1e3:.2f} ms, {SMALL}: {small * 1e3:.2f} ms"
    )


@pytest.mark.parametrize("case", CASES)
def test_time_of_a_step(ranks, case):
    ranks(1).run(_check, case)


def _check_calls_of_synchronized_grads(count: int) -> None:
    model = ReducerDDP(_Params(count, count))
    large = torch.ones(1 << 19, requires_grad=True)
    loss = model() + large.sum() * dist.get_rank()
    with mock.patch.object(_C, "all_reduce", wraps=_C.all_reduce) as calls:
        *found, of_large = model.synchronized_grads(loss, [*model.parameters(), large])
    assert calls.call_count == 3  # which ranks have gradients; the large one; all others
    assert all(torch.equal(grad, torch.ones(4)) for grad in found)
    assert torch.equal(of_large, torch.full_like(large, 0.5))


def test_small_gradients_share_a_collective_call(ranks):
    ranks(2).run(_check_calls_of_synchronized_grads, SMALL)
