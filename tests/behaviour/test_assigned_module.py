"""A script assigns another module to ``wrapper.module`` after wrapping."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from modes import MODES
from torch import nn

from ddpx import ReducerDDP


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def _step(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.full((2, 4), dist.get_rank() + 1.0)).square().sum().backward()


def _assert_averaged(model: nn.Module) -> None:
    for param in model.parameters():
        assert param.grad is not None
        mean = param.grad.clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(param.grad, mean / 2)


# How a script makes the new module of the old one, and names of the parameters that are new.
NEW: dict[str, tuple[Callable[[nn.Module], nn.Module], set[str]]] = {
    "another module": (lambda _: _net(), {"0.weight", "0.bias", "1.weight", "1.bias"}),
    "a layer more": (lambda old: nn.Sequential(old, nn.Linear(2, 2)), {"1.weight", "1.bias"}),
}


def _check_new_params(name: str, options: dict[str, Any]) -> None:
    make, names = NEW[name]
    model = ReducerDDP(_net(), **options)
    for _ in range(2):
        _step(model)
    model.module = make(model.module)
    with pytest.raises(RuntimeError, match=r"new parameter.*wrap the module again") as caught:
        _step(model)
    for each in names:
        assert each in str(caught.value)
    twin = copy.deepcopy(model)  # averages all parameters of its module
    again = ReducerDDP(model.module, **options)
    for each in (twin, again):
        for _ in range(2):
            _step(each)
            _assert_averaged(each)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NEW)
def test_new_parameters_are_an_error(ranks, name, mode):
    """Their gradients would stay local. With DDP they do, silently."""
    ranks(2).run(_check_new_params, name, MODES[mode])


def _check_same_params(options: dict[str, Any]) -> None:
    model = ReducerDDP(_net(), **options)
    for make in (nn.Sequential, torch.jit.script, lambda module: module):
        model.module = make(model.module)
        for _ in range(2):
            _step(model)
            _assert_averaged(model)
        with patch.object(nn.Module, "named_parameters", side_effect=AssertionError("slow")):
            model(torch.ones(2, 4))  # the first forward has looked at the module


@pytest.mark.parametrize("mode", MODES)
def test_a_module_with_the_same_parameters_trains(ranks, mode):
    ranks(2).run(_check_same_params, MODES[mode])


class _Teacher(nn.Linear):
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def _check_evaluation() -> None:
    model = ReducerDDP(_net())
    _step(model)
    student, model.module = model.module, _Teacher(4, 2)
    assert not model(torch.ones(2, 4)).requires_grad
    model.module = student
    _step(model)
    _assert_averaged(model)


def test_another_module_may_evaluate(ranks):
    ranks(2).run(_check_evaluation)


def _check_size_of_a_copy() -> None:
    model = ReducerDDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 100_000)))
    _step(model)
    model.module[1] = nn.Identity()
    assert len(pickle.dumps(model)) < 100_000


def test_a_copy_has_no_parameters_of_a_former_layer(ranks):
    ranks(2).run(_check_size_of_a_copy)


class _NotDescribed(torch.Tensor):
    """A subclass that raises when it is looked at."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("only the library may call this")


class _WithOwnTensors(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).as_subclass(_NotDescribed)


def _check_output_of_a_subclass() -> None:
    model = ReducerDDP(_WithOwnTensors(nn.Linear(4, 4)))
    model.module[0] = nn.Linear(4, 4)
    output = model(torch.ones(2, 4))
    with (
        torch._C.DisableTorchFunctionSubclass(),
        pytest.raises(RuntimeError, match=r"2 new parameters: 0\.weight, 0\.bias"),
    ):
        output.sum().backward()


def test_new_parameters_behind_an_output_that_is_not_described(ranks):
    ranks(2).run(_check_output_of_a_subclass)


def _check_frozen_layer() -> None:
    model = ReducerDDP(_net())
    model.module.append(nn.Linear(2, 2).requires_grad_(False))
    for _ in range(2):
        _step(model)
        assert all(param.grad is None for param in model.module[2].parameters())
        _assert_averaged(model.module[:2])


def test_a_frozen_layer_may_be_added(ranks):
    ranks(2).run(_check_frozen_layer)


def _check_functional_calls(options: dict[str, Any]) -> None:
    """Tensors of ``functional_call()`` do not become parameters of the assigned module."""
    model = ReducerDDP(_net(), **options)
    _step(model)
    model.module = nn.Sequential(*model.module)
    others = {name: param.detach().clone() for name, param in model.named_parameters()}
    for tensor in others.values():
        tensor.requires_grad_()
    for _ in range(3):
        torch.func.functional_call(model, others, torch.ones(2, 4)).sum().backward()
    for _ in range(2):
        _step(model)
        _assert_averaged(model)


@pytest.mark.parametrize("mode", MODES)
def test_functional_calls(ranks, mode):
    ranks(2).run(_check_functional_calls, MODES[mode])
