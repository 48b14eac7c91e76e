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
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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


def _many_small() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(500)]
    return nn.Sequential(*layers), torch.randn(8, 16)


def _transformer() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(320, 8, 1280, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
    return model, torch.randn(4, 64, 320)


def _wide() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6))), torch.randn(8, 2048)


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "1,000 small tensors": _many_small,
    "transformer, 10 M": _transformer,
    "wide layers, 25 M": _wide,
}


def _step_seconds(model: nn.Module, x: torch.Tensor) -> float:
    model.zero_grad()
    dist.barrier()
    start = time.perf_counter()
    model(x).square().mean().backward()
    return time.perf_counter() - start


def measure(model_name: str, rounds: int) -> dict[str, list[float]]:
    """Runs on every rank: seconds per contender and round."""
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
        contenders[name] = (make(module), x)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    warm_up = 4
    for number in range(warm_up + rounds):
        for name, (model, x) in contenders.items():
            seconds = _step_seconds(model, x)
            if number >= warm_up:
                times[name].append(seconds)
    return times


def _summary(per_rank: list[dict[str, list[float]]]) -> list[list[object]]:
    slowest = {
        name: [max(at) for at in zip(*(rank[name] for rank in per_rank), strict=True)]
        for name in per_rank[0]
    }
    rows: list[list[object]] = []
    for name, seconds in slowest.items():
        ratios = [mine / bare for mine, bare in zip(seconds, slowest["bare"], strict=True)]
        rows.append([name, 1e3 * statistics.median(seconds), statistics.median(ratios)])
    return rows


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
            rows = _summary(per_rank)
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
