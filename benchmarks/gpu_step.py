"""A step on a GPU: tax over the bare module and DDP, kernels and bytes, overlap, CUDA graphs.

    python benchmarks/gpu_step.py --ranks 1 --json figures.json      # one GPU, NCCL
    python benchmarks/gpu_step.py --ranks 2 --json figures.json      # two ranks on one GPU, gloo
    python benchmarks/gpu_step.py --device cpu --tiny --json f.json  # a smoke run

The script needs only torch and ddpx. scripts/gpu.py runs it. One rank communicates by NCCL (on CPU
by gloo). ReducerDDP is measured twice there: unchanged, and with DDPX_FORCE_COMM=1, under which it
does all the work of several ranks. Several ranks on one GPU use gloo, since NCCL refuses them.
"""

from __future__ import annotations

import argparse
import copy
import functools
import inspect
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_graph import capture
from gpu_models import models
from gpu_profile import count, overlap, profile_steps
from interleave import Effort, Seconds, slowest_rank, time_rounds
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP
from ddpx.testing import RankPool

VIEWS: dict[str, Any] = {"gradient_as_bucket_view": True}
STATIC: dict[str, Any] = {**VIEWS, "static_graph": True}
BATCHED: dict[str, Any] = {"batched_grad_copy": True}
# Gradients below this size are packed together. 0: each is packed when it arrives.
SMALL_BYTES = {"at arrival": 0, "64 KiB": 64 * 1024, "16 MiB": 16 * 1024 * 1024}
WHAT = ("time", "counts", "overlap", "graph")
_START_S = 25.0  # for the imports of torch, and the first connections
_PROFILED_STEPS = 2  # 1,000 layers have 60,000 events a step
Wrap = Callable[[nn.Module], nn.Module]
Figures = dict[str, Any]


def _bare(module: nn.Module) -> nn.Module:
    return module


def ddp_settings() -> dict[str, dict[str, Any]]:
    """DDP's settings, as far as this torch has them."""
    known = inspect.signature(DistributedDataParallel).parameters
    settings = {
        "default": {},
        "views": VIEWS,
        "views, batched copy": {**VIEWS, **BATCHED},
        "static, views": STATIC,
        "static, views, batched copy": {**STATIC, **BATCHED},
    }
    return {
        name: options
        for name, options in settings.items()
        if all(option in known for option in options)
    }


def _forced(module: nn.Module, small_bytes: int | None = None, **options: Any) -> nn.Module:
    """A wrapper that communicates even in a group of one rank."""
    os.environ["DDPX_FORCE_COMM"] = "1"
    os.environ["DDPX_SMALL_GRAD_BYTES"] = "" if small_bytes is None else str(small_bytes)
    try:
        return ReducerDDP(module, **options)
    finally:
        del os.environ["DDPX_FORCE_COMM"], os.environ["DDPX_SMALL_GRAD_BYTES"]


def wraps(ranks: int, limits: bool = False) -> dict[str, Wrap]:
    """The contenders. Names that end with "again" show the noise.

    ``limits``: also one rank with other limits of small gradients.
    """
    made: dict[str, Wrap] = {"bare": _bare, "bare again": _bare}
    for name, options in ddp_settings().items():
        made[f"DDP, {name}"] = functools.partial(DistributedDataParallel, **options)
    made["DDP, views again"] = functools.partial(DistributedDataParallel, **VIEWS)
    for name, options in {"default": {}, "views": VIEWS, "static, views": STATIC}.items():
        made[f"ddpx, {name}"] = functools.partial(ReducerDDP, **options)
        if ranks == 1:
            made[f"ddpx, {name}, forced"] = functools.partial(_forced, **options)
    if limits:
        for limit, small_bytes in SMALL_BYTES.items():
            made[f"ddpx, default, forced, {limit}"] = functools.partial(
                _forced, small_bytes=small_bytes
            )
    return made


def _step(model: nn.Module, x: torch.Tensor, device: str) -> None:
    model.zero_grad()
    model(x).float().square().mean().backward()
    if device != "cpu":
        torch.accelerator.synchronize()


def _build(model_name: str, device: str, tiny: bool) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    module, x = models(tiny)[model_name]()
    return module.to(device), x.to(device)


