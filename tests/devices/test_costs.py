"""A step on a device takes no more operations and moves no more bytes than under DDP."""

from __future__ import annotations

import pytest
from costs import CHECKED, NUM_PARAMS, SETTINGS, measure


@pytest.fixture(scope="module")
def costs(on_device):
    on_device("late", 2)  # compiles the device
    return measure()


@pytest.mark.parametrize("setting", SETTINGS)
def test_no_more_than_ddp(costs, setting):
    ours, theirs = costs[setting, "ReducerDDP"], costs[setting, "DDP"]
    assert ours.operations <= theirs.operations
    assert ours.kilobytes <= theirs.kilobytes


def test_a_finite_check_takes_a_few_operations_a_bucket(costs):
    extra = costs[CHECKED, "ReducerDDP"].operations - costs["views", "ReducerDDP"].operations
    assert extra < NUM_PARAMS / 2
