"""How many random examples a property test draws, for how long, and with which seeds."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

# A given number means a search: other examples in each run, with shrinking.
ASKED = os.environ.get("DDPX_PROPERTY_EXAMPLES")
# Examples that share a seed. The time is checked between examples, and between seeds.
EXAMPLES_PER_SEED = 50


def num_examples(usual: int) -> int:
    return int(ASKED or usual)


def draws(max_examples: int) -> settings:
    """A decorator for a test that gets its examples from hypothesis."""
    return settings(
        _common(max_examples),
        derandomize=not ASKED,
        phases=[Phase.generate, *([Phase.shrink] if ASKED else [])],
    )


def _common(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )


class TimedSearch:
    """Draws examples until the time is over, and shrinks the first example that fails.

    The seeds are the numbers from ``first_seed`` on, so each run draws the same examples. A fast
    machine draws more of them. With ``DDPX_PROPERTY_EXAMPLES`` the search draws this number of
    examples instead, with random seeds.

    Args:
        seconds: The time. Shrinking takes longer.
        first_seed: The first seed.

    Attributes:
        num_examples: The number of examples so far.
    """

    def __init__(self, seconds: float, first_seed: int = 0) -> None:
        self.deadline = time.monotonic() + seconds
        self.first_seed = first_seed
        self.num_examples = 0
        self._has_failed = False

    def run(self, strategy: st.SearchStrategy[Any], check: Callable[[Any], object]) -> None:
        """Calls ``check`` with each example. Shrinks an example for which ``check`` raises."""
        if ASKED:
            self._draw(int(ASKED), strategy, check, None)
            return
        for seed in itertools.count(self.first_seed):
            if self._is_over():
                return
            self._draw(EXAMPLES_PER_SEED, strategy, check, seed)

    def _is_over(self) -> bool:
        return not ASKED and time.monotonic() > self.deadline

    def _draw(
        self,
        max_examples: int,
        strategy: st.SearchStrategy[Any],
        check: Callable[[Any], object],
        seed: int | None,
    ) -> None:
        @settings(_common(max_examples), phases=[Phase.generate, Phase.shrink])
        @given(example=strategy)
        def draw(example: Any) -> None:
            if self._is_over() and not self._has_failed:
                return
            self.num_examples += 1
            try:
                check(example)
            except BaseException:
                self._has_failed = True
                raise

        draw = draw if seed is None else hypothesis.seed(seed)(draw)
        draw()
