"""Post-local SGD: the hook, with torch's model averagers and its optimizer."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from both_wrappers import SMALL_CAP, Mlp, Wrapper, assert_trains_alike, mlp_step
from modes import MODES
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager,
)
from torch.distributed.optim import PostLocalSGDOptimizer

from ddpx import ReducerDDP

_START = 3


def _alone() -> dist.ProcessGroup:
    """A subgroup of this rank alone."""
    group, _ = dist.new_subgroups(group_size=1)
    return group


def _wrap(
    cls: Callable[..., Wrapper],
    module: nn.Module,
    options: dict[str, Any],
    subgroup: dist.ProcessGroup,
    local_allreduce: bool,
) -> Wrapper:
    model = cls(module, **options)
    state = PostLocalSGDState(
        process_group=None,
        subgroup=subgroup,
        start_localSGD_iter=_START,
        post_local_gradient_allreduce=local_allreduce,
    )
    model.register_comm_hook(state, post_localSGD_hook)
    return model


def _periodic() -> Any:
    return PeriodicModelAverager(period=2, warmup_steps=_START)


def _hierarchical() -> Any:
    return HierarchicalModelAverager(
        period_group_size_dict=OrderedDict([(2, dist.get_world_size())]), warmup_steps=_START
    )


def _check(mode: str, local_allreduce: bool, make_averager: Callable[[], Any]) -> None:
    subgroup = _alone()

    def wrap(cls: Callable[..., Wrapper], module: nn.Module) -> Wrapper:
        return _wrap(cls, module, MODES[mode] | SMALL_CAP, subgroup, local_allreduce)

    def make_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return PostLocalSGDOptimizer(torch.optim.SGD(params, lr=0.1), make_averager())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_trains_alike(Mlp, wrap, mlp_step, num_steps=8, make_optimizer=make_optimizer)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make_averager", [_periodic, _hierarchical])
@pytest.mark.parametrize("local_allreduce", [True, False], ids=["subgroup", "no all-reduce"])
def test_post_local_sgd(ranks, local_allreduce, make_averager, mode):
    ranks(2).run(_check, mode, local_allreduce, make_averager)


def _check_turns_local() -> None:
    """Gradients are averaged until the start step, and local from that step on."""
    model = _wrap(ReducerDDP, nn.Linear(1, 1, bias=False), {}, _alone(), True)
    grads = []
    for _ in range(2 * _START):
        model.zero_grad()
        model(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
        grads.append(model.module.weight.grad.item())
    assert grads == [1.5] * _START + [dist.get_rank() + 1.0] * _START


def test_gradients_turn_local(ranks):
    ranks(2).run(_check_turns_local)
