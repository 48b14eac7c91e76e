"""The cost of a wrapper on one rank alone, which has no peers; and its cost around forward."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import contenders
import torch
from contenders import BATCHED, VIEWS, Wrap
from goals import PERCENT, Goal
from interleave import Effort, Seconds, slowest_rank, time_rounds
from models import MODELS, build
from plan import Plan
from pooling import difference, figure, level, num_rounds, ratio
from tables import Results, table, with_range
from torch import nn

NAME = "tax"
TITLE = "One rank alone, and around forward"

_FORWARDS = 500  # number of forwards in a row
_TAX = 0.01  # share of a step, beyond noise
_FORWARD_US = 20.0
_WHY = (
    "a hook reports the arrival of each gradient. Errors about unused parameters need these hooks. "
    "Autograd takes 0.3 to 0.5 µs a tensor to find and call a hook."
)
_BYPASS = ("ddpx, default", "ddpx, views")


@contextmanager
def _communication_forced() -> Iterator[None]:
    """Wrappers that are made in this context communicate, also on one rank alone."""
    os.environ["DDPX_FORCE_COMM"] = "1"
    try:
        yield
    finally:
        del os.environ["DDPX_FORCE_COMM"]


def _forced(module: nn.Module) -> nn.Module:
    with _communication_forced():
        return contenders.ours_over_gloo(**VIEWS)(module)


def _wraps() -> dict[str, Wrap]:
    default, views = _BYPASS
    return {
        "bare": contenders.bare(),
        "bare again": contenders.bare(),
        "DDP, views": contenders.ddp(**VIEWS),
        "DDP, views, batched copy": contenders.ddp(**VIEWS, **BATCHED),
        default: contenders.ours_over_gloo(),
        views: contenders.ours_over_gloo(**VIEWS),
        "ddpx, views, forced": _forced,
    }


def time_models(tiny: bool, effort: Effort) -> dict[str, Seconds]:
    """Runs on the single rank."""
    return {
        name: time_rounds(contenders.make_steps(partial(build, name, tiny), _wraps()), effort)
        for name in MODELS
    }


class Scale(nn.Module):
    """A module with one input tensor, no buffers, and almost no work."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def time_forward(rounds: int) -> Seconds:
    """Runs on every rank. Returns the seconds of one forward that records a graph."""
    models, x = contenders.make_models(
        lambda: (Scale(), torch.ones(8)),
        {name: wrap for name, wrap in _wraps().items() if "batched" not in name},
    )
    for model in models.values():
        for _ in range(3):  # buckets are rebuilt after the first step
            contenders.step(model, x)
    times: Seconds = {name: [] for name in models}
    for number in range(rounds):
        for name in random.Random(number).sample(list(models), len(models)):
            model = models[name]
            start = time.perf_counter()
            for _ in range(_FORWARDS):
                model(x)
            times[name].append((time.perf_counter() - start) / _FORWARDS)
    return times


def measure(plan: Plan) -> Results:
    launches = plan.launch(1, time_models, plan.tiny, plan.effort)
    cells = []
    for model in MODELS:
        times = [slowest_rank([rank[model] for rank in launch]) for launch in launches]
        rows = {
            name: {"ms": level(times, name, 1e3), "to_bare": ratio(times, name, "bare")}
            for name in times[0]
        }
        cells.append({"model": model, "rounds": num_rounds(times), "rows": rows})
    forwards = [launch[0] for launch in plan.launch(1, time_forward, 3 if plan.tiny else 20)]
    return {
        "cells": cells,
        "forward_us": {
            name: figure([[1e6 * s for s in times[name]] for times in forwards])
            for name in forwards[0]
        },
        "forward_beyond_us": {
            name: difference(forwards, name, "bare", 1e6) for name in forwards[0]
        },
    }


def goals(results: Results) -> list[Goal]:
    found = []
    for cell in results["cells"]:
        noise = abs(cell["rows"]["bare again"]["to_bare"]["median"] - 1)
        for name in _BYPASS:
            tax = cell["rows"][name]["to_bare"]["median"] - 1
            what = f"tax of {name}, 1 rank, {cell['model']}, beyond the noise of {noise:.1%}"
            found.append(Goal(what, 100 * (tax - noise), 100 * _TAX, PERCENT, why=_WHY))
    for name in _BYPASS:
        microseconds = results["forward_beyond_us"][name]["median"]
        found.append(Goal(f"around forward, {name}", microseconds, _FORWARD_US, " µs"))
    return found


def section(results: Results) -> str:
    names = results["cells"][0]["rows"]
    rows = [
        [name, *(with_range(cell["rows"][name]["to_bare"], 3) for cell in results["cells"])]
        for name in names
    ]
    forward = [
        [name, *(with_range(results[key][name], 1) for key in ("forward_us", "forward_beyond_us"))]
        for name in results["forward_us"]
    ]
    rounds = ", ".join(str(cell["rounds"]) for cell in results["cells"])
    return "\n\n".join(
        [
            f"Steps of one rank, as ratios to the bare module in the same round ({rounds} rounds). "
            "`forced`: with `DDPX_FORCE_COMM=1`, the rank packs and communicates, over gloo.",
            table(["contender", *(cell["model"] for cell in results["cells"])], rows),
            f"Microseconds of one forward of a module with one input tensor and no buffers, "
            f"{_FORWARDS} in a row, and the difference to the bare module.",
            table(["contender", "forward", "beyond bare"], forward),
        ]
    )
