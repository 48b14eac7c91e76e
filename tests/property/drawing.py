"""How many random examples a property test draws, and how."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

# A number that is asked for is a search: other examples each time, and shrinking.
ASKED = os.environ.get("DDPX_PROPERTY_EXAMPLES")


def num_examples(usual: int) -> int:
    return int(ASKED or usual)


def draws(max_examples: int) -> settings:
    """A decorator for a test that hypothesis gives its examples."""
    return settings(
        max_examples=max_examples,
        derandomize=not ASKED,
        database=None,
        deadline=None,
        phases=[Phase.generate, *([Phase.shrink] if ASKED else [])],
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
        print_blob=False,
    )
