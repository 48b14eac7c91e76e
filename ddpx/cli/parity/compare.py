"""Compares what two runs of a script recorded, and finds the first place where they part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from ddpx.cli.parity.record import Event, RankRecord

_ORDER = ("weight", "loss", "gradient")  # within a step; weights of step 0 come before step 1


@dataclass(frozen=True)
class Difference:
    """An event that is not the same in both runs.

    Attributes:
        rank, index: of the event, among those of its rank.
        expected, actual: None if one run had no such event.
    """

    rank: int
    index: int
    expected: Event | None
    actual: Event | None

    @property
    def event(self) -> Event:
        event = self.expected or self.actual
        assert event is not None
        return event

    @property
    def same_course(self) -> bool:
        """Whether both runs did the same thing there, with other numbers."""
        return (
            self.expected is not None
            and self.actual is not None
            and _what(self.expected) == _what(self.actual)
        )

    @property
    def names(self) -> list[str]:
        """Which values differ, in order."""
        if self.expected is None or self.actual is None:
            return []
        left, right = self.expected.values, self.actual.values
        return [name for name in left | right if left.get(name, "") != right.get(name, "")]

    @property
    def step(self) -> int:
        return self.event.step


@dataclass(frozen=True)
class Verdict:
    """Attributes:
    num_values: how many losses, gradients and weights were compared, by kind.
    differences: all, the earliest first.
    """

    num_values: dict[str, int]
    differences: tuple[Difference, ...]

    @property
    def identical(self) -> bool:
        return not self.differences


def compare(expected: Sequence[RankRecord], actual: Sequence[RankRecord]) -> Verdict:
    """Rank by rank, event by event, bit by bit. After an event that only one run had nothing more
    of the rank is compared."""
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
    # A weight's step is that which made it: it comes after everything else of that step.
    late = 0.5 if event.kind == "weight" else 0.0
    return event.step + late, _ORDER.index(event.kind), difference.index, difference.rank
