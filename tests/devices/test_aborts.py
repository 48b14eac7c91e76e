"""Backwards that raise, on a device.

An engine thread may report the abort to the reducer after the caller has caught the error.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import abort_cases as cases
import pytest
from device_models import MODES, check
from device_ranks import on_devices

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def ranks(device, world_size, device_ranks):
    return device_ranks(device, world_size)


def _may_leave_idle_class() -> bool:
    def enter_and_leave() -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(enter_and_leave).exception() is None


delays_a_report = pytest.mark.skipif(
    not _may_leave_idle_class(), reason="no right to give a thread its priority back (CAP_SYS_NICE)"
)


@delays_a_report
@on_devices(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("keep", [False, True], ids=["", "kept"])
def test_a_rank_repeats_its_first_backward(ranks, device, mode, keep):
    check(ranks.run(cases.repeats_its_first_backward, device, timeout=20, keep=keep, **MODES[mode]))


@delays_a_report
@on_devices(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", cases.CALLS)
def test_a_call_waits_for_the_abort(ranks, device, mode, call):
    case = cases.raises_after_all_launches
    check(ranks.run(case, device, timeout=20, call=call, **MODES[mode]))


@on_devices(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batched", [False, True], ids=["", "batched"])
def test_peers_of_an_abort_hear_of_a_gradient_that_is_not_finite(ranks, device, mode, batched):
    options = {**MODES[mode], "batched_grad_copy": batched}
    aborted, *peers = ranks.run(cases.not_finite_before_an_abort, device, timeout=20, **options)
    assert aborted == ["", "", "on purpose", ""]
    for texts in peers:
        assert texts[:2] == ["", ""] and texts[3] == ""
        assert "finite" in texts[2] and "rank 0" in texts[2]


@on_devices(1, 2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("zeroes", [False, True], ids=["", "zeroed"])
def test_an_exception_in_mid_backward(ranks, device, mode, zeroes):
    check(ranks.run(cases.raised_in_mid_backward, device, zeroes, **MODES[mode]))


@on_devices(1, 2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("zeroes", [False, True], ids=["", "zeroed"])
def test_a_backward_that_is_repeated_without_a_forward(ranks, device, mode, zeroes):
    check(ranks.run(cases.repeats_a_backward, device, zeroes, **MODES[mode]))


ALSO = {
    "static view": {"static_graph": True, "gradient_as_bucket_view": True},
    "lazy view": {"lazy_bucket_allocation": True, "gradient_as_bucket_view": True},
}


@on_devices(1, 2)
@pytest.mark.parametrize("mode", [*MODES, *ALSO])
def test_the_stream_of_the_script_waits_for_what_an_abort_copies(ranks, device, mode):
    check(ranks.run(cases.raised_on_a_side_stream, device, **{**MODES, **ALSO}[mode]))


@on_devices(1, 2)
@pytest.mark.parametrize("mode", ["default", "view", "lazy view"])
def test_gradients_may_be_cleared_while_an_abort_is_reported(ranks, device, mode):
    case = cases.cleared_while_aborts_are_reported
    assert set(ranks.run(case, device, timeout=90, **{**MODES, **ALSO}[mode])) == {3}


@on_devices(2)
@pytest.mark.parametrize("batched", [False, True], ids=["", "batched"])
def test_a_bucket_that_is_packed_at_an_abort(ranks, device, batched):
    check(ranks.run(cases.packed_at_an_abort, device, timeout=20, batched_grad_copy=batched))


@delays_a_report
@on_devices(2)
@pytest.mark.parametrize("mode", ["default", "view", "lazy view"])
def test_an_abort_that_packs_gradients_leaves_them_in_place(ranks, device, mode):
    options = {**MODES, **ALSO}[mode]
    check(ranks.run(cases.packed_at_an_abort, device, comes_late=True, timeout=20, **options))
