"""A step costs the device no more than under DDP, by the counters of the late device."""

from __future__ import annotations

import pytest
import step_costs

pytestmark = pytest.mark.timeout(60)

QUANTITIES = ("operations", "bytes", "collective_bytes", "synchronisations", "memory_bytes")
FLOAT_BYTES = 4 * step_costs.NUM_PARAMS // 2 * (step_costs.WIDTH**2 + step_costs.WIDTH)


@pytest.mark.parametrize("name", step_costs.SETTINGS)
def test_no_more_than_ddp(device_ranks, name):
    ranks = device_ranks("late", 2)
    ours = ranks.run(step_costs.cost_of, name, "ddpx")[0]
    ddp = ranks.run(step_costs.cost_of, name, "DDP")[0]
    for quantity in QUANTITIES:
        allowed = getattr(ddp, quantity) + _allowance(name, quantity)
        assert getattr(ours, quantity) <= allowed, quantity


@pytest.mark.parametrize("num_large", [0, 3])
@pytest.mark.parametrize("name", ["default", "view"])
def test_six_operations_a_bucket_and_one_a_large_gradient(device_ranks, name, num_large):
    cost = device_ranks("late", 2).run(step_costs.cost_of, name, "ddpx", num_large=num_large)[0]
    # One bucket of small gradients; with large ones, two buckets.
    assert cost.operations <= 6 * (1 + (num_large > 0)) + num_large


@pytest.mark.parametrize("name", ["default, mixed precision", "view, mixed precision"])
def test_gradients_of_a_bucket_are_cast_together(device_ranks, name):
    cost = device_ranks("late", 2).run(step_costs.cost_of, name, "ddpx")[0]
    assert cost.operations <= step_costs.NUM_PARAMS + 6  # each parameter is cast by itself


def test_later_steps_make_the_events_of_all_reduces_only(device_ranks):
    assert device_ranks("late", 2).run(step_costs.events_of_later_steps) == [(10, 5)] * 2


def _allowance(name: str, quantity: str) -> int:
    """The additional cost of checking once whether gradients are finite, which DDP does not do.

    Small gradients are multiplied in a pass of its own: few operations, but more bytes.
    """
    product = 2 * FLOAT_BYTES * (quantity == "bytes")
    if "check_finite" not in name:
        return product
    # The norms of 200 gradients, and the results of all ranks.
    allowances = {
        "operations": 16,
        "bytes": FLOAT_BYTES + 16 * 1024,
        "synchronisations": 3,
        "collective_bytes": 64,
    }
    return product + allowances.get(quantity, 1024 * (quantity == "memory_bytes"))
