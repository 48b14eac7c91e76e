"""The growth of costs with the number of parameters, and with the number of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import contenders
import torch
import torch.distributed as dist
from goals import Goal
from interleave import Effort, Seconds, slowest_rank, time_rounds
from models import joined, wide
from plan import MIB, Plan
from pooling import Figure, difference, figure, level, num_rounds, ratio
from tables import Results, short, table, with_range
from torch import nn

NAME = "growth"
TITLE = "Growth with parameters and ranks"

_RANKS_OF_PARAMS = 2
# From this number on, fixed costs of a step are small against the cost per parameter.
_MANY_PARAMS = 10_000
# DDP's construction and second step grow with the square of the number: larger models take minutes.
_DDP_MAX_PARAMS = 10_000
_SETUP_STEPS = 2  # the first step learns the order, the second begins with the new buckets
_REDUCE_BYTES = 4 * MIB
T = TypeVar("T")
Setup = dict[str, float]  # seconds, by contender
_GLOO, _SHM = "all-reduce, gloo", "all-reduce, shm"


def time_params(numbers: tuple[int, ...], effort: Effort) -> dict[int, tuple[Seconds, Setup]]:
    """Runs on every rank."""
    return {number: _time_params(number, effort) for number in numbers}


def _time_params(number: int, effort: Effort) -> tuple[Seconds, Setup]:
    wraps = {
        name: wrap
        for name, wrap in contenders.with_best_settings().items()
        if number <= _DDP_MAX_PARAMS or not name.startswith("DDP")
    }
    setup = dict.fromkeys(wraps, 0.0)

    def timed(name: str, run: Callable[[], T]) -> T:
        dist.barrier()
        start = time.perf_counter()
        result = run()
        setup[name] += time.perf_counter() - start
        return result

    def wrap_timed(name: str, module: nn.Module) -> nn.Module:
        return timed(name, partial(wraps[name], module))

    # One-time initializations and imports must not count for the first wrapper.
    contenders.make_models(partial(joined, 1), wraps)
    steps = contenders.make_steps(
        partial(joined, number), {name: partial(wrap_timed, name) for name in wraps}
    )
    for _ in range(_SETUP_STEPS):
        for name, step in steps.items():
            timed(name, step)
    return time_rounds(steps, replace(effort, warm_up=1)), setup


def _layers(tiny: bool) -> tuple[nn.Module, torch.Tensor]:
    return wide(128, 2) if tiny else wide(1024, 4)


def time_ranks(tiny: bool, effort: Effort) -> Seconds:
    """Runs on every rank. Measures steps, and all-reduces alone."""
    runs = contenders.make_steps(partial(_layers, tiny), contenders.with_best_settings())
    group = contenders.shm_group()
    backend = group._get_backend(torch.device("cpu"))
    resident = backend.allocate_tensor(
        _REDUCE_BYTES // 4, dtype=torch.float32, device=torch.device("cpu")
    )
    plain = torch.zeros(_REDUCE_BYTES // 4)
    reduces = {
        _GLOO: partial(dist.all_reduce, plain),
        _SHM: partial(dist.all_reduce, resident.zero_(), group=group),
    }
    return {**time_rounds(runs, effort), **time_rounds(reduces, effort)}


def measure(plan: Plan) -> Results:
    effort = Effort(plan.effort.seconds / 2, plan.effort.min_rounds)
    by_params = []
    launches = plan.launch(_RANKS_OF_PARAMS, time_params, plan.num_params, effort)
    for num_params in plan.num_params:
        times = [slowest_rank([rank[num_params][0] for rank in launch]) for launch in launches]
        setups = [[rank[num_params][1] for rank in launch] for launch in launches]
        cell = {"num_params": num_params, **_of_params(times, num_params)}
        by_params.append({**cell, "setup_s": _slowest_setup(setups)})
    by_ranks = []
    for ranks in plan.growth_ranks:
        times = [
            slowest_rank(launch) for launch in plan.launch(ranks, time_ranks, plan.tiny, effort)
        ]
        by_ranks.append({"ranks": ranks, **_of_ranks(times)})
    return {"by_params": by_params, "by_ranks": by_ranks, "reduce_bytes": _REDUCE_BYTES}


def _slowest_setup(launches: list[list[Setup]]) -> dict[str, Figure]:
    return {
        name: figure([[max(rank[name] for rank in launch)] for launch in launches])
        for name in launches[0][0]
    }


def _of_params(times: list[Seconds], num_params: int) -> Results:
    return {
        "rounds": num_rounds(times),
        "ms": {name: level(times, name, 1e3) for name in times[0]},
        "ns": {name: difference(times, name, "bare", 1e9 / num_params) for name in times[0]},
    }


def _of_ranks(times: list[Seconds]) -> Results:
    steps = [name for name in times[0] if name not in (_GLOO, _SHM)]
    return {
        "rounds": len(times[0]["bare"]) * len(times),
        "ms": {name: level(times, name, 1e3) for name in times[0]},
        "to_bare": {name: ratio(times, name, "bare") for name in steps},
    }


def goals(results: Results) -> list[Goal]:
    found = []
    for cell in results["by_params"]:
        if cell["num_params"] >= _MANY_PARAMS:
            for name in ("ddpx over gloo", "ddpx over shm"):
                nanoseconds = cell["ns"][name]["median"]
                noise = abs(cell["ns"]["bare again"]["median"] / 1000)
                what = f"step beyond bare a parameter, {name}, {cell['num_params']:,} parameters"
                found.append(Goal(what, nanoseconds / 1000, 1.0, " µs", noise=noise))
    return found


def section(results: Results) -> str:
    return "\n\n".join(
        [
            "![growth](benchmarks/growth.png)",
            "### Number of parameters",
            f"Tensors of 16 numbers, which one operator concatenates, so that almost nothing is "
            f"computed; {_RANKS_OF_PARAMS} ranks. Figures are nanoseconds a parameter by which a "
            "step is longer than the bare step, with all waits for communication.",
            _table(results["by_params"], "num_params", "ns", 0),
            f"Seconds of construction and of the first {_SETUP_STEPS} steps. DDP has no figures "
            f"beyond {_DDP_MAX_PARAMS:,} parameters, because DDP takes minutes there.",
            _table(results["by_params"], "num_params", "setup_s", 2),
            "### Number of ranks",
            f"Figures are milliseconds. The steps have 4 layers of 1024 x 1024. The all-reduce has "
            f"{results['reduce_bytes'] // MIB} MiB, resident over shm. If there are more ranks "
            "than cores, ranks take turns on the cores, and the bare step takes longer, too.",
            _table(results["by_ranks"], "ranks", "ms", 2),
            "Steps, as ratios to the bare step in the same round:",
            _table(results["by_ranks"], "ranks", "to_bare", 2),
        ]
    )


def _table(cells: list[Results], key: str, what: str, digits: int) -> str:
    def text(figure: Figure | None) -> str:
        if figure is None:
            return "-"
        return short(figure["median"]) if what == "ms" else with_range(figure, digits)

    headers = ["contender", *(f"{cell[key]:,}" for cell in cells)]
    rows = [[name, *(text(cell[what].get(name)) for cell in cells)] for name in cells[0][what]]
    return table(headers, rows)
