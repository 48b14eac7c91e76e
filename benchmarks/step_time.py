"""Step time of the bare module, of DDP at several settings, and of ReducerDDP, interleaved.

    python benchmarks/step_time.py --ranks 2 --rounds 30

All contenders are built in the same processes and take turns step by step, so that a noisy moment
of the machine hits all alike. The bare module and DDP run twice: what their second copies differ
by is noise. Ratios are to the bare module of the same round, with the slowest rank of each; medians
over rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from interleave import Seconds, median_ratio, slowest_rank, time_rounds
from models import MODELS
from tabulate import tabulate
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP
from ddpx.testing import RankPool

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "static + views": {"static_graph": True, "gradient_as_bucket_view": True},
    "views, cap 5": {"gradient_as_bucket_view": True, "bucket_cap_mb": 5},
    "find unused": {"find_unused_parameters": True},
}


def _step(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    model(x).square().mean().backward()


def measure(model_name: str, rounds: int) -> Seconds:
    """Runs on every rank."""
    makers: dict[str, Callable[[nn.Module], nn.Module]] = {
        "bare": lambda module: module,
        "bare again": lambda module: module,
    }
    for name, options in SETTINGS.items():
        makers[f"DDP, {name}"] = partial(DistributedDataParallel, **options)
        makers[f"ddpx, {name}"] = partial(ReducerDDP, **options)
    makers["DDP, default again"] = DistributedDataParallel
    contenders = {}
    for name, make in makers.items():
        torch.manual_seed(0)
        module, x = MODELS[model_name]()
        contenders[name] = partial(_step, make(module), x)
    return time_rounds(contenders, rounds)


def _summary(times: Seconds) -> list[list[object]]:
    return [
        [name, 1e3 * statistics.median(seconds), median_ratio(times, name, "bare")]
        for name, seconds in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--model", choices=MODELS, action="append", help="may be repeated")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    results = {}
    with RankPool(arguments.ranks) as pool:
        for model_name in arguments.model or MODELS:
            per_rank = pool.run(measure, model_name, arguments.rounds, timeout=1800)
            rows = _summary(slowest_rank(per_rank))
            results[model_name] = {
                str(name): {"ms": ms, "ratio": ratio} for name, ms, ratio in rows
            }
            print(f"\n{model_name}, {arguments.ranks} ranks, {arguments.rounds} rounds")
            headers = ["contender", "median ms", "median ratio to bare"]
            print(tabulate(rows, headers, floatfmt=("", ".2f", ".3f"), tablefmt="github"))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
