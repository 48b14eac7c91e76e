"""What find_unused_parameters=True costs, in DDP and in ReducerDDP, interleaved.

    python benchmarks/find_unused.py --params 2000 --ranks 2 --rounds 60

For each, a step with it is compared with one without it in the same round: as a share of that step,
and as nanoseconds a parameter; then the same for the CPU time of the thread that trains.
"""

from __future__ import annotations

import argparse
import functools
import time

import torch
from interleave import Seconds, median_difference, median_ratio, slowest_rank, time_rounds
from models import small_layers
from tabulate import tabulate
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP
from ddpx.testing import RankPool

LABELS = ("off again", "all used", "some unused")
WRAPPERS = {"DDP": DistributedDataParallel, "ddpx": ReducerDDP}


class WithUnused(nn.Module):
    """Layers all of which are used, and two params that never are."""

    def __init__(self, used: nn.Module) -> None:
        super().__init__()
        self.used = used
        self.unused = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def _step(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    model(x).square().mean().backward()


def measure(num_params: int, rounds: int, of_thread: bool) -> Seconds:
    """Runs on every rank."""
    contenders = {}
    for name, wrapper in WRAPPERS.items():
        for label, find, has_unused in (
            ("off", False, False),
            ("off again", False, False),
            ("all used", True, False),
            ("some unused", True, True),
        ):
            torch.manual_seed(0)
            module, x = small_layers(num_params)
            model = wrapper(
                WithUnused(module) if has_unused else module,
                find_unused_parameters=find,
                gradient_as_bucket_view=True,
            )
            contenders[f"{name}, {label}"] = functools.partial(_step, model, x)
    return time_rounds(
        contenders, rounds, clock=time.thread_time if of_thread else time.perf_counter
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--params", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    rows = [[f"{wrapper}, {label}"] for wrapper in WRAPPERS for label in LABELS]
    with RankPool(arguments.ranks) as pool:
        for of_thread in (False, True):
            per_rank = pool.run(
                measure, arguments.params, arguments.rounds, of_thread, timeout=1800
            )
            times = slowest_rank(per_rank)
            for row in rows:
                base = row[0].split(",")[0] + ", off"
                share = median_ratio(times, row[0], base) - 1
                nanoseconds = 1e9 * median_difference(times, row[0], base) / arguments.params
                row += [f"{share:+.1%}", f"{nanoseconds:+.0f}"]
    print(f"{arguments.params} parameters, {arguments.ranks} ranks, {arguments.rounds} rounds")
    headers = ["contender", "of a step", "ns a parameter", "of its CPU time", "ns a parameter"]
    print(tabulate(rows, headers, tablefmt="github"))


if __name__ == "__main__":
    main()
