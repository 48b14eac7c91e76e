"""On an accelerator: tax over the bare module, kernel launches a step, step time of several ranks.

    python benchmarks/gpu.py                       # one GPU
    python benchmarks/gpu.py --device cpu --tiny   # only to see that it runs

Needs nothing but torch and ddpx, so its tables are plain text. With one rank it is NCCL that
communicates (gloo on CPU); several ranks share the one GPU over gloo, since NCCL refuses that.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_models import models
from interleave import Effort, Seconds, slowest_rank, time_rounds
from torch import nn
from torch.autograd import DeviceType
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from ddpx import ReducerDDP
from ddpx.testing import RankPool

VIEWS: dict[str, Any] = {"gradient_as_bucket_view": True}
BATCHED: dict[str, Any] = {**VIEWS, "batched_grad_copy": True}
STATIC: dict[str, Any] = {**VIEWS, "static_graph": True}
CAPS_MB = (5, 100)
_TIMEOUT_S = 590.0
_PROFILED_STEPS = 3
Wrap = Callable[[nn.Module], nn.Module]
Counts = dict[str, dict[str, float]]  # by contender: kernels, copies, buckets a step


def _ddp_wraps() -> dict[str, Wrap]:
    """DDP at its settings, as far as this torch has them."""
    known = inspect.signature(DistributedDataParallel).parameters
    settings = {"default": {}, "views": VIEWS, "static, views": STATIC}
    settings |= {"views, batched copy": BATCHED, "static, views, batched": {**STATIC, **BATCHED}}
    settings |= {f"views, {cap} MiB": {**VIEWS, "bucket_cap_mb": cap} for cap in CAPS_MB}
    wraps: dict[str, Wrap] = {
        f"DDP, {name}": functools.partial(DistributedDataParallel, **options)
        for name, options in settings.items()
        if all(option in known for option in options)
    }
    return {**wraps, "DDP, default again": DistributedDataParallel}


def _forced(module: nn.Module, **options: Any) -> nn.Module:
    """Communicates even with itself."""
    os.environ["DDPX_FORCE_COMM"] = "1"
    try:
        return ReducerDDP(module, **options)
    finally:
        del os.environ["DDPX_FORCE_COMM"]


def _wraps(ranks: int) -> dict[str, Wrap]:
    bare: Wrap = lambda module: module  # noqa: E731
    settings = {"default": {}, "views": VIEWS, "static, views": STATIC}
    wraps: dict[str, Wrap] = {"bare": bare, "bare again": bare, **_ddp_wraps()}
    for name, options in settings.items():
        wraps[f"ddpx, {name}"] = functools.partial(ReducerDDP, **options)
        if ranks == 1:
            wraps[f"ddpx, {name}, forced"] = functools.partial(_forced, **options)
    return wraps


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def _step(model: nn.Module, x: torch.Tensor, device: str) -> None:
    model.zero_grad()
    model(x).float().square().mean().backward()
    _synchronize(device)


def _make_models(
    model_name: str, device: str, tiny: bool, ranks: int
) -> tuple[dict[str, nn.Module], torch.Tensor]:
    made = {}
    for name, wrap in _wraps(ranks).items():
        torch.manual_seed(0)
        module, x = models(tiny)[model_name]()
        made[name] = wrap(module.to(device))
    return made, x.to(device)


def _count(model: nn.Module, x: torch.Tensor, device: str) -> dict[str, float]:
    """What a step launches. Without a device, operators are counted in place of kernels."""
    on_device = device != "cpu"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_device else [])
    with profile(activities=activities) as profiler:
        for _ in range(_PROFILED_STEPS):
            _step(model, x, device)
    wanted = DeviceType.CUDA if on_device else DeviceType.CPU
    names = [event.name for event in profiler.events() if event.device_type == wanted]
    copies = [name for name in names if name.startswith(("Memcpy", "Memset"))]
    reducer = getattr(model, "reducer", None)
    buckets = reducer.report.num_launches if isinstance(model, ReducerDDP) and reducer else 0
    return {
        "kernels": (len(names) - len(copies)) / _PROFILED_STEPS,
        "copies": len(copies) / _PROFILED_STEPS,
        "buckets": float(buckets),
    }


def time_and_count(
    model_name: str, device: str, tiny: bool, ranks: int, effort: Effort
) -> tuple[Seconds, Counts]:
    """Runs on every rank. Counts are of one rank alone, as each would launch them."""
    made, x = _make_models(model_name, device, tiny, ranks)
    steps = {name: functools.partial(_step, model, x, device) for name, model in made.items()}
    times = time_rounds(steps, effort)
    for model in made.values():
        if isinstance(model, ReducerDDP):
            model._set_ddp_runtime_logging_sample_rate(1)  # so that the report is of these steps
    counts = {name: _count(model, x, device) for name, model in made.items()}
    return times, counts


def _pooled(launches: Sequence[Seconds]) -> Seconds:
    return {name: [s for times in launches for s in times[name]] for name in launches[0]}


def _rows(times: Seconds, counts: Counts) -> list[dict[str, Any]]:
    best = min(
        (name for name in times if name.startswith("DDP") and "again" not in name),
        key=lambda name: statistics.median(times[name]),
    )

    def ratio(name: str, base: str) -> float:
        return statistics.median(a / b for a, b in zip(times[name], times[base], strict=True))

    bare = counts["bare"]
    return [
        {
            "contender": name + (" (best)" if name == best else ""),
            "ms": round(1e3 * statistics.median(times[name]), 3),
            "to bare": round(ratio(name, "bare"), 4),
            "to best DDP": round(ratio(name, best), 4),
            "kernels": round(counts[name]["kernels"], 1),
            "beyond bare": round(counts[name]["kernels"] - bare["kernels"], 1),
            "copies beyond": round(counts[name]["copies"] - bare["copies"], 1),
            "buckets": round(counts[name]["buckets"]),
        }
        for name in times
    ]


def _print_table(rows: list[dict[str, Any]]) -> None:
    headers = list(rows[0])
    lines = [headers, *([str(row[key]) for key in headers] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join(cells), flush=True)


def _verdicts(rows: list[dict[str, Any]], ranks: int) -> list[str]:
    """Of the goals: nothing launched by one rank; in the path of several, forced, 2 a bucket."""
    if ranks != 1:
        return []
    lines = []
    for row in rows:
        name, extra = row["contender"], row["beyond bare"]
        if name.startswith("ddpx"):
            limit = 2 * row["buckets"]  # no bucket leaves without `forced`
            outcome = "met" if extra <= limit else f"missed by {extra - limit:g}"
            lines.append(f"{name}: {extra:g} launches beyond bare, goal <= {limit}: {outcome}")
    return lines


def run_cell(arguments: argparse.Namespace, ranks: int, model_name: str) -> list[dict[str, Any]]:
    backend = "nccl" if ranks == 1 and arguments.device == "cuda" else "gloo"
    effort = Effort(arguments.seconds, min_rounds=3)
    launches, counts = [], {}
    for _ in range(arguments.launches):
        with RankPool(ranks, backend) as pool:
            per_rank = pool.run(
                time_and_count,
                *(model_name, arguments.device, arguments.tiny, ranks, effort),
                timeout=_TIMEOUT_S,
            )
        launches.append(slowest_rank([times for times, _ in per_rank]))
        counts = per_rank[0][1]
    times = _pooled(launches)
    rows = _rows(times, counts)
    rounds = len(times["bare"])
    title = f"{model_name}, {backend}, {ranks} rank(s), {rounds} rounds of {len(launches)} launches"
    print(f"\n{title}", flush=True)
    _print_table(rows)
    for line in _verdicts(rows, ranks):
        print(line, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="small models, for a smoke run")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--launches", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0, help="for each table and launch")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {name}; `kernels` a step of one rank: on CPU, operators")
    results = {
        f"{model_name}, {ranks} ranks": run_cell(arguments, ranks, model_name)
        for ranks in arguments.ranks
        for model_name in models(arguments.tiny)
    }
    if arguments.json:
        arguments.json.write_text(json.dumps({"device": name, "results": results}, indent=1))


if __name__ == "__main__":
    main()
