"""torch's profiler shows the reducer's work on each bucket."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ddpx import ReducerDDP

_NUM_LAYERS = 4
_NUM_BUCKETS = 2


def _names(model: ReducerDDP) -> Counter[str]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(torch.ones(2, 8)).sum().backward()
    return Counter(event.name for event in profiler.events() if event.name.startswith("ddpx::"))


def _check_names(batched: bool) -> None:
    layers = [nn.Linear(8, 8, bias=False) for _ in range(_NUM_LAYERS)]
    options = {"batched_grad_copy": True} if batched else {}
    model = ReducerDDP(nn.Sequential(*layers), bucket_cap_mb=2 * 8 * 8 * 4 / 2**20, **options)
    for _ in range(2):  # buckets are rebuilt after the first step
        model(torch.ones(2, 8)).sum().backward()
    num_buckets = len(model.reducer.plan.buckets)
    assert num_buckets == _NUM_BUCKETS
    # otherwise each gradient is packed separately
    num_packs = num_buckets if batched else _NUM_LAYERS
    counts = {f"ddpx::{name}": num_buckets for name in ("launch", "wait", "write_back")}
    assert _names(model) == {**counts, "ddpx::pack": num_packs}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("batched", [False, True])
def test_bucket_is_packed_launched_waited_for_and_written_back(ranks, batched):
    ranks(2).run(_check_names, batched)
