"""Gradients that come from several streams, in every mode."""

from __future__ import annotations

import pytest
import stream_cases as cases
import unused_cases
from device_models import MODES, check
from device_ranks import on_devices, on_nccl

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def ranks(device, world_size, device_ranks):
    return device_ranks(device, world_size)


@on_devices(1, 2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("caps", [{}, {"bucket_cap_mb": 0.0001}], ids=["one-bucket", "buckets"])
def test_gradients_made_on_a_side_stream(ranks, device, mode, caps):
    check(ranks.run(cases.gradients_made_on_a_side_stream, device, **MODES[mode], **caps))


@on_devices(1, 2)
@pytest.mark.parametrize("mode", MODES)
def test_wrapped_on_a_side_stream(ranks, device, mode):
    check(ranks.run(cases.wrapped_on_a_side_stream, device, **MODES[mode]))


@on_devices(1, 2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batched", [False, True], ids=["", "batched"])
@pytest.mark.parametrize("keep", [False, True], ids=["", "kept"])
def test_hooks_on_several_streams(ranks, device, mode, batched, keep):
    options = {**MODES[mode], "batched_grad_copy": batched, "keep": keep}
    check(ranks.run(cases.hooks_on_several_streams, device, **options))


@on_devices(1, 2)
@pytest.mark.parametrize("mode", ["view", "static", "find unused"])
@pytest.mark.parametrize("batched", [False, True], ids=["", "batched"])
def test_gradients_that_move_into_a_lazy_bucket(ranks, device, mode, batched):
    lazy = {"lazy_bucket_allocation": True, "gradient_as_bucket_view": True}
    options = {**MODES[mode], **lazy, "batched_grad_copy": batched, "keep": True}
    check(ranks.run(cases.hooks_on_several_streams, device, **options))


@on_devices(1, 2)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_that_are_dropped_while_they_are_read(ranks, device, mode):
    check(ranks.run(cases.gradients_dropped_while_read, device, **MODES[mode]))


@on_devices(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batched", [False, True], ids=["", "batched"])
@pytest.mark.parametrize("check_finite", [False, True], ids=["", "check finite"])
def test_a_waiting_bucket_is_launched_from_another_stream(
    ranks, device, mode, batched, check_finite
):
    options = {**MODES[mode], "batched_grad_copy": batched, "check_finite": check_finite}
    check(ranks.run(cases.launched_from_another_stream, device, **options))


@on_nccl(1, 2)
@pytest.mark.parametrize("mode", MODES)
def test_a_hook_that_sums_synchronously(ranks, device, mode):
    check(ranks.run(cases.summed_by_a_synchronous_hook, device, **MODES[mode]))


@on_devices(1, 2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batched", [False, True], ids=["", "batched"])
@pytest.mark.parametrize("what", ["replaced", "cleared"])
def test_the_gradient_that_arrived_counts(ranks, device, mode, batched, what):
    options = {**MODES[mode], "batched_grad_copy": batched}
    check(ranks.run(cases.a_replaced_gradient, device, what, **options))


@on_devices(1, 2)
@pytest.mark.parametrize("mode", ["default", "find unused"])
def test_a_gradient_that_another_hook_changes(ranks, device, world_size, mode):
    error = "the gradient of parameter '1.weight' was changed in place"
    for texts in ranks.run(cases.a_changed_gradient, device, **MODES[mode]):
        for step, text in enumerate(texts):
            # After the first step, two ranks copy it when it arrives; see DeviceRanks.
            is_copied = world_size == 2 and step > 0
            assert text == "" if is_copied else error in text, step


@on_devices(2)
@pytest.mark.parametrize("mode", MODES)
def test_an_order_of_arrival_that_differs_by_rank(ranks, device, mode):
    check(ranks.run(cases.arrived_in_another_order, device, **MODES[mode]))


@on_devices(2, 3)
@pytest.mark.parametrize("mode", ["default", "view"])
def test_use_that_differs_by_rank(ranks, device, mode):
    check(ranks.run(unused_cases.used_differently_by_rank, device, **MODES[mode]))


@on_devices(2)
def test_use_is_read_on_another_stream(ranks, device, world_size):
    with_slow_sums = ranks.run(unused_cases.use_read_while_sums_are_slow, device)
    assert with_slow_sums == [[[world_size] * 4] * 3] * world_size


@on_devices(1, 2)
@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_that_is_not_finite(ranks, device, mode):
    for texts in ranks.run(cases.checked_for_finite, device, **MODES[mode]):
        assert texts[0] == texts[2] == ""
        assert "finite" in texts[1]


@on_devices(1, 2)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_before_the_first_averaged_output(ranks, device, mode):
    check(ranks.run(cases.local_gradients_first, device, **MODES[mode]))


@on_devices(2)
@pytest.mark.parametrize("mode", MODES)
def test_a_loss_that_reaches_no_param(ranks, device, world_size, mode):
    if world_size == 1:
        pytest.skip("a rank that is alone has no peer that uses the parameters")
    answers = ranks.run(cases.a_loss_that_reaches_no_param, device, **MODES[mode])
    check([pairs for pairs, _ in answers])
    for rank, (_, texts) in enumerate(answers):
        for step, text in enumerate(texts):
            if rank == 0 and step in (2, 4) and mode != "find unused":
                assert "layers.0.weight" in text
            else:
                assert text == ""
