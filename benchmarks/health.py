"""What the failure detector costs a step: nanoseconds, with it and without (DDPX_HEALTH=0)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

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
TITLE = "Cost of the failure detector"

_OFF, _AGAIN, _ON = "without", "without, again", "with the detector"
_RANKS = 2
_MOST = 20.0  # microseconds a step, beside the noise of whole steps
_MOST_NOTES = 1.0  # microseconds a step, call by call
_MOST_PERCENT = 0.1  # of a core, for the helper threads of a rank
_NUM_PARAMS = 10  # a short step: what is looked for is small, and noise grows with the step
_NOTE_RANKS = (2, 4, 16)
_NOTES = {
    "check": "has it failed?",
    "publish": "a phase",
    "publish_launch": "a launch",
    "add_result": "a result",
    "check_calls": "comparing calls",
}
_ROOT = Path(__file__).resolve().parent.parent


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


def build_program() -> Path:
    """Builds benchmarks/health_bench.cpp. Returns the path of the program."""
    build = _ROOT / "build-bench"
    tools = Path(sys.executable).parent
    cmake = str(tools / "cmake")
    for command in (
        [
            *(cmake, "-S", str(_ROOT / "tests" / "torch_free"), "-B", str(build), "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}",
            *("-DDDPX_BENCHMARKS=ON", "-DDDPX_PREBUILT=ON"),
        ],
        [cmake, "--build", str(build), "--target", "health_bench"],
    ):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return build / "health_bench"


def _time_publishing() -> list[dict[str, float]]:
    """Nanoseconds a call, by number of ranks."""
    bench = build_program()
    return [
        json.loads(subprocess.check_output([bench, str(ranks)], text=True)) for ranks in _NOTE_RANKS
    ]


def ns_of_publishing(cost: dict[str, float], num_buckets: int) -> float:
    """Returns the time in which the reducer publishes one step to its peers."""
    per_bucket = cost["publish"] + cost["publish_launch"] + cost["add_result"]
    around = 2 * cost["check"] + 3 * cost["publish"] + cost["check_calls"]
    return around + num_buckets * per_bucket


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
    return {"num_params": _NUM_PARAMS, "cells": cells, "publishing": _time_publishing()}


def goals(results: Results) -> list[Goal]:
    return [
        Goal(
            f"cost of the failure detector, over {transport}",
            cell["ns_per_step"]["median"] / 1e3,
            _MOST,
            " µs a step",
            noise=abs(cell["noise_ns_per_step"]["median"]) / 1e3 / _MOST,
        )
        for transport, cell in results["cells"].items()
    ] + [
        goal
        for cost in results["publishing"]
        for goal in (
            Goal(
                f"calls of the failure detector in a step of 10 buckets, {cost['ranks']} ranks",
                ns_of_publishing(cost, num_buckets=10) / 1e3,
                _MOST_NOTES,
                " µs a step",
            ),
            Goal(
                f"helper threads of the failure detector, {cost['ranks']} ranks",
                cost["percent_of_core"],
                _MOST_PERCENT,
                " % of a core",
            ),
        )
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
    costs = [
        [
            cost["ranks"],
            *(f"{cost[name]:.0f}" for name in _NOTES),
            f"{ns_of_publishing(cost, num_buckets=1):.0f}",
            f"{ns_of_publishing(cost, num_buckets=10):.0f}",
            f"{cost['percent_of_core']:.3f}",
        ]
        for cost in results["publishing"]
    ]
    cost_headers = [
        "ranks",
        *_NOTES.values(),
        "a step of 1 bucket",
        "of 10 buckets",
        "threads, % of a core",
    ]
    return "\n\n".join(
        [
            f"CPU time of the thread that trains, {_RANKS} ranks, {results['num_params']} tensors "
            "of 16 elements; steps with and without the detector take turns.",
            table(headers, rows),
            "Its calls one by one, and those of a step together; nanoseconds "
            "(`benchmarks/health_bench.cpp`):",
            table(cost_headers, costs),
        ]
    )
