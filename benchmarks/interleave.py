"""Times contenders in turns, so that noise of the machine affects all of them alike."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

Seconds = dict[str, list[float]]  # by contender, round by round


@dataclass(frozen=True)
class Effort:
    """The number of rounds: as many as fit into ``seconds``, within limits."""

    seconds: float
    min_rounds: int
    max_rounds: int = 200
    warm_up: int = 2  # DDP and ReducerDDP rebuild their buckets before the second step

    def rounds(self, seconds_per_round: float) -> int:
        """The number of rounds, the same on all ranks even if their arguments differ."""
        # NCCL cannot send tensors of the host.
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        slowest = torch.tensor([seconds_per_round], device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        fitting = int(self.seconds / max(slowest.item(), 1e-6))
        return min(max(fitting, self.min_rounds), self.max_rounds)


def time_rounds(
    contenders: Mapping[str, Callable[[], object]],
    effort: Effort,
    clock: Callable[[], float] = time.perf_counter,
    before_each: Callable[[str], object] | None = None,
    after_each: Callable[[str], object] | None = None,
) -> Seconds:
    """Runs on every rank: each contender once per round, on all ranks at once, in shuffled
    order.

    The order differs from round to round, so that no contender always follows the same other one in
    the caches.

    Args:
        clock: With ``time.thread_time``, the CPU time of the training thread is measured, without
            its waits. This is steadier on a busy machine.
        before_each: Called with the name of the next contender, untimed, after all ranks have
            arrived.
        after_each: Called in the same way after the contender has run in a measured round.
    """
    times: Seconds = {name: [] for name in contenders}
    # With thousands of modules a full garbage collection takes long, and would count for one
    # contender.
    gc.collect()
    gc.freeze()
    for number in range(effort.warm_up):
        start = time.perf_counter()
        _run_round(contenders, number, clock, before_each)
        round_seconds = time.perf_counter() - start
    for number in range(effort.rounds(round_seconds)):
        for name, seconds in _run_round(contenders, number, clock, before_each, after_each).items():
            times[name].append(seconds)
    gc.unfreeze()
    return times


def slowest_rank(per_rank: Sequence[Seconds]) -> Seconds:
    """The time of a step on its slowest rank."""
    return {
        name: [max(at) for at in zip(*(rank[name] for rank in per_rank), strict=True)]
        for name in per_rank[0]
    }


def _run_round(
    contenders: Mapping[str, Callable[[], object]],
    number: int,
    clock: Callable[[], float],
    before_each: Callable[[str], object] | None,
    after_each: Callable[[str], object] | None = None,
) -> dict[str, float]:
    taken = {}
    for name in random.Random(number).sample(list(contenders), len(contenders)):
        run = contenders[name]
        dist.barrier()
        if before_each is not None:
            before_each(name)
        start = clock()
        run()
        taken[name] = clock() - start
        if after_each is not None:
            after_each(name)
    return taken
