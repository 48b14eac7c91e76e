"""Other usages of a wrapper on a device, compared with their results on CPU."""

from __future__ import annotations

from itertools import pairwise

import kept_grad_cases
import pytest
import torch
import usage_cases as cases
from device_models import MODES
from device_ranks import on_devices, skip_gloo_on_cuda

from ddpx.timeline import Timeline
from ddpx.timeline.analyze.figures import step_figures
from ddpx.timeline.analyze.turns import in_turn, takes_turns

pytestmark = pytest.mark.timeout(120)


def _compare(ranks, case, device, *args, same_buckets=True, **options):
    """Late kernels are those of the CPU, so the bits are equal. Those of CUDA differ.

    The order in which three ranks are summed depends on a gradient's position in its bucket.
    """
    of_cuda = {"rtol": 1e-4, "atol": 1e-4}  # sums of 4 ranks in 16 bits
    expected = ranks.run(case, "cpu", *args, **options)
    actual = ranks.run(case, device, *args, **options)
    exact = device == "late" and same_buckets
    tolerance = {"rtol": 0, "atol": 0} if exact else of_cuda
    torch.testing.assert_close(actual, expected, **tolerance)


@on_devices(2, 3)
@pytest.mark.parametrize("mode", MODES)
def test_two_devices_in_one_module(device_ranks, device, world_size, mode):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device only")
    ranks = device_ranks(device, world_size)
    same_buckets = world_size == 2  # the layout of buckets may differ between devices
    _compare(ranks, cases.on_two_devices, device, same_buckets=same_buckets, **MODES[mode])


@on_devices(2)
@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_on_two_devices(device_ranks, device, world_size, mode):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device only")
    ranks = device_ranks(device, world_size)
    _compare(ranks, cases.checkpoint_on_two_devices, device, **MODES[mode])


@on_devices(2)
@pytest.mark.parametrize("mode", MODES)
def test_backwards_in_inference_mode(device_ranks, device, world_size, mode):
    ranks = device_ranks(device, world_size)
    _compare(ranks, cases.backwards_in_inference_mode, device, **MODES[mode])


@on_devices(2)
@pytest.mark.parametrize("hook", [*cases.HOOKS, *cases.BUILTIN_HOOKS])
@pytest.mark.parametrize("mode", ["default", "view"])
def test_communication_hooks(device_ranks, device, world_size, mode, hook):
    _compare(device_ranks(device, world_size), cases.with_a_hook, device, hook, **MODES[mode])


@on_devices(2)
@pytest.mark.parametrize("numbers", [(0, 2), (0, 1, 2, 3)], ids=["some", "all"])
@pytest.mark.parametrize("mode", ["default", "view"])
def test_optimizers_in_backward(device_ranks, device, world_size, mode, numbers):
    ranks = device_ranks(device, world_size)
    _compare(ranks, cases.optimizers_in_backward, device, numbers, **MODES[mode])


@on_devices(2)
def test_gradients_that_an_abort_leaves_are_moved(device_ranks, device, world_size):
    _compare(device_ranks(device, world_size), kept_grad_cases.kept_after_an_abort, device)


@on_devices(2, 3)
@pytest.mark.parametrize("mode", ["default", "view", "find unused"])
def test_uneven_inputs(device_ranks, device, world_size, mode):
    _compare(device_ranks(device, world_size), cases.uneven_inputs, device, **MODES[mode])


@on_devices(2)
@pytest.mark.parametrize("mode", MODES)
def test_mixed_precision(device_ranks, device, world_size, mode):
    _compare(device_ranks(device, world_size), cases.in_mixed_precision, device, **MODES[mode])


@on_devices(2, 3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["reduce_dtype", "grad_dtype"])
def test_sixteen_bits(device_ranks, device, world_size, dtype, mode):
    ranks, dtypes = device_ranks(device, world_size), {dtype: torch.float32}
    _compare(ranks, cases.in_sixteen_bits, device, dtypes, **MODES[mode])


SUMS = {
    "reduce": {"reduce_dtype": torch.float32},
    "grad": {"grad_dtype": torch.float32},
    "both": {"reduce_dtype": torch.float32, "grad_dtype": torch.float32},
}


@pytest.mark.full_only
@on_devices(2, 8)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtypes", SUMS)
@pytest.mark.parametrize("num_micro_steps", [1, 64])
def test_sums_in_sixteen_bits(device_ranks, device, world_size, dtypes, num_micro_steps, mode):
    ranks = device_ranks(device, world_size)
    options = {**MODES[mode], "timeout": 100.0}
    ranks.run(cases.sums_against_float64, device, SUMS[dtypes], num_micro_steps, **options)


@on_devices(8)
@pytest.mark.parametrize("dtypes", SUMS)
def test_many_ranks_and_micro_steps(device_ranks, device, world_size, dtypes):
    ranks = device_ranks(device, world_size)
    ranks.run(cases.sums_against_float64, device, SUMS[dtypes], 64, timeout=100.0)


