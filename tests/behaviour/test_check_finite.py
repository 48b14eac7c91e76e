"""``check_finite`` reports NaN and infinity with step, rank and parameter, on every rank."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from modes import MODES_OF_DDPX as MODES
from torch import nn

from ddpx import ReducerDDP


class _Spoiled(nn.Module):
    """Three layers. ``spoil`` makes the gradients of their weights NaN or infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
        self.spoil: dict[int, float] = {}  # layer index -> factor of the weight's gradient
        for index, layer in enumerate(self.layers):
            layer.weight.register_hook(lambda grad, i=index: grad * self.spoil.get(i, 1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def _error_of_step(model: nn.Module) -> str:
    try:
        model(torch.ones(2, 4)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def _spoiled_steps(options: dict[str, Any]) -> list[str]:
    module = _Spoiled()
    model = ReducerDDP(module, **options)
    model.set_check_finite()
    texts = [_error_of_step(model)]
    if dist.get_rank() == 1:
        module.spoil = {1: float("inf")}
    texts.append(_error_of_step(model))
    model.zero_grad()
    module.spoil = {0: float("nan"), 2: float("nan")} if dist.get_rank() == 0 else {}
    texts.append(_error_of_step(model))
    model.zero_grad()
    module.spoil = {}
    texts.append(_error_of_step(model))
    model.set_check_finite(False)
    module.spoil = {1: float("inf")}
    texts.append(_error_of_step(model))
    return texts


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_first_of_each_rank_is_named(ranks, world, options):
    for good, inf, nan, again, unchecked in ranks(world).run(_spoiled_steps, options):
        assert good == again == unchecked == ""
        assert (
            "step 1, phase end of backward] gradients contain NaN or infinity, first in "
            "'layers.1.weight' on rank 1. " in inf
        )
        # The gradient of the last layer arrives first.
        assert (
            "step 2, phase end of backward] gradients contain NaN or infinity, first in "
            "'layers.2.weight' on rank 0. " in nan
        )


def _first_step(options: dict[str, Any]) -> str:
    module = _Spoiled()
    model = ReducerDDP(module, **options)
    model.set_check_finite()
    module.spoil = {1: float("nan"), 2: float("nan")}
    return _error_of_step(model)


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_in_the_first_step_too(ranks, options):
    for text in ranks(2).run(_first_step, options):
        assert "step 0" in text
        assert "first in 'layers.2.weight' on rank 0, 'layers.2.weight' on rank 1. " in text
        assert "the inputs and the loss of ranks 0, 1. " in text


def _refused_value() -> None:
    model = ReducerDDP(_Spoiled())
    with pytest.raises(TypeError, match=r"^enabled must be True or False, but got 'yes'"):
        model.set_check_finite("yes")  # type: ignore[arg-type]


def test_value_that_is_no_bool_is_refused(ranks):
    ranks(1).run(_refused_value)


def _accumulated() -> tuple[str, str]:
    module = _Spoiled()
    model = ReducerDDP(module)
    model.set_check_finite()
    module.spoil = {2: float("inf")} if dist.get_rank() == 1 else {}
    with model.no_sync():
        local = _error_of_step(model)
    module.spoil = {}
    return local, _error_of_step(model)


def test_accumulated_gradients(ranks):
    for local, averaged in ranks(2).run(_accumulated):
        assert local == ""
        assert "first in 'layers.2.weight' on rank 1" in averaged


def _uneven() -> str:
    module = _Spoiled()
    model = ReducerDDP(module)
    model.set_check_finite()
    try:
        with model.join():
            for step in range(1 + 2 * dist.get_rank()):
                module.spoil = {0: float("inf")} if step == 2 else {}
                model(torch.ones(2, 4)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_have_run_out_hear_of_it(ranks):
    for text in ranks(2).run(_uneven):
        assert "step 2, " in text and "first in 'layers.0.weight' on rank 1" in text


def _by_environment() -> str:
    os.environ["DDPX_CHECK_FINITE"] = "1"
    try:
        module = _Spoiled()
        model = ReducerDDP(module)
    finally:
        del os.environ["DDPX_CHECK_FINITE"]
    module.spoil = {0: float("inf")}
    return _error_of_step(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_by_environment(ranks, world_size):
    for text in ranks(world_size).run(_by_environment):
        assert "layers.0.weight" in text


def _sparse_and_complex() -> list[str]:
    texts = []
    embedding = ReducerDDP(nn.Embedding(5, 3, sparse=True))
    embedding.set_check_finite()
    scale = float("nan") if dist.get_rank() == 1 else 1.0
    try:
        (embedding(torch.tensor([1, 2])) * scale).sum().backward()
    except RuntimeError as error:
        texts.append(str(error))
    linear = ReducerDDP(nn.Linear(2, 2, dtype=torch.complex64))
    linear.set_check_finite()
    try:
        (linear(torch.ones(1, 2, dtype=torch.complex64)) * scale).abs().sum().backward()
    except RuntimeError as error:
        texts.append(str(error))
    return texts


def test_sparse_and_complex_gradients(ranks):
    for texts in ranks(2).run(_sparse_and_complex):
        assert "first in 'weight' on rank 1" in texts[0]
        assert re.search("first in '[a-z]+' on rank 1", texts[1])
