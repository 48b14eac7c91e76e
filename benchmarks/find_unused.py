"""The cost of find_unused_parameters=True, in DDP and in ReducerDDP.

A step with the option is compared with a step without it in the same round: as a share of that
step, and as nanoseconds per parameter. The same is done for the CPU time of the training thread.
"""

from __future__ import annotations

import functools
import time

import contenders
import torch
from goals import Goal
from interleave import Effort, Seconds, slowest_rank, time_rounds
from models import small_layers
from plan import Plan
from pooling import difference, num_rounds, ratio
from tables import Results, table, with_range
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP

NAME = "find_unused"
TITLE = "find_unused_parameters"

_RANKS = 2
_NUM_PARAMS, _FEW_PARAMS = 2000, 100
_WRAPPERS = {"DDP": DistributedDataParallel, "ddpx": ReducerDDP}
_OFF = "off"
# label: whether the option is on, and whether there are unused params
_LABELS = {
    _OFF: (False, False),
    "off again": (False, False),
    "all used": (True, False),
    "some unused": (True, True),
}


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
            model = wrapper(
                WithUnused(module) if has_unused else module,
                find_unused_parameters=find,
                gradient_as_bucket_view=True,
            )
            steps[f"{name}, {label}"] = functools.partial(contenders.step, model, x)
    return {
        "step": time_rounds(steps, effort),
        "cpu": time_rounds(steps, effort, clock=time.thread_time),
    }


def measure(plan: Plan) -> Results:
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
    del results
    return []


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
    return text + "\n\n" + table(headers, rows)