def measure(
    model_name: str, arguments: argparse.Namespace, effort: Effort
) -> tuple[Seconds, Figures]:
    """Runs on every rank.

    Times are by contender and round. The other results are of this rank only.
    """
    device, what = arguments.device, arguments.what
    module, x = _build(model_name, device, arguments.tiny)
    contenders = wraps(arguments.ranks, arguments.small_grad_limits)
    made = {name: wrap(copy.deepcopy(module)) for name, wrap in contenders.items()}
    steps = {name: functools.partial(_step, model, x, device) for name, model in made.items()}
    times = time_rounds(steps, effort)
    figures: Figures = {name: {} for name in made}
    if "counts" in what or "overlap" in what:
        for name, step in steps.items():
            events = profile_steps(step, _PROFILED_STEPS, device)
            if "counts" in what:
                figures[name] |= count(events, _PROFILED_STEPS)
            if "overlap" in what:
                figures[name]["overlap"] = overlap(events)
    return times, figures


def add_times(figures: Figures, times: Seconds) -> str:
    """Adds medians, and medians of each round's ratio to the bare module and to DDP's best.

    Returns:
        The name of DDP's best contender.
    """
    best = min(
        (name for name in times if name.startswith("DDP") and not name.endswith("again")),
        key=lambda name: statistics.median(times[name]),
    )
    for name, seconds in times.items():
        figures[name]["ms"] = round(1e3 * statistics.median(seconds), 4)
        for key, base in (("to_bare", times["bare"]), ("to_best_ddp", times[best])):
            ratio = statistics.median(a / b for a, b in zip(seconds, base, strict=True))
            figures[name][key] = round(ratio, 4)
    return best


def run_model(
    arguments: argparse.Namespace, pool: RankPool, model_name: str, seconds: float
) -> Figures:
    effort = Effort(seconds, min_rounds=3)
    per_rank = pool.run(measure, model_name, arguments, effort, timeout=arguments.limit_s)
    times = slowest_rank([times for times, _ in per_rank])
    contenders = per_rank[0][1]
    best = add_times(contenders, times)
    return {"rounds": len(times["bare"]), "best_ddp": best, "contenders": contenders}


def capture_one(model_name: str, name: str, device: str, tiny: bool) -> Figures:
    """Runs on one rank."""
    module, x = _build(model_name, device, tiny)
    return capture(module, x, wraps(ranks=1)[name], device)


def run_graphs(arguments: argparse.Namespace, backend: str, deadline: float) -> Figures:
    """Runs each capture in a process of its own, since a failed capture can make CUDA unusable."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # required by DDP's documentation
    model_name = next(iter(models(arguments.tiny)))
    figures: Figures = {}
    for name in ("bare", "DDP, views", "ddpx, views, forced", "ddpx, static, views, forced"):
        left_s = deadline - time.monotonic()
        if left_s < 10:
            figures[name] = {"captured": None, "error": "no time was left"}
            continue
        try:
            with RankPool(1, backend, "spawn") as pool:
                figures[name] = pool.run(
                    capture_one, model_name, name, arguments.device, arguments.tiny, timeout=left_s
                )[0]
        except Exception as error:
            text = str(error)  # its middle is the stack of the process
            figures[name] = {"captured": False, "error": f"{text[:1500]}\n...\n{text[-1500:]}"}
    return {"model": model_name, "contenders": figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="small models, for a smoke run")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--models", nargs="+", help="parts of names; default: all")
    parser.add_argument("--small-grad-limits", action="store_true", help="DDPX_SMALL_GRAD_BYTES")
    parser.add_argument("--what", nargs="+", choices=WHAT, default=list(WHAT))
    parser.add_argument("--limit-s", type=float, default=300.0, help="approximate time limit")
    parser.add_argument("--json", type=Path, required=True, help="rewritten after each model")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.limit_s
    backend = "nccl" if arguments.ranks == 1 and arguments.device == "cuda" else "gloo"
    figures: Figures = {"ranks": arguments.ranks, "backend": backend, "models": {}}

    def save() -> None:
        arguments.json.write_text(json.dumps(figures, indent=1))

    # Over gloo, a step of the other models would take seconds.
    names = list(models(arguments.tiny))[: None if arguments.ranks == 1 else 1]
    if arguments.models:
        names = [name for name in names if any(part in name for part in arguments.models)]
        if not names:
            parser.error(f"no model of these ranks has a name with {arguments.models}")
    if set(arguments.what) - {"graph"}:
        left_s = max(arguments.limit_s - _START_S, 1.0)
        seconds = 0.1 if arguments.tiny else 0.3 * left_s / len(names)
        with RankPool(arguments.ranks, backend, "spawn") as pool:
            for name in names:
                figures["models"][name] = run_model(arguments, pool, name, seconds)
                save()
    if "graph" in arguments.what and arguments.ranks == 1:
        figures["graph"] = run_graphs(arguments, backend, deadline)
    save()


if __name__ == "__main__":
    main()
