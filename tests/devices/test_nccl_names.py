"""The classes of NCCL: calls are counted, groups are aborted, buckets lie in the backend's memory.

torch 2.15 has several classes, and a group gives them the type NCCL or CUSTOM. The late device
stands for a GPU, and its backend for each class.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import late_device
import pytest
import torch
import torch.distributed as dist
from device_ranks import DeviceRanks
from nccl_classes import BACKENDS, COUNTING, make_group
from torch import nn

import ddpx

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def ranks(late_library: None) -> Iterator[DeviceRanks]:
    """New ranks, since a test may make them fail."""
    made = DeviceRanks("late", 2)
    yield made
    made.close()


def _step(model: nn.Module) -> None:
    model.zero_grad()
    inputs = torch.full((1, 4), float(dist.get_rank() + 1), device="late")
    model(inputs).sum().backward()
    assert torch.equal(model.module.weight.grad.cpu(), torch.full((4, 4), 1.5))


@dataclass
class _Found:
    text: str
    num_aborts: int


def _one_more_call(name: str) -> _Found:
    """Rank 1 makes one more call, of the size of a bucket. Only the number of calls can tell."""
    group, backend = make_group(name)
    model = ddpx.ReducerDDP(nn.Linear(4, 4).to("late"), process_group=group)
    for _ in range(2):  # later steps make no calls but those for buckets
        _step(model)
    extra = torch.zeros(20, device="late")
    if dist.get_rank() == 1:
        group.allreduce([extra])
    try:
        for _ in range(100):  # the host does not wait for the other rank
            model(torch.ones(1, 4, device="late")).sum().backward()
            time.sleep(0.05)
        text = ""
    except ddpx.RankMismatch as error:
        text = str(error)
    deadline = time.monotonic() + 5
    while text and not backend.num_aborts and time.monotonic() < deadline:
        time.sleep(0.01)
    _meet_unmatched_calls(backend, extra)
    return _Found(text, backend.num_aborts)


def _meet_unmatched_calls(backend: Any, tensor: torch.Tensor) -> None:
    numbers = [0] * dist.get_world_size()
    dist.all_gather_object(numbers, backend.num_calls)
    for _ in range(max(numbers) - backend.num_calls):
        backend.allreduce([tensor]).wait()
    late_device.load().synchronize(0)


@pytest.mark.parametrize("name", COUNTING)
def test_calls_are_counted_and_the_group_is_aborted(ranks, name):
    for rank, found in enumerate(ranks.run(_one_more_call, name)):
        assert "rank 1 made one more collective call than rank 0, " in found.text, (rank, found)
        assert found.num_aborts == 1


def _train(name: str) -> int:
    group, backend = make_group(name)
    model = ddpx.ReducerDDP(
        nn.Linear(4, 4).to("late"), process_group=group, gradient_as_bucket_view=True
    )
    for _ in range(3):
        _step(model)
    assert model._get_ddp_logging_data()["transport"] == BACKENDS[name][0]
    return int(backend.num_allocations)


@pytest.mark.parametrize("name", BACKENDS)
def test_buckets_lie_in_the_memory_of_the_backend(ranks, name):
    assert all(number > 0 for number in ranks.run(_train, name))


def _come_late(name: str) -> list[str]:
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ddpx.health").addHandler(handler)
    ddpx.set_stall_timeout(warn=0.3)
    group, _ = make_group(name)
    model = ddpx.ReducerDDP(nn.Linear(4, 4).to("late"), process_group=group)
    _step(model)
    if dist.get_rank() == 1:
        time.sleep(1.5)
    ddpx.ReducerDDP(nn.Linear(4, 4).to("late"), process_group=group)
    time.sleep(0.5)  # the log has a thread of its own
    return texts


@pytest.mark.parametrize("name", BACKENDS)
def test_late_ranks_are_named(ranks, name):
    texts = ranks.run(_come_late, name)[0]
    assert any("rank 1" in text for text in texts), texts
