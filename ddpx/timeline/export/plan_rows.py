"""What the picture and the page draw of a search of bucket plans: two plans, one above the other.

These are the default plan and the chosen plan. If the default plan was kept, the fastest other plan
stands beside it.
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
    """A plan over the time of a backward. All times are in ms since the begin of the backward.

    Attributes:
        title: The name of the plan, its number of buckets, and the time of a step.
        spans: The predicted begin and end of each all-reduce, in order.
        sizes: The size of each bucket, as a text.
        predicted: The predicted end of communication.
        measured: The measured end of communication. None: not measured.
    """

    title: str
    spans: tuple[tuple[float, float], ...]
    sizes: tuple[str, ...]
    predicted: float
    measured: float | None


def title(report: PlanReport) -> str:
    """What the search has found, as a sentence without its full stop."""
    return f"{str(report)[0].upper()}{str(report)[1:]}"


def arrivals(report: PlanReport) -> list[float]:
    """The time of each gradient on its slowest rank, in ms since the begin of the backward."""
    return [gradient.ready_s * _MS for gradient in report.gradients]


def plan_rows(report: PlanReport) -> list[PlanRow]:
    """The plans to draw. Empty if the search ended before it measured plans."""
    if not report.plans:
        return []
    default, *others = report.plans
    chosen = [plan for plan in others if plan.name == report.chosen]
    measured = [(plan.step_s, number) for number, plan in enumerate(others) if plan.step_s]
    fastest = [others[min(measured)[1]]] if measured else others[:1]
    return [_row(report, plan) for plan in (default, *(chosen or fastest))]


def _row(report: PlanReport, plan: MeasuredPlan) -> PlanRow:
    step = "" if plan.step_s is None else f", step {plan.step_s * _MS:.1f} ms"
    spans = predicted_spans_s(report.gradients, plan.buckets, ReduceCost(report.costs))
    return PlanRow(
        title=f"{plan.name}: {count(len(plan.buckets), 'bucket')}{step}",
        spans=tuple((begin * _MS, end * _MS) for begin, end in spans),
        sizes=tuple(
            size_text(sum(report.gradients[index].num_bytes for index in bucket))
            for bucket in plan.buckets
        ),
        predicted=plan.predicted_end_s * _MS,
        measured=None if plan.measured_end_s is None else plan.measured_end_s * _MS,
    )
