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


def _allowance(name: str, quantity: str) -> int:
    """The additional cost of checking once whether gradients are finite, which DDP does not do."""
    if "check_finite" not in name:
        return 0
    # The norms of 200 gradients, and the results of all ranks.
    allowances = {
        "operations": 16,
        "bytes": FLOAT_BYTES + 16 * 1024,
        "synchronisations": 3,
        "collective_bytes": 64,
    }
    return allowances.get(quantity, 1024 * (quantity == "memory_bytes"))
