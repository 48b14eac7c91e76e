"""torch.compile of a wrapper, of code around it, and of parts of its module: in any combination."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from both_wrappers import WRAPPERS, assert_same_on_all_ranks
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision


class _Counter:
    """A backend that counts graphs."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.num_graphs += 1
        return graph.forward


@dataclasses.dataclass
class _Output:
    y: torch.Tensor


class _Net(nn.Module):
    def __init__(self, make: Callable[[nn.Module], nn.Module], as_dataclass: bool = False) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(8, 8), make(nn.Linear(8, 8)), nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(8)
        self.as_dataclass = as_dataclass

    def forward(self, x: torch.Tensor) -> Any:
        y = self.last(torch.relu(self.part(self.norm(self.first(x)))))
        return _Output(y) if self.as_dataclass else y


def _compiled(module: Any, counter: _Counter) -> Any:
    return torch.compile(module, backend=counter)


def _around(cls: Any, counter: _Counter, options: dict[str, Any]) -> Any:
    return _compiled(cls(_Net(lambda part: part), **options), counter)


def _around_a_part(cls: Any, counter: _Counter, options: dict[str, Any]) -> Any:
    return _compiled(cls(_Net(lambda part: _compiled(part, counter)), **options), counter)


def _around_a_compiled_module(cls: Any, counter: _Counter, options: dict[str, Any]) -> Any:
    return _compiled(cls(_compiled(_Net(lambda part: part), counter), **options), counter)


def _around_all(cls: Any, counter: _Counter, options: dict[str, Any]) -> Any:
    module = _compiled(_Net(lambda part: _compiled(part, counter)), counter)
    return _compiled(cls(module, **options), counter)


def _in_place(cls: Any, counter: _Counter, options: dict[str, Any]) -> Any:
    """The method ``compile()`` of the wrapper, of its module and of a part."""
    module = _Net(lambda part: part)
    module.part.compile(backend=counter)
    module.compile(backend=counter)
    model = cls(module, **options)
    model.compile(backend=counter)
    return model


def _dataclass(cls: Any, counter: _Counter, options: dict[str, Any]) -> Any:
    model = _compiled(cls(_Net(lambda part: part, as_dataclass=True), **options), counter)
    return _function(model, lambda x: model(x).y)


def _around_a_script(cls: Any, counter: _Counter, options: dict[str, Any]) -> Any:
    return _compiled(cls(_Net(torch.jit.script), **options), counter)


def _function(model: Any, forward: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    forward.parameters, forward.zero_grad = model.parameters, model.zero_grad  # type: ignore[attr-defined]
    return forward


def _called_in_a_function(cls: Any, counter: _Counter, options: dict[str, Any]) -> Any:
    model = cls(_Net(lambda part: _compiled(part, counter)), **options)
    return _function(model, _compiled(lambda x: model(x * 1) * 1, counter))


def _no_sync_in_a_function(cls: Any, counter: _Counter, options: dict[str, Any]) -> Any:
    model = cls(_Net(lambda part: part), **options)

    def forward(x: torch.Tensor) -> torch.Tensor:
        with model.no_sync():
            y = model(x)
        return model(x + 1) + y.detach()

    return _function(model, _compiled(forward, counter))


MAKERS = (
    _around,
    _around_a_part,
    _around_a_compiled_module,
    _around_all,
    _in_place,
    _dataclass,
    _around_a_script,
    _called_in_a_function,
    _no_sync_in_a_function,
)
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "find unused": {"find_unused_parameters": True},
}


def _train(make: Any, cls: Any, options: dict[str, Any]) -> tuple[list[torch.Tensor], int]:
    """Gradients of the last of three steps, and the number of graphs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    counter = _Counter()
    model = make(cls, counter, options)
    for number in range(3):
        model.zero_grad()
        torch.manual_seed(10 * number + dist.get_rank())
        model(torch.randn(4, 8)).square().mean().backward()
    return [param.grad.clone() for param in model.parameters()], counter.num_graphs


def _check(make: Any, options: dict[str, Any]) -> None:
    (theirs, their_graphs), (ours, our_graphs) = (_train(make, cls, options) for cls in WRAPPERS)
    assert_same_on_all_ranks(*ours)
    assert all(map(torch.equal, theirs, ours))
    assert our_graphs == their_graphs


def _cases() -> Iterator[Any]:
    """All cases. A compilation takes seconds, so `make test` has two modes of each maker."""
    for place, make in enumerate(MAKERS):
        for number, mode in enumerate(MODES):
            # A static graph of DDP does not average if the output is a dataclass.
            if (make, mode) != (_dataclass, "static"):
                marks = [] if (place + number) % 2 else [pytest.mark.full_only]
                yield pytest.param(make, mode, marks=marks)


@pytest.mark.parametrize(("make", "mode"), _cases())
def test_compiled_as_with_ddp(ranks, make, mode):
    ranks(2).run(_check, make, MODES[mode])


def _check_mixed_precision() -> None:
    config = _MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
    for make in (_around, _around_a_part):
        ours, _ = _train(make, WRAPPERS[1], {"mixed_precision": config})
        eager, _ = _train(_eager, WRAPPERS[1], {"mixed_precision": config})
        assert_same_on_all_ranks(*ours)
        for one, other in zip(ours, eager, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-3)


def _eager(cls: Any, counter: _Counter, options: dict[str, Any]) -> Any:
    return cls(_Net(lambda part: part), **options)


def test_mixed_precision(ranks):
    ranks(2).run(_check_mixed_precision)
