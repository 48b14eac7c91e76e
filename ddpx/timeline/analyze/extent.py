"""Selects the step to show, and computes the extents of steps."""

from __future__ import annotations

from ddpx.timeline.model import Interval, RankStep, Recording, Step


def computing(rank_step: RankStep) -> list[Interval]:
    """The forwards and backwards of a step. Never empty."""
    return [*rank_step.forwards, *rank_step.local_backwards, rank_step.backward]


def rank_extent(rank_step: RankStep) -> Interval:
    """The time from the first forward, or from backward without a forward, to the end."""
    return Interval(min(span.begin for span in computing(rank_step)), rank_step.end)


def step_extent(step: Step) -> Interval:
    """The time from the start on the first rank to the end on the last rank."""
    extents = [rank_extent(rank_step) for rank_step in step.ranks.values()]
    return Interval(min(e.begin for e in extents), max(e.end for e in extents))


def not_begun(step: Step, rank: int) -> Interval:
    """The time from the start on the first rank to the start on this rank."""
    return Interval(step_extent(step).begin, rank_extent(step.ranks[rank]).begin)


def check_recorded(recording: Recording) -> None:
    """Raises RuntimeError if the recording has no step."""
    if not recording.steps:
        raise RuntimeError(
            "no complete step was recorded. A complete step is a forward through the wrapper and a "
            "synchronized backward (outside no_sync()), both between start() and stop()."
        )


def find_step(recording: Recording, number: int | None) -> Step:
    """Returns a step of the recording.

    Args:
        recording: The recording.
        number: The number of the step. None: the step of median duration, or the shorter of the two
            middle steps.

    Raises:
        RuntimeError: No complete step was recorded.
        ValueError: The recording has no step of this number.
    """
    check_recorded(recording)
    if number is None:
        by_length = sorted(recording.steps, key=lambda step: step_extent(step).ns)
        return by_length[(len(by_length) - 1) // 2]
    for step in recording.steps:
        if step.number == number:
            return step
    recorded = [step.number for step in recording.steps]
    if len(recorded) <= 10:
        there_are = ", ".join(map(str, recorded))
    else:
        there_are = f"{len(recorded)} from {recorded[0]} to {recorded[-1]}"
    raise ValueError(
        f"step {number} is not in this timeline. Recorded "
        f"{'step' if len(recorded) == 1 else 'steps'}: {there_are}."
    )
