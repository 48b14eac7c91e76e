"""The bits of ddpx on a device equal those of DDP on that device."""

from __future__ import annotations

import pytest
from device_ranks import NcclRanks, on_devices
from parity_cases import CASES, MODES, compare_case

from ddpx.testing.compare import summarize

pytestmark = pytest.mark.timeout(300)

PAIRS = [(case.name, mode) for case in CASES for mode in case.modes]
# The late device supports neither sparse tensors, nor convolutions, nor complex numbers.
NOT_LATE = (
    "sparse embedding",
    "conv + BatchNorm",
    "channels last",
    "lazy gradients",
    "lazy gradients, kept",
    "lazy gradients, zeroed",
)


# `make test` has every second pair, in both halves of the modes. tests/parity has all pairs on CPU.
@pytest.mark.parametrize(
    "case_name, mode",
    [
        pytest.param(*pair, marks=[pytest.mark.full_only] if (n + n // len(MODES)) % 2 else [])
        for n, pair in enumerate(PAIRS)
    ],
    ids=lambda value: value.replace(" ", "-"),
)
@on_devices(1, 2, 3)
def test_bits_match(device_ranks, device, case_name, mode, world_size):
    if device == "late" and case_name in NOT_LATE:
        pytest.skip(f"the late device has no operators for {case_name}")
    if isinstance(world_size, NcclRanks) and case_name == "sparse embedding":
        pytest.skip("NCCL cannot sum sparse tensors")
    per_rank = device_ranks(device, world_size).run(compare_case, case_name, mode, device=device)
    for caps in per_rank[0]:
        total = summarize([comparisons[caps] for comparisons in per_rank])
        assert total.identical, f"with {caps}:\n" + "\n".join(total.differences[:20])
