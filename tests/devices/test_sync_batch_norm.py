"""SyncBatchNorm under ReducerDDP: its collective calls run between the all-reduces of buckets."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import sync_batch_norm_kernels
import torch
import torch.distributed as dist
from device_ranks import on_devices
from parity_cases import MODES
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP
from ddpx.testing import Comparison, compare_traces, record_training
from ddpx.testing.compare import summarize

pytestmark = pytest.mark.timeout(120)

WIDTH = 12
BATCH = 6
CAPS: tuple[dict[str, Any], ...] = ({}, {"bucket_cap_mb": 0.0005})  # the second: many buckets


def _net() -> nn.Sequential:
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()]
    return nn.Sequential(*(copy.deepcopy(layer) for _ in range(3) for layer in layers))


def _synchronized() -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(_net())


def _step(model: nn.Module, number: int) -> None:
    model(torch.randn(BATCH, WIDTH)).square().mean().backward()


def _use_kernels(device: str) -> None:
    if device == "late":
        sync_batch_norm_kernels.install_kernels("PrivateUse1")


def _compare_with_ddp(device: str, mode: str) -> list[Comparison]:
    _use_kernels(device)
    with torch.device(device):
        return [
            compare_traces(
                *(
                    record_training(
                        _synchronized,
                        lambda module, wrapper=wrapper, caps=caps: wrapper(
                            module, **MODES[mode], **caps
                        ),
                        _step,
                    )
                    for wrapper in (DistributedDataParallel, ReducerDDP)
                )
            )
            for caps in CAPS
        ]


@on_devices(2)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.replace(" ", "-"))
def test_bits_of_ddp(device_ranks, device, mode, world_size):
    ranks = device_ranks(device, world_size)
    per_rank = ranks.run(_compare_with_ddp, device, mode, timeout=100)  # some 300 calls
    for comparisons in zip(*per_rank, strict=True):
        total = summarize(list(comparisons))
        assert total.identical, "\n".join(total.differences[:20])


def _compare_with_whole_batch(device: str, of_layers: str) -> None:
    """The ranks have parts of one batch. Of several ranks, the last has an empty part."""
    _use_kernels(device)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = _net().double()
    group = dist.new_group() if of_layers == "own group" else None
    part = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(whole), group).to(device)
    model = ReducerDDP(part, bucket_cap_mb=0.0005)
    sizes = [BATCH + r for r in range(size)]
    if size > 1:
        sizes[-1] = 0
    for number in range(4):
        torch.manual_seed(100 + number)
        batch = torch.randn(sum(sizes), WIDTH, dtype=torch.float64)
        whole.zero_grad()
        whole(batch).square().sum().backward()
        model.zero_grad()
        model(batch.split(sizes)[rank].to(device)).square().sum().backward()
        for (name, expected), found in zip(
            whole.named_parameters(), part.parameters(), strict=True
        ):
            assert expected.grad is not None and found.grad is not None
            torch.testing.assert_close(
                found.grad.cpu() * size, expected.grad, msg=lambda text, name=name: name + text
            )
        for expected, found in zip(whole.buffers(), part.buffers(), strict=True):
            torch.testing.assert_close(found.cpu(), expected)


@on_devices(2, 3)
@pytest.mark.parametrize("of_layers", ["wrapper's group", "own group"])
def test_gradients_of_the_whole_batch(device_ranks, device, world_size, of_layers):
    device_ranks(device, world_size).run(_compare_with_whole_batch, device, of_layers)
