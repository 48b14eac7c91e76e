"""The two bucket plans that the picture and the page draw: the default plan and the chosen plan.

If the default plan was kept, the fastest other plan takes the place of the chosen plan. If no step
was measured, the other plan with the earliest predicted end takes this place.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddpx.errors import count
from ddpx.planning import MeasuredPlan, PlanReport, ReduceCost
from ddpx.planning.candidates import predicted_spans_s
from ddpx.timeline.texts import size_text

_MS = 1e3


@dataclass(frozen=True)
class PlanRow:
    """A plan over the time of a backward. Times count from the start of the backward.

    Attributes:
        title: The name of the plan, its number of buckets, and the time of a step.
        spans_ms: The predicted start and end of each all-reduce, in order.
        sizes: The size of each bucket, as a text.
        predicted_end_ms: The predicted end of communication.
        measured_end_ms: The measured end of communication. None: not measured.
    """

    title: str
    spans_ms: tuple[tuple[float, float], ...]
    sizes: tuple[str, ...]
    predicted_end_ms: float
    measured_end_ms: float | None


def title(report: PlanReport) -> str:
    """A sentence with the result of the search, without a full stop."""
    return f"{str(report)[0].upper()}{str(report)[1:]}"


def arrivals_ms(report: PlanReport) -> list[float]:
    """The time of each gradient on its slowest rank, in ms since the start of the backward."""
    return [gradient.ready_s * _MS for gradient in report.gradients]


def plan_rows(report: PlanReport) -> list[PlanRow]:
    """The plans to draw. Empty if the search ended before it measured plans."""
    if not report.plans:
        return []
    default, *others = report.plans
    chosen = [plan for plan in others if plan.name == report.chosen]
    measured = [plan for plan in others if plan.step_s is not None]
    fastest = sorted(measured, key=lambda plan: plan.step_s or 0.0)
    soonest = sorted(others, key=lambda plan: plan.predicted_end_s)
    return [_row(report, plan) for plan in (default, *(chosen or fastest or soonest)[:1])]


def _row(report: PlanReport, plan: MeasuredPlan) -> PlanRow:
    step = "" if plan.step_s is None else f", step {plan.step_s * _MS:.1f} ms"
    spans = predicted_spans_s(report.gradients, plan.buckets, ReduceCost(report.costs))
    return PlanRow(
        title=f"{plan.name}: {count(len(plan.buckets), 'bucket')}{step}",
        spans_ms=tuple((begin * _MS, end * _MS) for begin, end in spans),
        sizes=tuple(
            size_text(sum(report.gradients[index].num_bytes for index in bucket))
            for bucket in plan.buckets
        ),
        predicted_end_ms=plan.predicted_end_s * _MS,
        measured_end_ms=None if plan.measured_end_s is None else plan.measured_end_s * _MS,
    )
