"""Step time of the bare module, DDP at its settings, and ReducerDDP over gloo and shm.

All contenders run in the same processes. Their default group uses gloo, and a second group uses
shm.
"""

from __future__ import annotations

from functools import partial

import contenders
from contenders import DDP_OVER_SHM_SETTINGS, DDP_SETTINGS, OUR_SETTINGS, VIEWS, Wrap
from goals import Goal
from interleave import Effort, Seconds, slowest_rank, time_rounds
from models import MODELS, SMALL, TRANSFORMER, WIDE, build
from plan import Plan
from pooling import (
    figure,
    interval,
    level,
    lowest,
    num_rounds,
    ratio,
    ratios,
    ratios_to_lowest,
)
from tables import Results, num_ranks, table, with_interval, with_range

NAME = "step_time"
TITLE = "Step time"

OVER_GLOO, AUTOMATIC, OVER_SHM = "ddpx over gloo", "ddpx automatic", "ddpx over shm"
_BEST_DDP = "DDP, "
_NOISE = ("DDP, views again", "DDP, views")  # a contender against itself
# By row and cell. All other goals are 1: not slower than DDP.
_SPECIAL_GOALS = {
    f"{OVER_GLOO}, views": {(SMALL, 1): 0.9, (SMALL, 2): 0.9, (SMALL, 4): 0.9},
    f"{OVER_SHM}, views": {(WIDE, 2): 0.7, (WIDE, 4): 0.7, (TRANSFORMER, 2): 0.92},
}


def _wraps() -> dict[str, Wrap]:
    wraps = {"bare": contenders.bare(), _NOISE[0]: contenders.ddp(**VIEWS)}
    for name, options in DDP_SETTINGS.items():
        wraps[f"DDP, {name}"] = contenders.ddp(**options)
    for name, options in OUR_SETTINGS.items():
        wraps[f"{OVER_GLOO}, {name}"] = contenders.ours_over_gloo(**options)
        wraps[f"{AUTOMATIC}, {name}"] = contenders.ours_automatic(**options)
    for name, options in DDP_OVER_SHM_SETTINGS.items():
        wraps[f"DDP over shm, {name}"] = contenders.ddp_over_shm(**options)
    wraps[f"{OVER_SHM}, views"] = contenders.ours_over_shm(**VIEWS)
    return wraps


def time_steps(model_names: list[str], tiny: bool, effort: Effort) -> dict[str, Seconds]:
    """Runs on every rank."""
    return {
        name: time_rounds(contenders.make_steps(partial(build, name, tiny), _wraps()), effort)
        for name in model_names
    }


def measure(plan: Plan) -> Results:
    """The seconds of each round on its slowest rank, by cell and launch."""
    cells = []
    for ranks in plan.step_ranks:
        launches = plan.launch(
            ranks,
            time_steps,
            list(MODELS),
            plan.tiny,
            plan.step_effort,
            launches=plan.step_launches,
        )
        for model in MODELS:
            times = [slowest_rank([rank[model] for rank in launch]) for launch in launches]
            cells.append({"model": model, "ranks": ranks, "launches": times})
    return {"cells": cells}


def _place(cell: Results) -> str:
    return f"{cell['model']}, {num_ranks(cell['ranks'])}"


def goals(results: Results) -> list[Goal]:
    names = [name for name in results["cells"][0]["launches"][0] if name.startswith("ddpx")]
    return [_goal(name, cell) for name in names for cell in results["cells"]]


def _goal(name: str, cell: Results) -> Goal:
    values = ratios_to_lowest(cell["launches"], name, _BEST_DDP)
    return Goal(
        f"step of {name} / best DDP's, {_place(cell)}",
        figure(values)["median"],
        _SPECIAL_GOALS.get(name, {}).get((cell["model"], cell["ranks"]), 1.0),
        interval=interval(values),
    )


def summary(results: Results) -> str:
    """The table for README.md."""
    cells = [cell for cell in results["cells"] if cell["ranks"] == 2]
    rows = []
    for cell in cells:
        over_shm = lowest(cell["launches"], "DDP over shm, ")
        names = (f"{AUTOMATIC}, default", f"{AUTOMATIC}, views", f"{OVER_GLOO}, views", over_shm)
        values = [ratios_to_lowest(cell["launches"], name, _BEST_DDP) for name in names]
        rows.append([_place(cell), *(f"{figure(each)['median']:.2f}" for each in values)])
    views = "ddpx, gradient_as_bucket_view"
    headers = ["ddpx", views, "the same, DDPX_TRANSPORT=group", "DDP itself over shm"]
    return table(["step / step of the best DDP over gloo", *headers], rows)


def section(results: Results) -> str:
    text = [
        "- A step is `zero_grad`, forward and backward, without an optimizer. The time of a step "
        "is the time on its slowest rank.\n"
        f"- `{AUTOMATIC}`: the script's group uses gloo, and ddpx chooses the transport. "
        f"`{OVER_GLOO}`: the same with `DDPX_TRANSPORT=group`. `over shm`: the script's group uses "
        "shm.\n"
        "- Ratios are medians of the ratios in the same round.\n"
        "- The best setting of DDP in a launch is the setting that is best by the medians of the "
        "other launches. A choice by the launch's own medians would give a figure that is too low: "
        "the least of many noisy medians.\n"
        "- ddpx gets no such choice.\n"
        "- Brackets contain the lowest and the highest median of a single launch. The last column "
        "is Student's interval of 95 % of the ratio to the best DDP, from the launches' medians.\n"
        "- The first row is the noise of the machine: DDP against a second copy of itself.",
        "![ratios](benchmarks/step_time.png)",
    ]
    for cell in results["cells"]:
        launches = cell["launches"]
        text.append(f"### {_place(cell)}")
        text.append(
            f"{num_rounds(launches)} rounds in {len(launches)} launches. Best of DDP: "
            f"{lowest(launches, _BEST_DDP)}."
        )
        noise = ratios(launches, *_NOISE)
        rows = [[f"noise: {_NOISE[1]} / itself", "", "", *_ratio_cells(noise)]]
        rows += [
            [
                name,
                with_range(level(launches, name, 1e3), 1),
                with_range(ratio(launches, name, "bare")),
                *_ratio_cells(ratios_to_lowest(launches, name, _BEST_DDP)),
            ]
            for name in launches[0]
            if name != _NOISE[0]
        ]
        text.append(table(["contender", "ms", "to bare", "to the best DDP", "95 %"], rows))
    return "\n\n".join(text)


def _ratio_cells(values: list[list[float]]) -> list[str]:
    return [with_range(figure(values)), with_interval(interval(values))]
