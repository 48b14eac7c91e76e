"""Features of torch, common recipes and own calls of the engine give DDP's bits in each mode."""

from __future__ import annotations

import engine_usages
import feature_usages
import pytest
import torch
import torch.distributed as dist
from modes import MODES
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP

USAGES = feature_usages.USAGES | engine_usages.USAGES


def _trained(usage: str, mode: str, cls: type[nn.Module]) -> feature_usages.State:
    torch.manual_seed(0)

    def wrap(module: nn.Module) -> nn.Module:
        model = cls(module, bucket_cap_mb=0.0005, **MODES[mode])
        torch.manual_seed(100 + dist.get_rank())  # other inputs on each rank
        return model

    return USAGES[usage](wrap)


def _check(usage: str, mode: str) -> None:
    expected, ours = (_trained(usage, mode, cls) for cls in (DistributedDataParallel, ReducerDDP))
    assert expected
    for theirs, own in zip(expected, ours, strict=True):
        assert torch.equal(theirs, own)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("usage", USAGES)
def test_usage(ranks, usage, mode):
    ranks(2).run(_check, usage, mode)
