"""Gradients that come from several streams, in every mode."""

from __future__ import annotations

import pytest
import stream_cases as cases
from device_ranks import DEVICES

pytestmark = pytest.mark.timeout(120)

MODES = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "find unused": {"find_unused_parameters": True},
}


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(params=[1, 2])
def ranks(request, device, device_ranks):
    return device_ranks(device, request.param)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("caps", [{}, {"bucket_cap_mb": 0.0001}], ids=["one-bucket", "buckets"])
def test_gradients_made_on_a_side_stream(ranks, device, mode, caps):
    cases.check(ranks.run(cases.gradients_made_on_a_side_stream, device, **MODES[mode], **caps))


@pytest.mark.parametrize("mode", MODES)
def test_wrapped_on_a_side_stream(ranks, device, mode):
    cases.check(ranks.run(cases.wrapped_on_a_side_stream, device, **MODES[mode]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batched", [False, True], ids=["", "batched"])
@pytest.mark.parametrize("keep", [False, True], ids=["", "kept"])
def test_hooks_on_several_streams(ranks, device, mode, batched, keep):
    options = {**MODES[mode], "batched_grad_copy": batched, "keep": keep}
    cases.check(ranks.run(cases.hooks_on_several_streams, device, **options))


@pytest.mark.parametrize("mode", MODES)
def test_gradients_that_are_dropped_while_they_are_read(ranks, device, mode):
    cases.check(ranks.run(cases.gradients_dropped_while_read, device, **MODES[mode]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batched", [False, True], ids=["", "batched"])
@pytest.mark.parametrize("check_finite", [False, True], ids=["", "check finite"])
def test_a_waiting_bucket_is_launched_from_another_stream(
    device_ranks, device, mode, batched, check_finite
):
    ranks = device_ranks(device, 2)
    options = {**MODES[mode], "batched_grad_copy": batched, "check_finite": check_finite}
    cases.check(ranks.run(cases.launched_from_another_stream, device, **options))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batched", [False, True], ids=["", "batched"])
@pytest.mark.parametrize("what", ["replaced", "cleared"])
def test_the_gradient_that_arrived_counts(ranks, device, mode, batched, what):
    options = {**MODES[mode], "batched_grad_copy": batched}
    cases.check(ranks.run(cases.a_replaced_gradient, device, what, **options))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("keep", [False, True], ids=["", "kept"])
def test_an_abort_after_the_last_gradient(device_ranks, device, mode, keep):
    ranks = device_ranks(device, 2)
    case = cases.aborted_after_the_last_gradient
    cases.check(ranks.run(case, device, timeout=20, keep=keep, **MODES[mode]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batched", [False, True], ids=["", "batched"])
def test_peers_of_an_abort_hear_of_a_gradient_that_is_not_finite(
    device_ranks, device, mode, batched
):
    ranks = device_ranks(device, 2)
    options = {**MODES[mode], "batched_grad_copy": batched}
    aborted, *peers = ranks.run(cases.not_finite_before_an_abort, device, timeout=20, **options)
    assert aborted == ["", "", "on purpose", ""]
    for texts in peers:
        assert texts[:2] == ["", ""] and texts[3] == ""
        assert "finite" in texts[2] and "rank 0" in texts[2]


@pytest.mark.parametrize("mode", MODES)
def test_an_exception_in_mid_backward(ranks, device, mode):
    cases.check(ranks.run(cases.raised_in_mid_backward, device, **MODES[mode]))


@pytest.mark.parametrize("mode", MODES)
def test_an_order_of_arrival_that_differs_by_rank(device_ranks, device, mode):
    cases.check(device_ranks(device, 2).run(cases.arrived_in_another_order, device, **MODES[mode]))


@pytest.mark.parametrize("mode", ["default", "view"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_use_that_differs_by_rank(device_ranks, device, mode, world_size):
    ranks = device_ranks(device, world_size)
    cases.check(ranks.run(cases.used_differently_by_rank, device, **MODES[mode]))


@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_that_is_not_finite(ranks, device, mode):
    for texts in ranks.run(cases.checked_for_finite, device, **MODES[mode]):
        assert texts[0] == texts[2] == ""
        assert "finite" in texts[1]
