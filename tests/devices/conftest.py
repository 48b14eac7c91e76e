"""Fixtures of the device tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from device_ranks import DeviceRanks


@pytest.fixture(scope="module")
def device_ranks(late_library: None) -> Iterator[Callable[[str, int], DeviceRanks]]:
    """``device_ranks(device, world_size)`` returns ranks, the same ones for all tests of a file."""
    made: dict[tuple[str, type, int], DeviceRanks] = {}

    def get(device: str, world_size: int) -> DeviceRanks:
        kind = (device, type(world_size), world_size)
        return made.setdefault(kind, DeviceRanks(device, world_size))

    yield get
    for ranks in made.values():
        ranks.close()
