"""Random wrappers, groups and collective calls in one backward: the bits of DDP."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from device_ranks import DeviceRanks
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_collectives import plans, run_plan

from ddpx.testing import RankPool

# A number that is asked for is a search: other plans each time, and shrinking.
ASKED = os.environ.get("DDPX_PROPERTY_EXAMPLES")
EXAMPLES = int(ASKED or 25)


@dataclass(frozen=True)
class Place:
    """Ranks, and the device of their tensors."""

    ranks: RankPool | DeviceRanks
    device: str
    world_size: int


@pytest.fixture(scope="module", params=["gloo", "shm", "late"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[2, 3])
def place(request: pytest.FixtureRequest, backend: str, late_library: None) -> Iterator[Place]:
    world_size = request.param
    if backend == "late":
        ranks: RankPool | DeviceRanks = DeviceRanks("late", world_size)
    else:
        ranks = RankPool(world_size, backend)
    yield Place(ranks, "late" if backend == "late" else "cpu", world_size)
    ranks.close()


@pytest.mark.timeout(120 + 3 * EXAMPLES)
@settings(
    max_examples=EXAMPLES,
    derandomize=not ASKED,
    database=None,
    deadline=None,
    phases=[Phase.generate, *([Phase.shrink] if ASKED else [])],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    print_blob=False,
)
@given(draws=st.data())
def test_collectives_pair_up(place, draws):
    plan = draws.draw(plans(place.world_size))
    place.ranks.run(run_plan, plan, place.device, timeout=20.0)
