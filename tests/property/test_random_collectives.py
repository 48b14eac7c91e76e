"""Random wrappers, groups and collective calls in one backward: the bits of DDP."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_collectives import plans, run_plan

from ddpx.testing import RankPool

# A number that is asked for is a search: other plans each time, and shrinking.
ASKED = os.environ.get("DDPX_PROPERTY_EXAMPLES")
EXAMPLES = int(ASKED or 25)


@pytest.fixture(scope="module", params=[("gloo", 2), ("gloo", 3), ("shm", 2), ("shm", 3)])
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    backend, world_size = request.param
    with RankPool(world_size, backend) as made:
        yield made


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
def test_collectives_pair_up(pool, draws):
    pool.run(run_plan, draws.draw(plans(pool.world_size)), timeout=20.0)
