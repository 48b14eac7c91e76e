"""Capture into a graph succeeds wherever DDP's does."""

from __future__ import annotations

import capture_cases as cases
import pytest
from device_models import check
from device_ranks import on_devices, skip_gloo_on_cuda

pytestmark = pytest.mark.timeout(120)
MODES = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static view": {"static_graph": True, "gradient_as_bucket_view": True},
    "batched": {"batched_grad_copy": True},
}


@on_devices(1, 2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("between", cases.BETWEEN)
def test_no_stream_is_remembered_between_steps(device_ranks, device, world_size, mode, between):
    skip_gloo_on_cuda(device, world_size, "gloo synchronises")
    ranks = device_ranks(device, world_size)
    check(ranks.run(cases.captured_after_work_on_another_stream, device, between, **MODES[mode]))
