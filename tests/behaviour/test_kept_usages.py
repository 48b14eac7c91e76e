"""Usages that must keep working, with one test each."""

from __future__ import annotations

import copy
import threading

import torch
import torch.distributed as dist
from slow_ddp import SMALL_CAP, Net, build_same, check_steps, data, make_pair, modes, plain_step
from torch import nn
from torch.nn.utils import parametrizations

from ddpx import ReducerDDP


def _check_export() -> None:
    """The inner module is exported before the first step and between steps."""
    ours, slow = make_pair(Net, "default")
    x = data()
    for _ in range(2):
        exported = torch.export.export(ours.module, (x,)).module()
        torch.testing.assert_close(exported(x), ours.module(x))
        check_steps(ours, slow, plain_step, num_steps=2)


def test_export_of_the_inner_module(ranks):
    ranks(2).run(_check_export, timeout=90.0)


def _check_two_threads() -> None:
    """Each of two threads trains a model over its own group."""
    groups = [dist.new_group() for _ in range(2)]
    module = build_same(Net)
    models = [
        ReducerDDP(copy.deepcopy(module), process_group=group, bucket_cap_mb=SMALL_CAP)
        for group in groups
    ]
    inputs = torch.stack([data() for _ in range(20)])
    errors: list[BaseException] = []

    def train(model: ReducerDDP) -> None:
        try:
            for x in inputs:
                model.zero_grad()
                model(x).square().sum().backward()
                with torch.no_grad():
                    for param in model.parameters():
                        param -= 0.01 * param.grad
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    alone = ReducerDDP(copy.deepcopy(module), bucket_cap_mb=SMALL_CAP)
    train(alone)
    for model in models:
        for param, expected in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(param, expected)


def test_two_models_in_two_threads(ranks):
    ranks(2).run(_check_two_threads)


def _check_thousand_wrappers() -> None:
    """A thousand wrappers exist at the same time, and each runs a step."""
    wrappers = [ReducerDDP(nn.Linear(2, 1, bias=False)) for _ in range(1000)]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for wrapper in wrappers:
        wrapper(torch.full((1, 2), 1.0 + rank)).sum().backward()
    mean = (world_size + 1) / 2
    assert all(wrapper.module.weight.grad.eq(mean).all() for wrapper in wrappers)


def test_a_thousand_wrappers_in_a_process(ranks):
    ranks(2).run(_check_thousand_wrappers)


class Parametrized(Net):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.first)
        parametrizations.orthogonal(self.second)


def _check_parametrized(mode: str) -> None:
    ours, slow = make_pair(Parametrized, mode)
    check_steps(ours, slow, plain_step, num_steps=3)


@modes
def test_parametrized_before_wrapping(ranks, mode):
    ranks(2).run(_check_parametrized, mode)
