"""Parts of a module that FullyShardedDataParallel has wrapped: each rank holds a shard of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from ddpx import ReducerDDP


def _check_refusal(use_orig_params: bool) -> None:
    torch.manual_seed(0)
    # The shards of both ranks have the same shape.
    part = FullyShardedDataParallel(
        nn.Linear(4, 4, bias=False),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )
    module = nn.Sequential(part, nn.Linear(4, 2))
    before = [param.detach().clone() for param in module.parameters()]
    with pytest.raises(ValueError, match="already shards and reduces 1 parameter"):
        ReducerDDP(module)
    assert all(map(torch.equal, before, module.parameters()))
    names = [name for name, _ in part.named_parameters(prefix="0")]
    ReducerDDP._set_params_and_buffers_to_ignore_for_model(module, names)
    model = ReducerDDP(module)
    model(torch.ones(3, 4)).sum().backward()
    assert all(map(torch.equal, before, module.parameters()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_parts_under_fsdp_are_refused(ranks, use_orig_params: bool) -> None:
    ranks(2).run(_check_refusal, use_orig_params)


def _check_ignored_layers(use_orig_params: bool) -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    part = FullyShardedDataParallel(
        inner,
        use_orig_params=use_orig_params,
        ignored_modules=[inner[1]],
        device_id=torch.device("cpu"),
    )
    ignored = set(inner[1].parameters())
    of_fsdp = [name for name, param in part.named_parameters() if param not in ignored]
    ReducerDDP._set_params_and_buffers_to_ignore_for_model(part, of_fsdp)
    model = ReducerDDP(part)
    model(torch.full((3, 4), 1.0 + dist.get_rank())).sum().backward()
    found: list[list[float] | None] = [None, None]
    dist.all_gather_object(found, [param.grad.sum().item() for param in inner[1].parameters()])
    assert found[0] == found[1] is not None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_layers_that_fsdp_ignores_are_averaged(ranks, use_orig_params: bool) -> None:
    ranks(2).run(_check_ignored_layers, use_orig_params)
