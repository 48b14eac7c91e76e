"""The cost of find_unused_parameters=True, in DDP and in ReducerDDP.

A step with the option is compared with a step without it in the same round: as a share of that
step, and as nanoseconds per parameter. The same is done for the CPU time of the training thread.

In a second part, the used parameters vary by rank and step.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import contenders
import torch
import torch.distributed as dist
from goals import Goal
from interleave import Effort, Seconds, slowest_rank, time_rounds
from models import DEPTH, MIXTURE, small_layers, varying
from plan import Plan
from pooling import (
    difference,
    figure,
    interval,
    level,
    num_rounds,
    ratio,
    ratios_to_lowest,
)
from tables import Results, short, table, with_interval, with_range
from torch import nn

NAME = "find_unused"
TITLE = "find_unused_parameters"

_RANKS = 2
_NUM_PARAMS, _FEW_PARAMS = 2000, 100
_WRAPPERS = {"DDP": contenders.ddp, "ddpx": contenders.ours_over_gloo}
_OFF = "off"
# label: whether the option is on, and whether there are unused params
_LABELS = {
    _OFF: (False, False),
    "off again": (False, False),
    "all used": (True, False),
    "some unused": (True, True),
}

_VARYING: dict[str, Any] = {"find_unused_parameters": True, "bucket_cap_mb": 1}
_VIEWS = {**_VARYING, **contenders.VIEWS}
_BEST_DDP = "DDP, "
_OURS = ("ddpx over gloo, default", "ddpx over gloo, views", "ddpx over gloo, views, skip")


class WithUnused(nn.Module):
    """Layers that are all used, and two params that are never used."""

    def __init__(self, used: nn.Module) -> None:
        super().__init__()
        self.used = used
        self.unused = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def time_steps(num_params: int, effort: Effort) -> dict[str, Seconds]:
    """Runs on every rank. Returns the times of each clock."""
    steps = {}
    for name, wrapper in _WRAPPERS.items():
        for label, (find, has_unused) in _LABELS.items():
            torch.manual_seed(0)
            module, x = small_layers(num_params)
            wrap = wrapper(find_unused_parameters=find, **contenders.VIEWS)
            model = wrap(WithUnused(module) if has_unused else module)
            steps[f"{name}, {label}"] = functools.partial(contenders.step, model, x)
    return {
        "step": time_rounds(steps, effort),
        "cpu": time_rounds(steps, effort, clock=time.thread_time),
    }


def time_varying(name: str, tiny: bool, effort: Effort) -> Seconds:
    """Runs on every rank. In each round all contenders use the same params."""
    wraps = {
        "bare": contenders.bare(),
        "DDP, default": contenders.ddp(**_VARYING),
        "DDP, views": contenders.ddp(**_VIEWS),
        "DDP, views again": contenders.ddp(**_VIEWS),
        _OURS[0]: contenders.ours_over_gloo(**_VARYING),
        _OURS[1]: contenders.ours_over_gloo(**_VIEWS),
        _OURS[2]: contenders.ours_over_gloo(**_VIEWS, skip_all_reduce_unused_params=True),
        "ddpx over shm, views": contenders.ours_over_shm(**_VIEWS),
    }
    models, x = contenders.make_models(lambda: varying(name, tiny), wraps)

    def step(model: nn.Module, draw: random.Random) -> None:
        model.zero_grad()
        model(x, draw).square().mean().backward()

    steps: dict[str, Callable[[], None]] = {
        label: functools.partial(step, model, random.Random(dist.get_rank()))
        for label, model in models.items()
    }
    return time_rounds(steps, effort)


def measure(plan: Plan) -> Results:
    results = _measure_cost(plan)
    results["varying"] = {}
    effort = replace(plan.effort, seconds=plan.effort.seconds / 2)
    for name in (DEPTH, MIXTURE):
        launches = plan.launch(
            _RANKS, time_varying, name, plan.tiny, effort, launches=plan.step_launches
        )
        results["varying"][name] = [slowest_rank(launch) for launch in launches]
    return results


def _measure_cost(plan: Plan) -> Results:
    num_params = _FEW_PARAMS if plan.tiny else _NUM_PARAMS
    launches = plan.launch(_RANKS, time_steps, num_params, plan.effort)
    results: Results = {"num_params": num_params, "ranks": _RANKS}
    for clock in ("step", "cpu"):
        times = [slowest_rank([rank[clock] for rank in launch]) for launch in launches]
        results[clock] = {"rounds": num_rounds(times), "rows": {}}
        for name in times[0]:
            base = f"{name.split(',')[0]}, {_OFF}"
            if name != base:
                results[clock]["rows"][name] = {
                    "ratio": ratio(times, name, base),
                    "ns": difference(times, name, base, 1e9 / num_params),
                }
    return results


def goals(results: Results) -> list[Goal]:
    found = []
    for name, launches in results["varying"].items():
        for label in _OURS:
            values = ratios_to_lowest(launches, label, _BEST_DDP)
            found.append(
                Goal(
                    f"step of {label} / best DDP's, {name}",
                    figure(values)["median"],
                    1.0,
                    interval=interval(values),
                )
            )
    return found


def section(results: Results) -> str:
    names = results["step"]["rows"]
    rows = [
        [name]
        + [
            with_range(results[clock]["rows"][name][key], digits)
            for clock in ("step", "cpu")
            for key, digits in (("ratio", 2), ("ns", 0))
        ]
        for name in names
    ]
    headers = ["contender", "step / off", "ns a parameter", "CPU time / off", "ns a parameter"]
    text = (
        f"{results['num_params']} parameters in small layers, {results['ranks']} ranks, views, "
        f"{results['step']['rounds']} rounds. A ratio compares a step with the option and a step "
        "without the option, of the same wrapper in the same round. The CPU time is the time of "
        "the thread that trains, without its waits. `off again` is a second copy without the "
        "option, and shows the noise."
    )
    parts = [
        text,
        table(headers, rows),
        "### Use that varies by rank and step",
        f"Buckets of 1 MiB, which is one layer; {results['ranks']} ranks. In stochastic depth each "
        "rank skips each of 16 layers with probability 0.2. In the mixture each rank uses one of 8 "
        "experts in each of 4 blocks. `skip`: with `skip_all_reduce_unused_params`. Ratios compare "
        "with the best DDP in the same round.",
    ]
    for name, launches in results["varying"].items():
        shown = []
        for label in launches[0]:
            values = ratios_to_lowest(launches, label, _BEST_DDP)
            ms = short(level(launches, label, 1e3)["median"])
            shown.append([label, ms, with_range(figure(values)), with_interval(interval(values))])
        parts.append(f"{name}, {len(launches)} launches, {num_rounds(launches)} rounds:")
        parts.append(table(["contender", "ms", "to the best DDP", "95 %"], shown))
    return "\n\n".join(parts)
