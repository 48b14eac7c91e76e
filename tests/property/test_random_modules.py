"""Random modules under random usages: each step gives the mean of the bare module's gradients."""

from __future__ import annotations

import pytest
from drawing import ASKED, draws, num_examples
from hypothesis import given
from hypothesis import strategies as st
from random_plans import plans
from random_steps import run_plan

# Examples per world size.
EXAMPLES = num_examples(20)
SECONDS = 60 + 2 * EXAMPLES


@pytest.mark.timeout(SECONDS + 400 if ASKED else SECONDS)
@draws(EXAMPLES)
@given(data=st.data())
def test_gradients_are_averaged(ranks, world, data):
    plan = data.draw(plans(world))
    ranks(world).run(run_plan, plan, timeout=20.0)
