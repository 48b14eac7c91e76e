"""Modules of TorchScript and FX, and modules whose parameters are not in plain dicts."""

from __future__ import annotations

import io
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from modes import MODES
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

from ddpx import ReducerDDP
from ddpx.testing import compare_with_ddp


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x)))) * self.scale


def _traced(module: nn.Module) -> nn.Module:
    return torch.jit.trace(module, torch.ones(2, 8), check_trace=False)


def _loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(module), file)
    file.seek(0)
    return torch.jit.load(file)


def _frozen(module: nn.Module) -> nn.Module:
    """Its parameters are constants."""
    return torch.jit.freeze(torch.jit.script(module.eval()))


class _Held(UserDict):
    """A container that is no dict."""

    def __init__(self, held: dict[str, Any]) -> None:
        super().__init__(held)


class _OtherContainers(Net):
    def __init__(self) -> None:
        super().__init__()
        for name in ("_parameters", "_modules"):
            self.__dict__[name] = _Held(self.__dict__[name])


class _OddDict(dict):
    """A dict whose methods compute what they return."""

    def values(self) -> Any:
        raise NotImplementedError("use items()")

    def __iter__(self) -> Iterator[str]:
        return iter([])


class _OddDicts(Net):
    def __init__(self) -> None:
        super().__init__()
        for name in ("_parameters", "_modules"):
            self.__dict__[name] = _OddDict(self.__dict__[name])


def _part(module: nn.Module) -> nn.Module:
    return nn.Sequential(module, nn.Linear(4, 4))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "script": lambda: torch.jit.script(Net()),
    "script in a part": lambda: _part(torch.jit.script(Net())),
    "trace": lambda: _traced(Net()),
    "trace in a part": lambda: _part(_traced(Net())),
    "loaded": lambda: _loaded(Net()),
    "loaded in a part": lambda: _part(_loaded(Net())),
    "frozen in a part": lambda: _part(_frozen(Net())),
    "fx": lambda: torch.fx.symbolic_trace(Net()),
    "fx in a part": lambda: _part(torch.fx.symbolic_trace(Net())),
    "other containers": _OtherContainers,
    "other containers in a part": lambda: _part(_OtherContainers()),
    "odd dicts": _OddDicts,
}


def _step(model: nn.Module, number: int) -> None:
    model(torch.randn(6, 8)).square().mean().backward()


def _check_trains(name: str, options: dict[str, Any]) -> None:
    comparison = compare_with_ddp(MODULES[name], _step, num_steps=4, **options)
    assert comparison.num_tensors
    comparison.raise_if_different()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODULES)
def test_trains_as_with_ddp(ranks, name, mode):
    ranks(2).run(_check_trains, name, MODES[mode])


def _check_ignored() -> None:
    for name in ("script", "loaded", "fx"):
        module = MODULES[name]()
        ReducerDDP._set_params_and_buffers_to_ignore_for_model(module, ["first.weight"])
        model = ReducerDDP(module)
        _step(model, 0)
        assert "first.weight" not in {each.name for each in model._ddpx.managed}


def test_parameters_of_a_script_may_be_ignored(ranks):
    ranks(2).run(_check_ignored)


def _check_nothing_to_train() -> None:
    for module in (_frozen(Net()), torch.jit.freeze(torch.jit.script(Net().eval()))):
        with pytest.raises(RuntimeError, match="not needed when a module doesn't have any param"):
            ReducerDDP(module)


def test_frozen_script_has_nothing_to_train(ranks):
    ranks(2).run(_check_nothing_to_train)


def _replace_param(module: nn.Module) -> None:
    module.scale = nn.Parameter(torch.zeros(4))


def _replace_layer(module: nn.Module) -> None:
    layer = nn.Linear(16, 4)
    is_script = isinstance(module, torch.jit.ScriptModule)
    module.last = torch.jit.script(layer) if is_script else layer


def _add_layer(module: nn.Module) -> None:
    module.extra = nn.Linear(16, 4)


def _check_replaced(name: str, replace: Callable[[nn.Module], None]) -> None:
    """The backward after the replacement raises, as with modules in Python."""
    model = ReducerDDP(MODULES[name]())
    _step(model, 0)
    replace(model.module)
    with pytest.raises(RuntimeError, match=r"the wrapped module now has \d new parameter"):
        _step(model, 1)


# A script takes no layer of another class, and no further layer.
_REFUSED_BY_TORCH = (("loaded", _replace_layer), ("script", _add_layer), ("loaded", _add_layer))
CASES_OF_REPLACEMENT = [
    (name, replace)
    for name in ("script", "loaded", "fx", "other containers", "odd dicts")
    for replace in (_replace_param, _replace_layer, _add_layer)
    if (name, replace) not in _REFUSED_BY_TORCH
]


@pytest.mark.parametrize(("name", "replace"), CASES_OF_REPLACEMENT)
def test_replacement_in_a_script_is_noticed(ranks, name, replace):
    ranks(2).run(_check_replaced, name, replace)


def _check_mixed_precision(name: str) -> None:
    """DDP refuses scripts here. The gradients are those of the module in Python."""
    config = _MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
    grads = []
    for build in (Net, MODULES[name]):
        torch.manual_seed(0)
        model = ReducerDDP(build(), mixed_precision=config)
        for number in range(3):
            model.zero_grad()
            torch.manual_seed(number + 10 * dist.get_rank())
            _step(model, number)
        grads.append([param.grad for param in model.parameters()])
        assert all(param.dtype is torch.float32 for param in model.parameters())
    for expected, actual in zip(*grads, strict=True):
        assert actual.dtype is torch.float32
        torch.testing.assert_close(actual, expected, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("name", ["script", "loaded", "trace"])
def test_mixed_precision_of_a_script(ranks, name):
    ranks(2).run(_check_mixed_precision, name)


def _check_scripted_wrapper() -> None:
    model = ReducerDDP(nn.Linear(2, 2))
    remedy = r"ReducerDDP\(torch\.jit\.script\(module\)\)"
    for outer in (model, nn.Sequential(model)):
        with pytest.raises(NotImplementedError, match=remedy):
            torch.jit.script(outer)


def test_the_wrapper_is_not_compiled(ranks):
    ranks(1).run(_check_scripted_wrapper)
