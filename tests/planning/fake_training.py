"""Ranks that train by a fake clock, for tests of the search as pure logic."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ddpx.planning.candidates import Buckets, ReadyGradient, predicted_end_s
from ddpx.planning.cost import ReduceCost

StepTime = Callable[[Buckets, int, int], float]  # of a plan, a step and a rank


class FakeTraining:
    """Rank ``rank`` of a training whose other ranks are computed, not run.

    Attributes:
        calls: The collective calls, and the changes of the plan, each with its step.
        step: The number of ended steps.
    """

    def __init__(
        self,
        gradients: Sequence[ReadyGradient],
        default: Buckets,
        cost: ReduceCost,
        *,
        num_ranks: int = 2,
        slower: Sequence[float] = (1.0, 1.5),
        step_time: StepTime | None = None,
    ) -> None:
        self.gradients = [ReadyGradient(g.num_bytes, g.kind, g.alone) for g in gradients]
        self.default = default
        self.plan = default
        self.calls: list[tuple[int, str]] = []
        self.step = 0
        self.recording = False
        self.cost = cost
        self._arrivals = [[s * g.ready_s for g in gradients] for s in slower[:num_ranks]]
        self._plans: dict[int, Buckets] = {}
        self._step_time = step_time or self._predicted
        self._slowest = [
            ReadyGradient(g.num_bytes, g.kind, g.alone, max(times))
            for g, times in zip(gradients, zip(*self._arrivals, strict=True), strict=True)
        ]
        self._num_ranks = num_ranks

    def run_step(self) -> None:
        """All ranks make a step with the present plan."""
        self._plans[self.step] = self.plan
        self.step += 1

    def default_buckets(self) -> Buckets:
        return self.default

    def use(self, buckets: Buckets) -> None:
        self.calls.append((self.step, "use"))
        self.plan = buckets

    def record(self) -> None:
        self.recording = True

    def stop(self) -> None:
        self.recording = False

    def arrivals_s(self, steps: range) -> list[float]:
        assert self.recording and steps.stop <= self.step
        return self._arrivals[0]

    def step_times_s(self, steps: range) -> list[tuple[float, float]]:
        assert self.recording and steps.stop <= self.step
        assert len({self._plans[step] for step in steps}) == 1, "a block has one plan"
        return [(self._step_time(self._plans[step], step, 0), 0.01) for step in steps]

    def reduce_time_s(self, num_bytes: int) -> float:
        self.calls.append((self.step, "reduce"))
        return self.cost(num_bytes)

    def highest(self, values: Sequence[float]) -> list[float]:
        self.calls.append((self.step, "highest"))
        if len(values) == len(self.gradients):
            return [max(times) for times in zip(*self._arrivals, strict=True)]
        return list(values)

    def of_rank_0(self, values: Sequence[int]) -> list[int]:
        self.calls.append((self.step, "of_rank_0"))
        return list(values)

    def _predicted(self, plan: Buckets, step: int, rank: int) -> float:
        return 0.1 + predicted_end_s(self._slowest, plan, self.cost)
