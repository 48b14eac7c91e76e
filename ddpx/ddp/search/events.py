"""Times of steps and of gradients, from the recorded events of a reducer."""

from __future__ import annotations

from collections import defaultdict

import torch

from ddpx import _C

_Kind = _C.EventKind
_OF_STEPS = (
    _Kind.FORWARD_BEGIN,
    _Kind.BACKWARD_BEGIN,
    _Kind.STEP_BEGIN,
    _Kind.WAIT_END,
    _Kind.STEP_END,
)
_NS = 1e-9


def times_of_steps(events: torch.Tensor, steps: range) -> list[tuple[float, float]]:
    """The duration of each step, and the end of its communication, in seconds.

    A step lasts from the start of its last forward to its end. Local micro-steps before it do not
    count. Communication ends with the wait for the last bucket; its time counts from the start of
    the backward. 0 for what the events do not tell.

    Args:
        events: The rows of ``_C.Recording.events()``.
        steps: The numbers of the steps.
    """
    found: dict[int, dict[int, int]] = defaultdict(dict)
    for time, step, kind, _ in _rows(events, steps, _OF_STEPS):
        times = found[step]
        if int(_Kind.STEP_END) not in times:
            times[kind] = time  # the last one before the end of the step
    return [_times(found[step]) for step in steps]


def arrivals_of(events: torch.Tensor, steps: range, num_params: int) -> list[float]:
    """The time of each gradient since the start of the backward in seconds, as a median of steps.

    The last part of a gradient counts. 0 for a gradient that never came.
    """
    begins: dict[int, int] = {}
    table = torch.full((len(steps), num_params), torch.nan, dtype=torch.float64, device="cpu")
    kinds = (_Kind.BACKWARD_BEGIN, _Kind.STEP_BEGIN, _Kind.GRAD_ARRIVED)
    for time, step, kind, index in _rows(events, steps, kinds):
        if kind == int(_Kind.GRAD_ARRIVED):
            begin = begins.get(step, time)
            table[step - steps.start, index] = max((time - begin) * _NS, _NS)
        elif kind == int(_Kind.BACKWARD_BEGIN) or step not in begins:
            begins[step] = time
    medians: list[float] = table.nanmedian(0).values.nan_to_num(0.0).tolist()
    return medians


def _times(times: dict[int, int]) -> tuple[float, float]:
    forward, end = times.get(int(_Kind.FORWARD_BEGIN)), times.get(int(_Kind.STEP_END))
    backward = times.get(int(_Kind.BACKWARD_BEGIN), times.get(int(_Kind.STEP_BEGIN)))
    waited = times.get(int(_Kind.WAIT_END))
    duration = 0.0 if forward is None or end is None else (end - forward) * _NS
    communication = 0.0 if backward is None or waited is None else (waited - backward) * _NS
    return max(duration, 0.0), max(communication, 0.0)


def _rows(
    events: torch.Tensor, steps: range, kinds: tuple[_C.EventKind, ...]
) -> list[tuple[int, int, int, int]]:
    """The events of these steps and kinds, in order of time."""
    numbers = torch.tensor([int(kind) for kind in kinds], device=events.device)
    wanted = torch.isin(events[:, 2], numbers)
    wanted &= (events[:, 1] >= steps.start) & (events[:, 1] < steps.stop)
    rows = events[wanted]
    ordered: list[tuple[int, int, int, int]] = rows[rows[:, 0].argsort(stable=True)].tolist()
    return ordered
