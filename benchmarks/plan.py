"""The amount of measurement: in full, or just enough to see that everything runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from interleave import Effort

from ddpx.testing import RankPool
from ddpx.testing.rank_pool import StartMethod

_TIMEOUT_S = 900.0
# By default glibc's malloc returns large freed memory to the system, so the gradients of the next
# step take a page fault for each page. How many pages depends on the layout of the heap, which the
# contenders of a process share: one contender would pay for another.
KEEP_FREED_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # the largest value that malloc accepts
}


@dataclass(frozen=True)
class Plan:
    """The settings of a run.

    Attributes:
        launches: Number of sets of new processes, over which figures are pooled.
        step_launches: The same for step times, whose figures have intervals.
        effort: Effort per cell of a table, in each launch.
        step_effort: The same for step times, since slow models would get few rounds.
        tiny: Use small models.
        start_method: Start method of ranks. Forked ranks start fast, but share memory, unlike those
            of users. step_ranks, sizes_bytes, reduce_ranks, num_params, growth_ranks: The varied
            values.
    """

    launches: int
    step_launches: int
    effort: Effort
    step_effort: Effort
    tiny: bool
    start_method: StartMethod
    step_ranks: tuple[int, ...]
    reduce_ranks: tuple[int, ...]
    sizes_bytes: tuple[int, ...]
    num_params: tuple[int, ...]
    growth_ranks: tuple[int, ...]

    def launch(
        self, ranks: int, function: Callable[..., Any], *args: Any, launches: int | None = None
    ) -> list[list[Any]]:
        """Results by launch, then by rank. Without ``launches``, of ``self.launches``."""
        results = []
        with patch.dict(os.environ, KEEP_FREED_MEMORY):
            for _ in range(launches or self.launches):
                with RankPool(ranks, start_method=self.start_method) as pool:
                    results.append(pool.run(function, *args, timeout=_TIMEOUT_S))
        return results


KIB, MIB = 1 << 10, 1 << 20

FULL = Plan(
    launches=2,
    step_launches=5,
    effort=Effort(seconds=6.0, min_rounds=3),
    step_effort=Effort(seconds=5.0, min_rounds=4),
    tiny=False,
    start_method="spawn",
    step_ranks=(1, 2, 4),
    reduce_ranks=(2, 4),
    sizes_bytes=(
        4 * KIB,
        16 * KIB,
        64 * KIB,
        256 * KIB,
        MIB,
        4 * MIB,
        25 * MIB,
        100 * MIB,
    ),
    num_params=(100, 1000, 10_000, 100_000),
    growth_ranks=(1, 2, 4, 8),
)

QUICK = Plan(
    launches=1,
    step_launches=1,
    effort=Effort(seconds=0.1, min_rounds=2, max_rounds=5),
    step_effort=Effort(seconds=0.1, min_rounds=2, max_rounds=5),
    tiny=True,
    start_method="forkserver",
    step_ranks=(1, 2),
    reduce_ranks=(2,),
    sizes_bytes=(4 * KIB, MIB),
    num_params=(10, 100),
    growth_ranks=(1, 2),
)
