"""``ddpx.replicate()`` on a device, compared with its results on CPU."""

from __future__ import annotations

import pytest
import torch
from device_models import MODES
from device_ranks import on_devices
from replicate_cases import CASES

pytestmark = pytest.mark.timeout(120)


@on_devices(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_as_on_the_cpu(device_ranks, device, world_size, case, mode):
    """Late kernels are those of the CPU, so the bits are equal. Those of CUDA differ."""
    ranks = device_ranks(device, world_size)
    expected = ranks.run(case, "cpu", **MODES[mode])
    actual = ranks.run(case, device, **MODES[mode])
    tolerance = {"rtol": 0, "atol": 0} if device == "late" else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(actual, expected, **tolerance)
