"""Fixtures of the device tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from device_ranks import DeviceRanks, OnePool


@pytest.fixture(scope="session")
def cuda_ranks() -> Iterator[OnePool]:
    """The ranks of CUDA cases, across files."""
    with OnePool() as pool:
        yield pool


@pytest.fixture(scope="module")
def device_ranks(
    late_library: None, cuda_ranks: OnePool
) -> Iterator[Callable[[str, int], DeviceRanks]]:
    """``device_ranks(device, world_size)`` returns ranks that live on from test to test.

    Ranks of the late device live until the end of the file.
    """
    late: dict[int, DeviceRanks] = {}

    def get(device: str, world_size: int) -> DeviceRanks:
        if device == "cuda":
            return cuda_ranks.get(world_size)
        if world_size not in late:
            late[world_size] = DeviceRanks(device, world_size)
        return late[world_size]

    yield get
    for ranks in late.values():
        ranks.close()
