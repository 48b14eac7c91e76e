"""What find_unused_parameters=True costs, in DDP and in ReducerDDP, interleaved.

    python benchmarks/find_unused.py --params 2000 --ranks 2 --rounds 60

For each, a step with it is compared with one without it in the same round: as a share of that step,
and as nanoseconds a parameter.
"""

from __future__ import annotations

import argparse
import functools

import torch
from interleave import Seconds, median_difference, median_ratio, slowest_rank, time_rounds
from models import small_layers
from tabulate import tabulate
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP
from ddpx.testing import RankPool

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


def measure(num_params: int, rounds: int) -> Seconds:
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
    return time_rounds(contenders, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--params", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    with RankPool(arguments.ranks) as pool:
        per_rank = pool.run(measure, arguments.params, arguments.rounds, timeout=1800)
    times = slowest_rank(per_rank)
    rows = []
    for wrapper in WRAPPERS:
        for label in ("off again", "all used", "some unused"):
            name, base = f"{wrapper}, {label}", f"{wrapper}, off"
            share = median_ratio(times, name, base) - 1
            nanoseconds = 1e9 * median_difference(times, name, base) / arguments.params
            rows.append([name, f"{share:+.1%}", f"{nanoseconds:+.0f}"])
    print(f"{arguments.params} parameters, {arguments.ranks} ranks, {arguments.rounds} rounds")
    print(tabulate(rows, ["contender", "of a step without", "ns a parameter"], tablefmt="github"))


if __name__ == "__main__":
    main()
