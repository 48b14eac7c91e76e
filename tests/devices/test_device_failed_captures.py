"""A capture that cannot succeed is refused by name. After a failed one the wrapper trains on."""

from __future__ import annotations

import failed_capture_cases as cases
import pytest
from device_models import check
from device_ranks import on_nccl

pytestmark = pytest.mark.timeout(120)
MODES = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
}
# The option or the number of steps, and a part of the error's text.
REFUSED = {
    "find unused": ("", {"find_unused_parameters": True}, "find_unused_parameters"),
    "check_finite": ("check_finite", {}, "set_check_finite()"),
    "join": ("join", {}, "in a join() context"),
    "no step before": ("", {"steps_before": 0}, "Run at least 3 training steps"),
    "one step before": ("", {"steps_before": 1}, "Run at least 3 training steps"),
    "static, two steps before": (
        *("", {"steps_before": 2, "static_graph": True}),
        "Run at least 3 training steps",
    ),
}


@on_nccl(1, 2)
@pytest.mark.parametrize("case", REFUSED)
def test_forward_refuses_a_capture(device_ranks, device, world_size, case):
    by, options, named = REFUSED[case]
    results = device_ranks(device, world_size).run(cases.refused, device, by, **options)
    for text, _ in results:
        assert "a step is captured into a CUDA graph" in text and named in text
    check([pairs for _, pairs in results])


@on_nccl(1, 2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("failure", cases.FAILURES)
def test_the_wrapper_trains_after_a_failed_capture(device_ranks, device, world_size, failure, mode):
    results = device_ranks(device, world_size).run(cases.failed, device, failure, **MODES[mode])
    for raised, _ in results:
        assert raised
        if device == "late" and failure.startswith("error"):
            assert raised == "ZeroDivisionError", "the failure made the capture invalid"
    check([pairs for _, pairs in results])


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_abort_under_capture_uses_no_device(device_ranks, world_size):
    for calls, allocations in device_ranks("late", world_size).run(cases.calls_of_a_failed_capture):
        assert (calls, allocations) == (0, 0)
