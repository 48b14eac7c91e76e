"""Blocks of steps with one plan each, in turns, and their measured times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ddpx.planning.candidates import Buckets
from ddpx.planning.training import Schedule, Training


@dataclass(frozen=True)
class Measured:
    """The times of blocks, by the number of the plan and then in order. 0: not measured.

    Attributes:
        steps_s: The median step of each block, on the slowest rank.
        ends_s: The median end of communication of each block.
    """

    steps_s: dict[int, list[float]]
    ends_s: dict[int, list[float]]


class Blocks:
    """Blocks of steps. All steps of a block have one plan."""

    def __init__(
        self,
        training: Training,
        schedule: Schedule,
        plans: Sequence[Buckets],
        order: Sequence[int],
    ) -> None:
        self._training = training
        self._schedule = schedule
        self._plans = plans
        self._order = order
        self._number = 0
        self._steps = range(0)  # the measured steps of the block that runs
        self._times: list[tuple[float, float]] = []  # of all measured steps so far
        self._used: Buckets | None = None

    def begin(self, num_steps: int) -> int:
        """Begins the block, or begins it again. Returns the step after the block."""
        self.use(self._plans[self._order[self._number]])
        begin = num_steps + self._schedule.settling
        self._steps = range(begin, begin + self._schedule.measured)
        return self._steps.stop

    def use(self, plan: Buckets) -> None:
        """Makes later steps use a plan."""
        if self._used != plan:
            self._training.use(plan)
            self._used = plan

    def end(self) -> bool:
        """Ends the block. Returns whether there is a next one."""
        self._times += self._training.step_times_s(self._steps)
        self._number += 1
        return self._number < len(self._order)

    def exchange(self) -> Measured:
        """The times of all blocks, on the slowest rank of each step. A collective call."""
        flat = self._training.highest([value for pair in self._times for value in pair])
        size = self._schedule.measured
        measured = Measured({}, {})
        for place, number in enumerate(self._order):
            block = range(place * size, (place + 1) * size)
            for at, of_plan in enumerate((measured.steps_s, measured.ends_s)):
                middle = median([flat[2 * step + at] for step in block])
                of_plan.setdefault(number, []).append(middle or 0.0)
        return measured


def median(values: Sequence[float]) -> float | None:
    """The median of the measured values. None if nothing was measured."""
    known = [value for value in values if value > 0]
    return statistics.median(known) if known else None
