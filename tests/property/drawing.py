"""The number of random examples of a property test, and how they are drawn."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

# A given number means a search: other examples in each run, with shrinking.
ASKED = os.environ.get("DDPX_PROPERTY_EXAMPLES")


def num_examples(usual: int) -> int:
    return int(ASKED or usual)


def draws(max_examples: int) -> settings:
    """A decorator for a test that gets its examples from hypothesis."""
    return settings(
        max_examples=max_examples,
        derandomize=not ASKED,
        database=None,
        deadline=None,
        phases=[Phase.generate, *([Phase.shrink] if ASKED else [])],
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
        print_blob=False,
    )
