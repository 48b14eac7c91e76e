"""The result of a search of the best bucket plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ddpx.planning.candidates import DEFAULT, Buckets, ReadyGradient
from ddpx.planning.gain import Gain


@dataclass(frozen=True)
class MeasuredPlan:
    """A plan that the search has measured.

    Attributes:
        name: How the plan was made.
        buckets: The gradients of each bucket, by index, in the order of the all-reduces.
        predicted_end_s: The predicted time in seconds from the start of the backward until all
            buckets are reduced.
        measured_end_s: The measured time, as a median of steps, on the slowest rank. None: not
            measured.
        step_s: The time of a step, as a median, on the slowest rank. None: not measured.
    """

    name: str
    buckets: Buckets
    predicted_end_s: float
    measured_end_s: float | None = None
    step_s: float | None = None


@dataclass(frozen=True)
class PlanReport:
    """The result of ``bucket_cap_mb="auto"`` so far. ``str()`` of it is a sentence.

    Attributes:
        state: What the search does: ``"warming up"``, ``"measuring arrivals"``, ``"measuring
            costs"``, ``"screening plans"``, ``"comparing"`` or ``"done"``.
        num_steps: The number of synchronized steps that the search has used.
        chosen: The name of the chosen plan. None before the end.
        reason: Why the search chose this plan. Empty before the end.
        gain: The gain of the best other plan over the default plan. None if the search did not
            compare the two.
        plans: The measured plans. The first is the default plan.
        gradients: The gradients with their measured times, by index.
        costs: Pairs of a size in bytes and the time in seconds of an all-reduce of this size.

    Example:
        >>> print(ddpx.plan_report(model))
        None
    """

    state: str
    num_steps: int = 0
    chosen: str | None = None
    reason: str = ""
    gain: Gain | None = None
    plans: tuple[MeasuredPlan, ...] = ()
    gradients: tuple[ReadyGradient, ...] = ()
    costs: tuple[tuple[float, float], ...] = ()

    @property
    def final(self) -> bool:
        """Whether the plan does not change any more."""
        return self.chosen is not None

    def __str__(self) -> str:
        if self.chosen is None:
            return f"the search of the best plan is {self.state}, after {self.num_steps} steps"
        kept = "the default plan was kept" if self.chosen == DEFAULT else f"plan: {self.chosen}"
        return f"{kept}, after {self.num_steps} steps: {self.reason}"

    @property
    def default_plan(self) -> MeasuredPlan | None:
        """The default plan. None if the search ended before it measured plans."""
        return self.plans[0] if self.plans else None

    @property
    def chosen_plan(self) -> MeasuredPlan | None:
        """The chosen plan. None if there is none, or if the search measured no plans."""
        return next((plan for plan in self.plans if plan.name == self.chosen), None)

    def to_json(self) -> dict[str, Any]:
        """Returns the report as values that JSON supports.

        Example:
            >>> ddpx.PlanReport("done", chosen="default").to_json()["chosen"]
            'default'
        """
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> PlanReport:
        """Reverses :meth:`to_json`.

        Args:
            values: The values from :meth:`to_json`.

        Raises:
            KeyError, TypeError: ``to_json`` did not make the values.

        Example:
            >>> report = ddpx.PlanReport("done", chosen="default")
            >>> ddpx.PlanReport.from_json(report.to_json()) == report
            True
        """
        gain = values["gain"]
        return cls(
            **{
                **values,
                "gain": None if gain is None else Gain(**gain),
                "plans": tuple(_plan(each) for each in values["plans"]),
                "gradients": tuple(ReadyGradient(**each) for each in values["gradients"]),
                "costs": tuple((size, time) for size, time in values["costs"]),
            }
        )


def _plan(values: dict[str, Any]) -> MeasuredPlan:
    buckets = tuple(tuple(bucket) for bucket in values["buckets"])
    return MeasuredPlan(**{**values, "buckets": buckets})
