"""Averages by weight on a device, compared with CPU, and in graphs."""

from __future__ import annotations

import math

import average_cases as cases
import pytest
import torch
from device_models import MODES
from device_ranks import on_devices, on_nccl, skip_gloo_on_cuda

pytestmark = pytest.mark.timeout(120)


def _compare(ranks, case, device, *args, **options):
    """Late kernels are those of the CPU, so the bits are equal. Those of CUDA differ."""
    expected = ranks.run(case, "cpu", *args, **options)
    actual = ranks.run(case, device, *args, **options)
    tolerance = {"rtol": 0, "atol": 0} if device == "late" else {}
    torch.testing.assert_close(actual, expected, **tolerance)


@on_devices(1, 2, 3)
@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("mode", MODES)
def test_weights(device_ranks, device, world_size, mode, tensors):
    _compare(device_ranks(device, world_size), cases.weighted, device, tensors, **MODES[mode])


@on_devices(1, 2)
@pytest.mark.parametrize("mode", ["default", "view"])
def test_lost_weights_of_other_streams(device_ranks, device, world_size, mode):
    case = cases.lost_with_gradients_of_other_streams
    device_ranks(device, world_size).run(case, device, timeout=20, **MODES[mode])


@on_devices(2)
@pytest.mark.parametrize("mode", MODES)
def test_sums(device_ranks, device, world_size, mode):
    ranks = device_ranks(device, world_size)
    _compare(ranks, cases.weighted, device, False, average="sum", **MODES[mode])


@on_devices(2)
@pytest.mark.parametrize("mode", ["default", "view"])
def test_a_communication_hook(device_ranks, device, world_size, mode):
    ranks = device_ranks(device, world_size)
    _compare(ranks, cases.weighted_with_a_hook, device, **MODES[mode])


@on_devices(2)
@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("mode", ["default", "view"])
def test_weights_beyond_the_range_of_half(device_ranks, device, world_size, mode, tensors):
    ranks = device_ranks(device, world_size)
    _compare(ranks, cases.weighted_in_half, device, tensors, **MODES[mode])


@on_devices(2)
@pytest.mark.parametrize("mode", ["default", "view"])
def test_two_devices_in_one_module(device_ranks, device, world_size, mode):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device only")
    ranks = device_ranks(device, world_size)
    _compare(ranks, cases.weighted_on_two_devices, device, **MODES[mode])


@on_devices(2, 3)
@pytest.mark.parametrize("mode", ["default", "view", "find unused"])
def test_uneven_inputs(device_ranks, device, world_size, mode):
    _compare(device_ranks(device, world_size), cases.weighted_uneven, device, **MODES[mode])


@on_devices(2)
@pytest.mark.parametrize("mode", ["default", "view"])
def test_weights_of_other_streams(device_ranks, device, world_size, mode):
    ranks = device_ranks(device, world_size)
    _compare(ranks, cases.weighted_on_side_streams, device, **MODES[mode])


@on_devices(1, 2)
@pytest.mark.parametrize("mode", MODES)
def test_no_synchronisation_in_a_step(device_ranks, device, world_size, mode):
    skip_gloo_on_cuda(device, world_size, "gloo synchronises")
    device_ranks(device, world_size).run(cases.no_synchronisation, device, **MODES[mode])


WEIGHTS = {"zero": (0.0, 0.0), "negative": (-3.0, 1.0), "NaN": (math.nan, 1.0)}


@on_devices(2)
@pytest.mark.parametrize("finite_check", [False, True])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_bad_weights(device_ranks, device, world_size, weights, finite_check):
    per_rank = [*WEIGHTS[weights], *[WEIGHTS[weights][1]] * world_size][:world_size]
    device_ranks(device, world_size).run(cases.bad_weights, device, per_rank, finite_check)


@on_nccl(1, 2)
@pytest.mark.parametrize("mode", ["default", "view", "static", "hook"])
def test_weights_in_a_graph(device_ranks, device, world_size, mode):
    for eager, replayed in device_ranks(device, world_size).run(
        cases.in_a_graph, device, hook=mode == "hook", **MODES.get(mode, {})
    ):
        torch.testing.assert_close(replayed, eager, rtol=0, atol=0)


@on_nccl(2)
def test_a_sum_of_zero_in_a_graph(device_ranks, device, world_size):
    device_ranks(device, world_size).run(cases.zero_in_a_graph, device)


@on_nccl(2)
def test_a_number_in_a_graph(device_ranks, device, world_size):
    device_ranks(device, world_size).run(cases.number_in_a_graph, device)
