"""A search of the best bucket plan, on a simulated training. No ranks are needed.

Usage: python docs/internals/planning.py [MS]    by which each all-reduce delays the backward
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ddpx.planning import ReduceCost
from ddpx.planning.candidates import Buckets, ReadyGradient
from ddpx.planning.search import PlanSearch

MIB = 1 << 20
COST = ReduceCost([(4096, 0.001), (MIB, 0.003), (16 * MIB, 0.033)])  # 1 ms, and 2 ms for each MiB
LAYERS = tuple(ReadyGradient(MIB, ready_s=0.003 * (layer + 1)) for layer in range(12))
DEFAULT: Buckets = ((0,), tuple(range(1, 12)))  # caps of 1 and 25 MiB


class Simulation:
    """A training whose clock is a formula. It has the methods of ``Training`` in planning."""

    def __init__(self, slowed_s: float) -> None:
        self.gradients, self.plan, self._slowed_s = LAYERS, DEFAULT, slowed_s

    def default_buckets(self) -> Buckets:
        return self.plan

    def use(self, buckets: Buckets) -> None:
        self.plan = buckets

    def step_times_s(self, steps: range) -> list[tuple[float, float]]:
        delay = end = 0.0
        for bucket in self.plan:
            ready = max(LAYERS[index].ready_s for index in bucket) + delay
            end = max(end, ready) + COST(MIB * len(bucket))
            delay += self._slowed_s  # computation waits for a core
        return [(0.020 + end, end)] * len(steps)

    def arrivals_s(self, steps: range) -> list[float]:
        return [layer.ready_s for layer in LAYERS]

    def reduce_time_s(self, num_bytes: int) -> float:
        return COST(num_bytes)

    def highest(self, values: Sequence[float]) -> list[float]:
        return list(values)  # one rank

    def of_rank_0(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def nothing(self) -> None:
        pass

    record = stop = nothing


if __name__ == "__main__":
    search = PlanSearch(Simulation(slowed_s=float((sys.argv[1:] or ["0"])[0]) / 1000))
    state = ""
    for step in range(300):
        ended = search.advance(step)
        if search.report.state != state:
            state = search.report.state
            print(f"step {step:3}: {state}")
        if ended:
            break
    for plan in search.report.plans:
        sizes = "+".join(str(len(bucket)) for bucket in plan.buckets)
        predicted, measured = 1e3 * plan.predicted_end_s, 1e3 * (plan.measured_end_s or 0)
        times = f"predicted {predicted:.0f} ms, measured {measured:.0f} ms"
        print(f"{plan.name:24} {times:34} {sizes}")
    print(search.report)
