"""What the watch over ranks costs a step: nanoseconds, with it and without (DDPX_HEALTH=0)."""

from __future__ import annotations

import os
import time
from functools import partial

import contenders
import torch
from goals import Goal
from interleave import Effort, Seconds, time_rounds
from models import joined
from plan import Plan
from pooling import difference, level
from tables import Results, short, table
from torch import nn

import ddpx

NAME = "health"
TITLE = "Cost of the watch over ranks"

_OFF, _AGAIN, _ON = "without", "without, again", "with the watch"
_RANKS = 2
_MOST = 20.0  # microseconds a step
_NUM_PARAMS = 10  # a short step: what is looked for is small, and noise grows with the step


def _wrap(transport: str, watched: bool) -> contenders.Wrap:
    make = contenders.ours_over_shm() if transport == "shm" else contenders.ours_over_gloo()

    def wrap(module: nn.Module) -> nn.Module:
        before = os.environ.get("DDPX_HEALTH")
        os.environ["DDPX_HEALTH"] = "1" if watched else "0"
        try:
            return make(module)
        finally:
            if before is None:
                del os.environ["DDPX_HEALTH"]
            else:
                os.environ["DDPX_HEALTH"] = before

    return wrap


def time_health(transport: str, num_params: int, effort: Effort) -> tuple[Seconds, int]:
    """Runs on every rank: CPU seconds of the thread that trains, and the number of buckets."""
    wraps = {name: _wrap(transport, name == _ON) for name in (_OFF, _AGAIN, _ON)}
    models, x = contenders.make_models(partial(joined, num_params), wraps)
    for name, model in models.items():
        assert isinstance(model, ddpx.ReducerDDP)
        assert (model.reducer.monitor is not None) == (name == _ON)
        for _ in range(3):
            contenders.step(model, x)
    watched = models[_ON]
    assert isinstance(watched, ddpx.ReducerDDP)
    steps = {name: partial(contenders.step, model, x) for name, model in models.items()}
    times = time_rounds(steps, effort, clock=time.thread_time)
    return times, len(watched.reducer.plan.buckets)


def measure(plan: Plan) -> Results:
    torch.set_num_threads(1)
    cells = {}
    for transport in ("gloo", "shm"):
        by_launch = plan.launch(_RANKS, time_health, transport, _NUM_PARAMS, plan.effort)
        times = [launch[0][0] for launch in by_launch]
        cells[transport] = {
            "num_buckets": by_launch[0][0][1],
            "ms": {name: level(times, name, 1e3) for name in times[0]},
            "ns_per_step": difference(times, _ON, _OFF, 1e9),
            "noise_ns_per_step": difference(times, _AGAIN, _OFF, 1e9),
        }
    return {"num_params": _NUM_PARAMS, "cells": cells}


def goals(results: Results) -> list[Goal]:
    return [
        Goal(
            f"cost of the watch over ranks, over {transport}",
            cell["ns_per_step"]["median"] / 1e3,
            _MOST,
            " µs a step",
            noise=abs(cell["noise_ns_per_step"]["median"]) / 1e3 / _MOST,
        )
        for transport, cell in results["cells"].items()
    ]


def section(results: Results) -> str:
    rows = [
        [
            transport,
            short(cell["ms"][_OFF]["median"]),
            short(cell["ms"][_ON]["median"]),
            f"{cell['ns_per_step']['median']:.0f}",
            f"{cell['noise_ns_per_step']['median']:.0f}",
        ]
        for transport, cell in results["cells"].items()
    ]
    headers = ["transport", "ms without", "ms with", "ns a step", "ns between two without"]
    return "\n\n".join(
        [
            f"CPU time of the thread that trains, {_RANKS} ranks, {results['num_params']} tensors "
            "of 16 elements; steps with and without the watch take turns.",
            table(headers, rows),
        ]
    )
