"""Steps of a module on two devices."""

from __future__ import annotations

import pytest
import torch
import two_device_cases as cases
from device_models import check
from device_ranks import on_nccl

pytestmark = pytest.mark.timeout(120)


def _skip_one_gpu(device: str) -> None:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device only")


@on_nccl(2)
def test_the_wait_for_gradients_is_one_for_both(device_ranks, device, world_size):
    _skip_one_gpu(device)
    assert device_ranks(device, world_size).run(cases.wait_for_gradients, device) == [True] * 2


def test_a_recording_lets_no_device_wait(device_ranks):
    for alone_s, recorded_s in device_ranks("late", 2).run(cases.record, "late"):
        assert max(alone_s, recorded_s) < cases.SLOW_MS / 1000, "backward waits for an all-reduce"


@on_nccl(2)
def test_the_count_of_right_averages_is_that_of_both(device_ranks, device, world_size):
    _skip_one_gpu(device)
    assert device_ranks(device, world_size).run(cases.count_steps, device) == [(3, 4)] * 2


@on_nccl(2)
@pytest.mark.parametrize("mode", [{}, {"gradient_as_bucket_view": True}], ids=["", "view"])
def test_unused_gradients_of_one_device_on_side_streams(device_ranks, device, world_size, mode):
    _skip_one_gpu(device)
    ranks = device_ranks(device, world_size)
    check(ranks.run(cases.leave_the_second_device_unused, device, **mode))
