"""Measures a wrapper's CPU time per parameter in nanoseconds, without network and waits.

    python benchmarks/per_param.py --params 4000 --rounds 60

One rank runs all code paths (DDPX_FORCE_COMM=1) on a model of tiny parameters with almost no
arithmetic. Contenders take turns, wrapped ones twice. Figures are medians of the difference to the
bare module of the same round, for forward and backward of the training thread.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP

WRAPPERS = {"DDP": DistributedDataParallel, "ddpx": ReducerDDP}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "views, find unused": {"gradient_as_bucket_view": True, "find_unused_parameters": True},
}


class TinyParams(nn.Module):
    """A model whose forward and backward are one operation each."""

    def __init__(self, num_params: int) -> None:
        super().__init__()
        self.params = nn.ParameterList(nn.Parameter(torch.ones(16)) for _ in range(num_params))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(list(self.params)).sum() * x


def _contenders(num_params: int) -> dict[str, nn.Module]:
    contenders: dict[str, nn.Module] = {"bare": TinyParams(num_params)}
    for copy in ("", ", again"):
        for name, wrapper in WRAPPERS.items():
            for setting, options in SETTINGS.items():
                contenders[f"{name}, {setting}{copy}"] = wrapper(TinyParams(num_params), **options)
    return contenders


def measure(num_params: int, rounds: int, warm_up: int = 3) -> dict[str, list[float]]:
    """CPU seconds of forward and backward, by contender and round."""
    contenders = _contenders(num_params)
    x = torch.ones(())
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(warm_up + rounds):
        for name, model in contenders.items():
            model.zero_grad()
            start = time.thread_time()
            model(x).backward()
            if number >= warm_up:
                times[name].append(time.thread_time() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--params", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    os.environ["DDPX_FORCE_COMM"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    times = measure(arguments.params, arguments.rounds)
    rows = []
    for name in times:
        beyond = [a - b for a, b in zip(times[name], times["bare"], strict=True)]
        rows.append([name, round(1e9 * statistics.median(beyond) / arguments.params)])
    print(f"{arguments.params} parameters of 16 elements, 1 rank, {arguments.rounds} rounds")
    print(tabulate(rows, ["contender", "ns a parameter beyond bare"], tablefmt="github"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
