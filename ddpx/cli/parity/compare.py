"""Compares the records of two runs of a script, and finds the first difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from ddpx.cli.parity.record import Event, RankRecord

_ORDER = ("weight", "loss", "gradient")  # the order within a step; weights of step 0 precede step 1


@dataclass(frozen=True)
class Difference:
    """An event that differs between both runs.

    Attributes:
        rank: The rank of the event.
        index: The index of the event on this rank.
        expected: The event of the first run. None if the run has no such event.
        actual: The event of the second run. None if the run has no such event.
    """

    rank: int
    index: int
    expected: Event | None
    actual: Event | None

    @property
    def event(self) -> Event:
        """The event of one of the runs."""
        event = self.expected or self.actual
        assert event is not None
        return event

    @property
    def same_course(self) -> bool:
        """Whether both runs have the same kind of event with other values."""
        return (
            self.expected is not None
            and self.actual is not None
            and _what(self.expected) == _what(self.actual)
        )

    @property
    def names(self) -> list[str]:
        """The names of the values that differ, in order."""
        if self.expected is None or self.actual is None:
            return []
        left, right = self.expected.values, self.actual.values
        return [name for name in left | right if left.get(name, "") != right.get(name, "")]

    @property
    def step(self) -> int:
        """The step of the event."""
        return self.event.step


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison.

    Attributes:
        num_values: The number of compared losses, gradients and weights, by kind.
        differences: All differences. The earliest difference is first.
    """

    num_values: dict[str, int]
    differences: tuple[Difference, ...]

    @property
    def identical(self) -> bool:
        """Whether there is no difference."""
        return not self.differences


def compare(expected: Sequence[RankRecord], actual: Sequence[RankRecord]) -> Verdict:
    """Compares the events of each rank bit for bit.

    The comparison of a rank ends at an event that only one run has.
    """
    num_values: Counter[str] = Counter()
    differences = []
    for rank, (left, right) in enumerate(zip(expected, actual, strict=True)):
        for index, (one, other) in enumerate(zip_longest(left.events, right.events)):
            if one == other:
                num_values[one.kind] += len(one.values)
                continue
            difference = Difference(rank, index, one, other)
            differences.append(difference)
            if not difference.same_course:
                break
            num_values[one.kind] += len(one.values)
    differences.sort(key=_when)
    return Verdict(dict(num_values), tuple(differences))


def _what(event: Event) -> tuple[str, int, int, tuple[str, ...]]:
    return event.kind, event.step, event.model, tuple(event.values)


def _when(difference: Difference) -> tuple[float, int, int, int]:
    event = difference.event
    # The weights of a step follow all other events of the step.
    late = 0.5 if event.kind == "weight" else 0.0
    return event.step + late, _ORDER.index(event.kind), difference.index, difference.rank
