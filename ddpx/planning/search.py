"""The search of the best bucket plan by measurement: a state machine over the steps of training.

    warming up ─► measuring arrivals ─► measuring costs ─► screening plans ─► comparing ─► done

Each rank calls :meth:`PlanSearch.advance` at the end of each synchronized backward, with the number
of synchronized steps that have ended. All ranks are there between the same collective calls,
however many forwards they have made. A state ends when the number has reached the end of the state.
Each decision follows from numbers that ranks have exchanged there, so that all ranks make the same
decision at the same step.

| state | what a rank does | at the end of the state |
| --- | --- | --- |
| warming up | nothing | |
| measuring arrivals | records when gradients arrive | exchange of the latest times |
| measuring costs | times all-reduces of several sizes | exchange; rank 0 plans and broadcasts |
| screening plans | runs all plans in turns, block by block | exchange of the times of steps |
| comparing | runs the best and the default plan in turns | exchange of the times of steps |
| done | nothing; the owner drops the search | |

From each state but "done", the search may go to "done" with the default plan.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ddpx.planning.blocks import Blocks, Measured, median
from ddpx.planning.candidates import (
    DEFAULT,
    Buckets,
    ReadyGradient,
    candidates,
    decoded,
    encoded,
    predicted_end_s,
)
from ddpx.planning.cost import ReduceCost
from ddpx.planning.gain import gain_of
from ddpx.planning.report import MeasuredPlan, PlanReport
from ddpx.planning.training import Schedule, Training

MOST_STEPS = 300
_KIB, _MIB = 1 << 10, 1 << 20
_LEAST_BYTES, _MOST_BYTES = 4 * _KIB, 32 * _MIB


class State(enum.Enum):
    """The states of a search. The values are words for reports."""

    WARMING_UP = "warming up"
    ARRIVALS = "measuring arrivals"
    COSTS = "measuring costs"
    SCREENING = "screening plans"
    COMPARING = "comparing"
    DONE = "done"


_NEXT = {
    State.WARMING_UP: State.ARRIVALS,
    State.ARRIVALS: State.COSTS,
    State.COSTS: State.SCREENING,
    State.SCREENING: State.COMPARING,
}


class PlanSearch:
    """The search on one rank. A wrapper owns the search, and drops it at its end.

    The end of a backward calls it, on the thread that ends the backward.

    Args:
        training: The training to measure.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._schedule = Schedule()
        self._state = State.WARMING_UP
        self._first: int | None = None  # step
        self._last = 0  # the step of the last call
        self._due = 0
        self._suspended = False
        self._blocks: Blocks | None = None
        self._default: Buckets = ()
        self._report = PlanReport(self._state.value)

    @property
    def report(self) -> PlanReport:
        """The result of the search so far."""
        num_steps = 0 if self._first is None else self._last - self._first
        return replace(self._report, num_steps=num_steps)

    def suspend(self) -> None:
        """Measures nothing until :meth:`resume`. Meanwhile the default plan is used.

        All ranks suspend their searches between the same two steps.
        """
        if self._blocks is not None and not self._suspended:
            self._blocks.use(self._default)
        self._suspended = True

    def resume(self, num_steps: int) -> None:
        """Repeats the measurement that ran. All ranks resume between the same two steps."""
        if self._suspended and not self._is_too_late(num_steps):
            self._suspended = False
            self._repeat(num_steps)

    def advance(self, num_steps: int) -> bool:
        """Goes on, at the end of a synchronized backward. A collective call at some steps.

        Args:
            num_steps: The number of synchronized steps that have ended. The same on all ranks.

        Returns:
            Whether the search has ended.
        """
        if self._first is None:
            self._first = self._last = num_steps
            self._due = num_steps + self._schedule.warm_up
        self._last = num_steps
        if self._is_too_late(num_steps):
            self._finish(DEFAULT, f"{MOST_STEPS} steps did not suffice for the measurements")
        elif num_steps >= self._due and not self._suspended:
            self._end_of_state(num_steps)
        return self._report.final

    def _is_too_late(self, num_steps: int) -> bool:
        return self._first is not None and num_steps - self._first > MOST_STEPS

    def stop(self) -> None:
        """The owner drops the search, and uses another plan."""
        self._training.stop()

    def give_up(self, reason: str) -> None:
        """Ends the search with the default plan. All ranks do this at the same step."""
        if self._state is not State.DONE:
            self._finish(DEFAULT, reason)

    # ---- states --------------------------------------------------------------------------------

    def _go_to(self, state: State) -> None:
        if state is not State.DONE and _NEXT.get(self._state) is not state:
            raise AssertionError(f"a search goes from {self._state.value} to {state.value}")
        self._state = state
        self._note(state=state.value)

    def _end_of_state(self, num_steps: int) -> None:
        ends: dict[State, Callable[[int], None]] = {
            State.WARMING_UP: self._begin_arrivals,
            State.ARRIVALS: self._end_arrivals,
            State.COSTS: self._plan,
            State.SCREENING: self._end_block,
            State.COMPARING: self._end_block,
        }
        ends[self._state](num_steps)

    def _repeat(self, num_steps: int) -> None:
        """The steps since the start of the measurement that runs do not count."""
        if self._state is State.ARRIVALS:
            self._due = num_steps + self._schedule.arrivals
        elif self._blocks is not None:
            self._due = self._blocks.begin(num_steps)

    def _begin_arrivals(self, num_steps: int) -> None:
        self._default = self._training.default_buckets()
        self._training.record()
        self._go_to(State.ARRIVALS)
        self._due = num_steps + self._schedule.arrivals

    def _end_arrivals(self, num_steps: int) -> None:
        training = self._training
        arrivals = training.arrivals_s(range(self._due - self._schedule.arrivals, self._due))
        ready = training.highest(arrivals)
        latest = max(ready, default=0.0)
        self._note(
            gradients=tuple(
                ReadyGradient(each.num_bytes, each.kind, each.alone, ready_s or latest)
                for each, ready_s in zip(training.gradients, ready, strict=True)
            )
        )
        if latest == 0:
            self._finish(DEFAULT, "no arrival of a gradient could be measured")
            return
        self._go_to(State.COSTS)
        self._due = num_steps + 1

    def _plan(self, num_steps: int) -> None:
        training, gradients = self._training, self._report.gradients
        sizes = _sizes(sum(each.num_bytes for each in gradients))
        times = training.highest([training.reduce_time_s(size) for size in sizes])
        costs = tuple(zip(map(float, sizes), times, strict=True))
        cost = ReduceCost(costs)
        found = candidates(gradients, self._default, cost)
        plans = decoded(training.of_rank_0(encoded(found, len(gradients))), len(gradients))
        self._note(
            costs=costs,
            plans=tuple(
                MeasuredPlan(name, buckets, predicted_end_s(gradients, buckets, cost))
                for name, buckets in plans.items()
            ),
        )
        if len(plans) == 1:
            self._finish(DEFAULT, "every other plan is equal to the default plan")
            return
        self._go_to(State.SCREENING)
        count = len(plans)
        turns = range(self._schedule.screening_rounds)
        # Each turn begins with another plan, so that the first place goes to several plans.
        order = [(place + turn) % count for turn in turns for place in range(count)]
        self._begin_blocks(order, num_steps)

    def _begin_blocks(self, order: Sequence[int], num_steps: int) -> None:
        plans = [plan.buckets for plan in self._report.plans]
        self._blocks = Blocks(self._training, self._schedule, plans, order)
        self._due = self._blocks.begin(num_steps)

    def _end_block(self, num_steps: int) -> None:
        assert self._blocks is not None
        if self._blocks.end():
            self._due = self._blocks.begin(num_steps)
            return
        measured = self._blocks.exchange()
        self._blocks = None
        if self._state is State.SCREENING:
            self._end_screening(measured, num_steps)
        else:
            self._decide(measured)

    def _end_screening(self, measured: Measured, num_steps: int) -> None:
        plans = [
            MeasuredPlan(
                plan.name,
                plan.buckets,
                plan.predicted_end_s,
                measured_end_s=median(measured.ends_s[number]),
                step_s=median(measured.steps_s[number]),
            )
            for number, plan in enumerate(self._report.plans)
        ]
        self._note(plans=tuple(plans))
        known = [number for number, plan in enumerate(plans) if plan.step_s is not None]
        if 0 not in known or len(known) == 1:
            self._finish(DEFAULT, "the times of steps could not be measured")
            return
        best = min(known, key=lambda number: (plans[number].step_s, number))
        if best == 0:
            self._finish(DEFAULT, "no other plan was faster")
            return
        self._go_to(State.COMPARING)
        # Alternating order, so that a drift of the machine cancels.
        pairs = [(0, best), (best, 0)]
        order = [number for pair in range(self._schedule.pairs) for number in pairs[pair % 2]]
        self._begin_blocks(order, num_steps)

    def _decide(self, measured: Measured) -> None:
        best = next(number for number in measured.steps_s if number != 0)
        gain = gain_of(measured.steps_s[0], measured.steps_s[best])
        name = self._report.plans[best].name
        self._note(gain=gain)
        if gain is None:
            self._finish(DEFAULT, "the times of steps could not be measured")
        elif gain.is_certain:
            self._finish(name, f"it saves {gain}")
        else:
            self._finish(DEFAULT, f"the gain of the plan {name!r} is {gain}, which is not certain")

    def _finish(self, name: str, reason: str) -> None:
        self._blocks = None
        self._training.stop()
        if self._state in (State.SCREENING, State.COMPARING) and not self._suspended:
            plans = {plan.name: plan.buckets for plan in self._report.plans}
            self._training.use(plans[name])
        self._go_to(State.DONE)
        self._note(chosen=name, reason=reason)

    def _note(self, **found: Any) -> None:
        self._report = replace(self._report, **found)


def _sizes(total: int) -> list[int]:
    """The sizes of timed all-reduces: at least two, up to the size of all gradients or 32 MiB."""
    most = max(min(total, _MOST_BYTES), 2 * _LEAST_BYTES)
    sizes = [_LEAST_BYTES]
    while 4 * sizes[-1] < most:
        sizes.append(4 * sizes[-1])
    return [*sizes, most]
