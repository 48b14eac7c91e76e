"""The interface through which a search of the best bucket plan measures a training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ddpx.planning.candidates import NAMES, Buckets, ReadyGradient


@dataclass(frozen=True)
class Schedule:
    """The number of steps of each state.

    Attributes:
        warm_up: Steps before the search measures. The reducer rebuilds its buckets in them.
        arrivals: Steps in which arrivals are measured.
        settling: Steps of a block after a change of the plan, which are not measured.
        measured: Measured steps of a block.
        screening_rounds: The number of blocks of each plan while plans are screened.
        pairs: The number of pairs of blocks that compare the best plan with the default plan.
    """

    warm_up: int = 5
    arrivals: int = 8
    settling: int = 1
    measured: int = 3
    screening_rounds: int = 4
    pairs: int = 18

    @property
    def most_steps(self) -> int:
        """The steps of a search that is not suspended."""
        blocks = self.screening_rounds * len(NAMES) + 2 * self.pairs
        return self.warm_up + self.arrivals + 1 + blocks * (self.settling + self.measured)


class Training(Protocol):
    """The training that a search measures, on one rank."""

    @property
    def gradients(self) -> Sequence[ReadyGradient]:
        """The gradients, by index. Their times are not known yet."""

    def default_buckets(self) -> Buckets:
        """The present buckets, by index of gradients."""

    def use(self, buckets: Buckets) -> None:
        """Replaces the buckets from this step on."""

    def record(self) -> None:
        """Records steps from now on."""

    def stop(self) -> None:
        """Stops recording."""

    def arrivals_s(self, steps: range) -> list[float]:
        """For each gradient the time from the start of the backward, as a median. 0: none came."""

    def step_times_s(self, steps: range) -> list[tuple[float, float]]:
        """For each step its duration, and the time from the start of the backward to the end of
        communication. 0: not known."""

    def reduce_time_s(self, num_bytes: int) -> float:
        """Times an all-reduce. A collective call."""

    def highest(self, values: Sequence[float]) -> list[float]:
        """The highest value of all ranks, for each element. A collective call."""

    def of_rank_0(self, values: Sequence[int]) -> list[int]:
        """The values of rank 0. A collective call. All ranks pass the same number of values."""
