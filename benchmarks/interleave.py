"""Times contenders that take turns, so that a noisy moment of the machine hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist

Seconds = dict[str, list[float]]  # by contender, round by round


def time_rounds(
    contenders: Mapping[str, Callable[[], None]],
    rounds: int,
    warm_up: int = 4,
    clock: Callable[[], float] = time.perf_counter,
) -> Seconds:
    """Runs on every rank: each contender once a round, all ranks together.

    With ``time.thread_time`` it is the work of the thread that trains which is measured, without
    its waits: steadier on a busy machine.
    """
    times: Seconds = {name: [] for name in contenders}
    for number in range(warm_up + rounds):
        for name, run in contenders.items():
            dist.barrier()
            start = clock()
            run()
            seconds = clock() - start
            if number >= warm_up:
                times[name].append(seconds)
    return times


def slowest_rank(per_rank: Sequence[Seconds]) -> Seconds:
    """A step takes as long as on its slowest rank."""
    return {
        name: [max(at) for at in zip(*(rank[name] for rank in per_rank), strict=True)]
        for name in per_rank[0]
    }


def median_ratio(times: Seconds, name: str, base: str) -> float:
    """Median over rounds of the ratio to another contender in the same round."""
    return statistics.median(a / b for a, b in zip(times[name], times[base], strict=True))


def median_difference(times: Seconds, name: str, base: str) -> float:
    """Median over rounds of the seconds beyond another contender in the same round."""
    return statistics.median(a - b for a, b in zip(times[name], times[base], strict=True))
