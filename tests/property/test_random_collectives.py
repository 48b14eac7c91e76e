"""Random wrappers, groups and collective calls in one backward have the bits of DDP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from device_ranks import DeviceRanks
from drawing import draws, num_examples
from hypothesis import given
from hypothesis import strategies as st
from random_collectives import plans, run_plan

from ddpx.testing import RankPool

EXAMPLES = num_examples(25)


@dataclass(frozen=True)
class Place:
    """The number of ranks, and the device of their tensors."""

    ranks: RankPool | DeviceRanks
    device: str
    world_size: int


@pytest.fixture(scope="module", params=["gloo", "shm", "late"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.full_only), 3])
def place(request: pytest.FixtureRequest, backend: str, late_library: None) -> Iterator[Place]:
    world_size = request.param
    if backend == "late":
        ranks: RankPool | DeviceRanks = DeviceRanks("late", world_size)
    else:
        ranks = RankPool(world_size, backend)
    yield Place(ranks, "late" if backend == "late" else "cpu", world_size)
    ranks.close()


@pytest.mark.timeout(120 + 3 * EXAMPLES)
@draws(EXAMPLES)
@given(data=st.data())
def test_collectives_pair_up(place, data):
    plan = data.draw(plans(place.world_size))
    place.ranks.run(run_plan, plan, place.device, timeout=20.0)
