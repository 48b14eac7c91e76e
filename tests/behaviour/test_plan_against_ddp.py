"""Compares the buckets of each step with those that DDP's communication hook gets."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import torch.distributed as dist
from one_thread_gloo import one_thread_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP

NUM_STEPS = 4
MODES = {
    "default": {},
    "static": {"static_graph": True},
    "find unused": {"find_unused_parameters": True},
    "static, find unused": {"static_graph": True, "find_unused_parameters": True},
}
CAPS = {
    "left out": {},
    "25": {"bucket_cap_mb": 25},
    "1": {"bucket_cap_mb": 1},
    "tiny": {"bucket_cap_mb": 0.001},
    "listed": {"bucket_cap_mb_list": [0.25, 2, 1.5]},
}


class Tower(nn.Module):
    """Ten layers of 1 MiB, used in another order than registered. One layer is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 512, sparse=True)
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(10))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for index in (3, 1, 2, 0, 7, 5, 6, 4, 9, 8):
            x = self.layers[index](x)
        return x


def _ddp_buckets(options: dict) -> list[list[list[str]]]:
    model = Tower()
    names = {id(param): name for name, param in model.named_parameters()}
    group = one_thread_group()
    ddp = DistributedDataParallel(model, process_group=group, **options)
    seen: list[list[str]] = []

    # No annotations here: DDP compares them by identity, which fails for postponed annotations.
    def hook(state, bucket):
        seen.append([names[id(param)] for param in bucket.parameters()])
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    ddp.register_comm_hook(None, hook)
    steps = []
    for _ in range(NUM_STEPS):
        seen.clear()
        ddp(torch.arange(4)).sum().backward()
        steps.append(list(seen))
    return steps


def _our_buckets(options: dict) -> list[list[list[str]]]:
    model = Tower()
    names = [name for name, _ in model.named_parameters()]
    ours = ReducerDDP(model, process_group=one_thread_group(), **options)
    steps = []
    for _ in range(NUM_STEPS):
        loss = ours(torch.arange(4)).sum()
        steps.append([[names[i] for i in bucket] for bucket in ours.reducer.plan.buckets])
        loss.backward()
    return steps


def _compare(options: dict) -> None:
    assert _our_buckets(options) == _ddp_buckets(options)


@pytest.mark.parametrize("caps", CAPS)
@pytest.mark.parametrize("mode", MODES)
def test_same_buckets_in_the_same_order_at_each_step(ranks, mode, caps):
    missing = CAPS[caps].keys() - inspect.signature(DistributedDataParallel).parameters.keys()
    if missing:
        pytest.skip(f"DDP of torch {torch.__version__} has no {', '.join(missing)}")
    ranks(2).run(_compare, {**MODES[mode], **CAPS[caps]})


def _check_static_graph_set_later() -> None:
    """The first step then has one bucket, as with ``static_graph=True``."""
    layers = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600))
    sizes = []
    for at_construction in (True, False):
        model = ReducerDDP(
            copy.deepcopy(layers), static_graph=at_construction, find_unused_parameters=True
        )
        if not at_construction:
            with pytest.warns(UserWarning, match="find_unused_parameters=True has no effect"):
                model._set_static_graph()
        for _ in range(3):
            sizes.append(model._get_ddp_logging_data()["bucket_sizes"])
            model(torch.ones(1, 600)).sum().backward()
        model.reducer.set_static_graph()  # no effect
        sizes.append(model._get_ddp_logging_data()["bucket_sizes"])
    assert set(sizes) == {str(2 * 4 * (600 * 600 + 600))}


def test_first_buckets_of_a_static_graph_that_is_set_later(ranks):
    ranks(2).run(_check_static_graph_set_later)
