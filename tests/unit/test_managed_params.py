"""Which parameters take part, under which names, and which gradients they may get."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpx import params
from ddpx.params.delayed import DelayedParams
from ddpx.params.grad_dtypes import GradDtypes


def _tied() -> nn.Module:
    """The weight is the embedding's and the linear layer's."""
    module = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 4))
    module[1].weight = module[0].weight
    return module


def _described(managed: list[params.ManagedParam]) -> list[tuple[str, bool]]:
    return [(param.name, param.expect_sparse) for param in managed]


def test_a_shared_param_has_its_first_name() -> None:
    found = params.managed_params(_tied(), ())
    assert _described(found) == [("0.weight", True), ("1.bias", False)]


def test_a_shared_param_is_ignored_only_under_an_ignored_name() -> None:
    found = params.managed_params(_tied(), ("0.weight",))
    assert _described(found) == [("1.weight", False), ("1.bias", False)]


def test_an_override_chooses_names_and_sparse_gradients() -> None:
    managed = params.managed_params(_tied(), ())
    weight, bias = (param.tensor for param in managed)
    found = params.choose(managed, [bias, weight], [True, False], {0: "b", 1: "w"})
    assert _described(found) == [("b", True), ("w", False)]
    assert [param.tensor for param in found] == [bias, weight]


@pytest.mark.parametrize("param_dtype", [None, torch.float32, torch.half])
def test_gradients_of_another_dtype_are_allowed_only_where_needed(
    param_dtype: torch.dtype | None,
) -> None:
    managed = params.managed_params(nn.Linear(2, 2, bias=False), ())
    grad_dtypes = GradDtypes(managed, None, None, param_dtype)
    assert managed[0].tensor.grad_dtype is (None if param_dtype is torch.half else torch.float32)
    grad_dtypes.reset()
    assert managed[0].tensor.grad_dtype is torch.float32


@pytest.mark.parametrize("grad_dtype", [None, torch.float64])
def test_the_grad_dtype_of_a_script_comes_back(grad_dtype: torch.dtype | None) -> None:
    managed = params.managed_params(nn.Linear(2, 2, bias=False), ())
    param = managed[0].tensor
    param.grad_dtype = grad_dtype
    grad_dtypes = GradDtypes(managed, None, torch.float64, None)
    grad_dtypes.apply()  # no effect
    param.grad = torch.ones(2, 2, dtype=torch.float64)
    grad_dtypes.reset()
    assert param.grad_dtype is grad_dtype
    assert param.grad.dtype is (grad_dtype or torch.float32)


def test_a_later_cast_casts_gradients_too() -> None:
    module = nn.Linear(2, 2, bias=False)
    grad_dtypes = GradDtypes(params.managed_params(module, ()), torch.float64, None, None)
    module(torch.ones(1, 2)).sum().backward()
    grad_dtypes.reset()
    for dtype in (torch.float64, torch.bfloat16):
        module.zero_grad()
        module.to(dtype)
        module(torch.ones(1, 2, dtype=dtype)).sum().backward()
        assert module.weight.grad.dtype is module.weight.grad_dtype is dtype


def test_integers_stay_frozen() -> None:
    numbers = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
    weight = nn.Parameter(torch.ones(2), requires_grad=False)
    with params.unfrozen([numbers, weight]):
        assert weight.requires_grad and not numbers.requires_grad
    assert not weight.requires_grad


def test_no_delayed_param_needs_no_trigger() -> None:
    managed = params.managed_params(nn.Linear(2, 2), ())
    assert DelayedParams([], managed[0].tensor).mark(managed) == (managed, None)


def test_ignored_tensors_take_no_part() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module[0].requires_grad_(False)
    ignored = ("0.bias", "1.running_mean")
    assert [param.name for param in params.frozen_params(module, ignored)] == ["0.weight"]
    names = [name for name, _ in params.named_state(module, ignored, with_buffers=True)]
    assert names == ["0.weight", "1.weight", "1.bias", "1.running_var", "1.num_batches_tracked"]