@on_devices(1, 2)
@pytest.mark.parametrize("mode", MODES)
def test_no_synchronisation_in_a_step(device_ranks, device, world_size, mode):
    skip_gloo_on_cuda(device, world_size, "gloo synchronises")
    device_ranks(device, world_size).run(cases.steps_without_synchronisation, device, **MODES[mode])


@pytest.mark.parametrize(
    "options, check_finite, refused",
    [
        ({"find_unused_parameters": True}, False, "find_unused_parameters"),
        ({}, True, "set_check_finite()"),
        ({}, False, None),
        ({"gradient_as_bucket_view": True}, False, None),
        ({"static_graph": True}, False, None),
    ],
    ids=["find unused", "check_finite", "default", "view", "static"],
)
def test_reads_on_the_host_are_refused_under_capture(device_ranks, options, check_finite, refused):
    for texts in device_ranks("late", 2).run(cases.errors_under_capture, options, check_finite):
        assert not any(texts[:3] + texts[4:])
        if refused is None:
            assert texts[3] == ""
        else:
            assert "CUDA graph" in texts[3] and refused in texts[3]


def _skip_turns_of_many_ranks(device, world_size):
    if device == "cuda" and world_size > max(2, torch.cuda.device_count()):
        pytest.skip("more than two ranks take turns on a GPU, so their times say nothing")


@on_devices(1, 2)
def test_times_are_the_devices(device_ranks, device, world_size):
    """The host finishes long before the device reaches the last layer."""
    _skip_turns_of_many_ranks(device, world_size)
    ranks = device_ranks(device, world_size)
    timeline, busy_ns = ranks.run(cases.recorded_busy_layers, device, 20)[0]
    assert len(timeline.steps) == 4
    for step in timeline.steps:
        for rank_step in step.ranks.values():
            # Times of weights: that of a layer comes before its own sleep and after the sleeps of
            # later layers.
            weights = [a for a in rank_step.arrivals if "weight" in _name(timeline, a.param)]
            between = [b.at - a.at for a, b in pairwise(weights)]
            assert all(0.7 * busy_ns < time_ns < 5 * busy_ns for time_ns in between), between
            for bucket in rank_step.buckets:
                assert bucket is not None
                assert bucket.ready <= bucket.launched <= bucket.completed <= bucket.written_back


@on_devices(1, 2)
def test_communication_overlaps_backward(device_ranks, device, world_size):
    """A bucket is reduced while the device computes the gradients of later buckets."""
    skip_gloo_on_cuda(device, world_size, "gloo copies to the host on the same stream")
    _skip_turns_of_many_ranks(device, world_size)
    ranks = device_ranks(device, world_size)
    timeline, _ = ranks.run(cases.recorded_busy_layers, device, 20)[0]
    for step in timeline.steps:
        for rank_step in step.ranks.values():
            last = max(arrival.at for arrival in rank_step.arrivals)
            buckets = [bucket for bucket in rank_step.buckets if bucket is not None]
            assert len(buckets) == 8
            assert buckets[0].completed < last
            for earlier, later in pairwise(buckets):
                assert earlier.launched <= later.launched


@on_devices(2)
def test_reductions_take_turns(device_ranks, device, world_size):
    """Two buckets are launched at once. The device reduces them one after the other."""
    skip_gloo_on_cuda(device, world_size, "gloo copies to the host")
    ranks = device_ranks(device, world_size)
    timeline, _ = ranks.run(cases.recorded_busy_layers, device, 20)[0]
    assert takes_turns(timeline.recording), timeline.recording.backend
    for step in timeline.steps:
        for rank, rank_step in in_turn(timeline.recording, step).ranks.items():
            buckets = [bucket for bucket in rank_step.buckets if bucket is not None]
            assert len(buckets) == 8
            assert all(a.completed <= b.launched for a, b in pairwise(buckets))
            whole_ns = sum(bucket.completed - bucket.launched for bucket in buckets)
            assert step_figures(step.ranks[rank]).communication >= whole_ns


def test_a_launch_is_behind_the_gradients_of_all_streams(device_ranks):
    """The last gradient of a bucket comes while another stream computes the first one."""
    for timeline in device_ranks("late", 2).run(cases.recorded_on_two_streams, "late", 60):
        for step in timeline.steps:
            for rank_step in step.ranks.values():
                (bucket,) = rank_step.buckets
                assert bucket is not None
                assert bucket.launched >= max(arrival.at for arrival in rank_step.arrivals)


def test_a_recording_that_begins_on_a_busy_device_has_exact_times(device_ranks):
    for error_ns in device_ranks("late", 2).run(cases.error_of_recording_while_busy, "late"):
        assert error_ns < 20e6


def _name(timeline: Timeline, param: int) -> str:
    return timeline.recording.param_names[param]
