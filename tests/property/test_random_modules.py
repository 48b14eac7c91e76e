"""Random modules under random usages: after each step, the mean of the bare module's gradients."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_plans import plans
from random_steps import run_plan

# Per world size. A number that is asked for is a search: other plans each time, and shrinking.
ASKED = os.environ.get("DDPX_PROPERTY_EXAMPLES")
EXAMPLES = int(ASKED or 20)
SECONDS = 60 + 2 * EXAMPLES


@pytest.mark.timeout(SECONDS + 400 if ASKED else SECONDS)
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
def test_gradients_are_averaged(ranks, world, draws):
    plan = draws.draw(plans(world))
    ranks(world).run(run_plan, plan, timeout=20.0)
