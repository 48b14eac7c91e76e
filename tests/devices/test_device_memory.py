"""The memory of dropped buckets is not used again before their work has ended."""

from __future__ import annotations

import memory_cases as cases
import pytest
from device_models import check
from device_ranks import on_devices, on_nccl

pytestmark = pytest.mark.timeout(120)
VIEWS = pytest.mark.parametrize("views", [False, True], ids=["", "view"])


@on_devices(2)
@pytest.mark.parametrize("hook", cases.HOOKS)
def test_a_step_that_fails_before_hooks_end(device_ranks, device, world_size, hook):
    check(device_ranks(device, world_size).run(cases.a_step_fails_before_hooks_end, device, hook))


@on_devices(2)
def test_a_refused_result_before_hooks_end(device_ranks, device, world_size):
    ranks = device_ranks(device, world_size)
    check(ranks.run(cases.a_result_is_refused_before_hooks_end, device))


@on_devices(1, 2)
@VIEWS
def test_a_wrapper_that_is_dropped_before_its_work_ends(device_ranks, device, world_size, views):
    case = cases.a_wrapper_is_dropped_before_its_work_ends
    check(device_ranks(device, world_size).run(case, device, gradient_as_bucket_view=views))


@on_devices(2, 3)  # three ranks pack small gradients together
@pytest.mark.parametrize("batched", [False, True], ids=["", "batched"])
def test_local_gradients_in_another_dtype(device_ranks, device, world_size, batched):
    case = cases.local_gradients_in_another_dtype
    check(device_ranks(device, world_size).run(case, device, batched_grad_copy=batched))


@on_devices(2)
@VIEWS
def test_the_result_of_a_hook_on_a_side_stream(device_ranks, device, world_size, views):
    case = cases.a_result_of_a_side_stream
    check(device_ranks(device, world_size).run(case, device, gradient_as_bucket_view=views))


@on_devices(2)
@VIEWS
def test_the_sum_of_a_group_on_a_side_stream(device_ranks, device, world_size, views):
    case = cases.a_sum_of_a_side_stream
    check(device_ranks(device, world_size).run(case, device, gradient_as_bucket_view=views))


@on_devices(2)
def test_use_that_is_exchanged_on_alternating_streams(device_ranks, device, world_size):
    case = cases.use_exchanged_on_alternating_streams
    check(device_ranks(device, world_size).run(case, device))


@on_nccl(1, 2)
@VIEWS
def test_a_capture_gets_no_memory_of_the_backend(device_ranks, device, world_size, views):
    if device != "late":
        pytest.skip("torch's NCCL does not count allocations")
    case = cases.allocated_in_a_capture
    ranks = device_ranks(device, world_size)
    assert set(ranks.run(case, device, gradient_as_bucket_view=views)) == {0}
