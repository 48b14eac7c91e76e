"""The result of ``ddpx parity`` as tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch

from ddpx.cli.parity.record import RankRecord
from ddpx.errors import count, plural
from ddpx.testing.events import Difference, Verdict, describe
from ddpx.timeline.texts import table

_MIB = 1 << 20
_MOST_STEPS = 20
_KINDS = ("loss", "gradient", "weight")  # in the order of a step


def steps_table(
    expected: Sequence[RankRecord], verdict: Verdict, actual: RankRecord, wrapper: str
) -> str:
    """Table of the losses of rank 0, and of the equality of values on all ranks, for each step.

    Args:
        expected: The records of all ranks, with DDP.
        verdict: The result of the comparison.
        actual: The record of rank 0, with ``wrapper``.
        wrapper: The name of the class that replaces DDP.
    """
    losses, ours = _losses(expected[0]), _losses(actual)
    # A step whose backward begins at several values has no loss.
    steps = sorted(
        {event.step for record in (expected[0], actual) for event in record.events} - {0}
    )
    if len(steps) > _MOST_STEPS:
        differing = {difference.step for difference in verdict.differences}
        wanted = [*steps[:5], *sorted(differing & set(steps))[:10], *steps[-5:]]
        steps = sorted(set(wanted))
    rows = [
        [
            step,
            losses.get(step, ""),
            ours.get(step, ""),
            *(_agreement(verdict, kind, step) for kind in _KINDS),
        ]
        for step in steps
    ]
    headers = ("step", "loss, DDP", f"loss, {wrapper}", "losses", "gradients", "weights")
    return table(headers, rows)


def costs_table(expected: Sequence[RankRecord], actual: Sequence[RankRecord], wrapper: str) -> str:
    """Table of step times and memory of both runs."""
    times, memory = [], []
    for rank, (left, right) in enumerate(zip(expected, actual, strict=True)):
        times.append([f"rank {rank}: median step, ms", *_pair(_step_ms(left), _step_ms(right))])
        pair = _pair(left.peak_bytes / _MIB, right.peak_bytes / _MIB)
        memory.append([f"rank {rank}: peak memory, MiB", *pair])
        if left.device_peak_bytes or right.device_peak_bytes:
            pair = _pair(left.device_peak_bytes / _MIB, right.device_peak_bytes / _MIB)
            memory.append([f"rank {rank}: peak on the device, MiB", *pair])
    return table(("", "DDP", wrapper, "ratio"), times + memory)


def compared(verdict: Verdict, num_ranks: int) -> str:
    kinds = [count(number, kind) for kind, number in sorted(verdict.num_values.items())]
    return f"{', '.join(kinds)} compared, bit for bit, on {count(num_ranks, 'rank')}"


def where(difference: Difference, wrapper: str) -> str:
    """The step, the rank and the name of the first value that differs."""
    event = difference.event
    place = f"step {event.step}, rank {difference.rank}"
    if event.kind == "weight":
        place = f"after {place}" if event.step else f"before step 1, rank {difference.rank}"
    model = f" (model {event.model})" if event.model > 0 else ""
    if not difference.same_course:
        return f"{place}{model}: {_course(difference, wrapper)}"
    if event.kind == "loss":
        assert difference.expected is not None and difference.actual is not None
        name = difference.names[0]
        one, other = difference.expected.values[name], difference.actual.values[name]
        off = abs(_number(one) - _number(other))
        return (
            f"{place}: the loss is {one} with DDP and {other} with {wrapper}, difference {off:.3g}"
        )
    what = "gradient of" if event.kind == "gradient" else "weight"
    return f"{place}{model}: the {what} {difference.names[0]}"


def how_far(
    difference: Difference, expected: torch.Tensor | None, actual: torch.Tensor | None
) -> str:
    """The difference of the first tensor, and the number of other tensors that differ."""
    text = describe(expected, actual)
    if num_others := len(difference.names) - 1:
        verb = "differs" if num_others == 1 else "differ"
        text += f"; {count(num_others, f'more {difference.event.kind}')} of this step {verb}, too"
    return text


def _course(difference: Difference, wrapper: str) -> str:
    one, other = difference.expected, difference.actual
    if one is None or other is None:
        ended, goes_on = ("DDP", wrapper) if one is None else (wrapper, "DDP")
        return (
            f"the run with {ended} ends here, but the run with {goes_on} continues with a "
            f"{difference.event.kind}"
        )
    if (one.kind, one.step, one.model) == (other.kind, other.step, other.model):
        unlike = sorted(set(one.values) ^ set(other.values))
        if not unlike:
            return f"the {plural(one.kind)} are in a different order"
        return f"the names of the {plural(one.kind)} differ: {', '.join(unlike[:5])}"
    return (
        f"the runs take different courses: a {one.kind} of step {one.step} with DDP, but "
        f"a {other.kind} of step {other.step} with {wrapper}"
    )


def _number(loss: str | None) -> float | complex:
    value = complex(loss or "nan")
    return value if loss and "j" in loss else value.real


def _losses(record: RankRecord) -> dict[int, str]:
    """The last loss of each step, by step."""
    return {
        event.step: f"{_number(list(event.values.values())[-1]):.9g}"
        for event in record.events
        if event.kind == "loss" and event.values
    }


def _agreement(verdict: Verdict, kind: str, step: int) -> str:
    differing = [d for d in verdict.differences if (d.event.kind, d.step) == (kind, step)]
    if not differing:
        broken = (d for d in verdict.differences if not d.same_course)
        is_behind = any(d.step < step or (d.step == step and _is_before(d, kind)) for d in broken)
        return "not compared" if is_behind else "identical"
    number = sum(max(len(d.names), 1) for d in differing)
    return f"{number} differs" if number == 1 else f"{number} differ"


def _is_before(difference: Difference, kind: str) -> bool:
    return _KINDS.index(difference.event.kind) < _KINDS.index(kind)


def _step_ms(record: RankRecord) -> float | None:
    return median(record.step_ns) / 1e6 if record.step_ns else None


def _pair(left: float | None, right: float | None) -> tuple[str, str, str]:
    if left is None or right is None or left == 0:
        return "", "", ""
    return f"{left:.2f}", f"{right:.2f}", f"{right / left:.2f}"
