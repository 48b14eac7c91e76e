"""torch's hooks that overlap ZeroRedundancyOptimizer with backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from both_wrappers import SMALL_CAP, WRAPPERS, Mlp, assert_same_on_all_ranks, mlp_step
from modes import MODES
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer


def _train(cls: Callable[..., Any], options: dict[str, Any], shard: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = cls(Mlp(), **options, **SMALL_CAP)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1
    )
    # The hook refuses gloo by name, because collectives that it starts on other threads may hang
    # there. This hook (not the interleaved one) starts all of them on the thread of backward.
    with mock.patch.object(dist, "get_backend", return_value="nccl"):
        hook = ddp_zero_hook.hook_with_zero_step(allreduce_hook, model, optimizer, shard)
    model.register_comm_hook(None, hook)
    weights = []
    for number in range(7):
        torch.manual_seed(10 * number + dist.get_rank())
        model.zero_grad()
        mlp_step(model)
        weights.append([param.detach().clone() for param in model.parameters()])
    assert not torch.equal(weights[-1][0], weights[-2][0])
    assert_same_on_all_ranks(*weights[-1])
    return [weight for step in weights for weight in step]


def _check(mode: str, shard: bool) -> None:
    theirs, ours = (_train(cls, MODES[mode], shard) for cls in WRAPPERS)
    assert len(ours) == len(theirs)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("mode", ["default", "view", "static"])
@pytest.mark.parametrize("shard", [False, True], ids=["whole buckets", "sharded buckets"])
def test_step_in_the_last_bucket(ranks, shard, mode):
    ranks(2).run(_check, mode, shard)
