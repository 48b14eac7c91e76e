"""Step time of the bare module, DDP at its settings, and ReducerDDP over gloo and shm.

All contenders run in the same processes. Their default group uses gloo, and a second group uses
shm.
"""

from __future__ import annotations

from functools import partial

import contenders
from contenders import DDP_OVER_SHM_SETTINGS, DDP_SETTINGS, OUR_SETTINGS, Wrap
from goals import Goal
from interleave import Effort, Seconds, slowest_rank, time_rounds
from models import MODELS, SMALL, TRANSFORMER, WIDE, build
from plan import Plan
from pooling import level, lowest, num_rounds, ratio, ratio_to_lowest
from tables import Results, num_ranks, table, with_range

NAME = "step_time"
TITLE = "Step time"

# By transport and cell. All other goals are 1: not slower than DDP.
GOALS = {
    "gloo": {(SMALL, 1): 0.9, (SMALL, 2): 0.9, (SMALL, 4): 0.9},
    "shm": {(WIDE, 2): 0.7, (WIDE, 4): 0.7, (TRANSFORMER, 2): 0.92},
}
_WHY = (
    "both wrappers send the same buckets through the same gloo. No wrapper can save the time of "
    "gloo and of the bare module. No other reason is known. The overlap part compares both again."
)
VERDICT_SETTING = next(iter(OUR_SETTINGS))


def _wraps() -> dict[str, Wrap]:
    wraps = {"bare": contenders.bare(), "bare again": contenders.bare()}
    for name, options in DDP_SETTINGS.items():
        wraps[f"DDP, {name}"] = contenders.ddp(**options)
    wraps["DDP, default again"] = contenders.ddp()
    for name, options in DDP_OVER_SHM_SETTINGS.items():
        wraps[f"DDP over shm, {name}"] = contenders.ddp_over_shm(**options)
    for name, options in OUR_SETTINGS.items():
        wraps[f"ddpx over gloo, {name}"] = contenders.ours_over_gloo(**options)
        wraps[f"ddpx over shm, {name}"] = contenders.ours_over_shm(**options)
    return wraps


def time_steps(model_names: list[str], tiny: bool, effort: Effort) -> dict[str, Seconds]:
    """Runs on every rank."""
    return {
        name: time_rounds(contenders.make_steps(partial(build, name, tiny), _wraps()), effort)
        for name in model_names
    }


def measure(plan: Plan) -> Results:
    cells = []
    for ranks in plan.step_ranks:
        launches = plan.launch(ranks, time_steps, list(MODELS), plan.tiny, plan.step_effort)
        for model in MODELS:
            times = [slowest_rank([rank[model] for rank in launch]) for launch in launches]
            cells.append({"model": model, "ranks": ranks, **_summary(times)})
    return {"cells": cells}


def _summary(times: list[Seconds]) -> Results:
    return {
        "rounds": num_rounds(times),
        "best_ddp": lowest(times, "DDP, "),
        "best_ddp_over_shm": lowest(times, "DDP over shm, "),
        "rows": {
            name: {
                "ms": level(times, name, 1e3),
                "to_bare": ratio(times, name, "bare"),
                "to_best_ddp": ratio_to_lowest(times, name, "DDP, "),
            }
            for name in times[0]
        },
    }


def goals(results: Results) -> list[Goal]:
    found = []
    for transport, special in GOALS.items():
        for cell in results["cells"]:
            rows, place = cell["rows"], (cell["model"], cell["ranks"])
            ours = rows[f"ddpx over {transport}, {VERDICT_SETTING}"]
            floor = rows["bare"]["to_best_ddp"]["median"]
            found.append(
                Goal(
                    f"step over {transport} / best DDP's, {place[0]}, {num_ranks(place[1])}",
                    ours["to_best_ddp"]["median"],
                    special.get(place, 1.0),
                    noise=_noise(rows),
                    why=f"{_WHY} Bare / best DDP is {floor:.2f}." * (transport == "gloo"),
                )
            )
    return found


def _noise(rows: Results) -> float:
    again, first = (rows[f"DDP, default{which}"]["ms"]["median"] for which in (" again", ""))
    return abs(again / first - 1)


def summary(results: Results) -> str:
    """The table for README.md."""
    ours = {
        "over gloo": lambda _: f"ddpx over gloo, {VERDICT_SETTING}",
        "over shm": lambda _: f"ddpx over shm, {VERDICT_SETTING}",
        "DDP itself over shm": lambda cell: cell["best_ddp_over_shm"],
    }
    rows = []
    for cell in results["cells"]:
        ratios = [
            f"{cell['rows'][name(cell)]['to_best_ddp']['median']:.2f}" for name in ours.values()
        ]
        rows.append([f"{cell['model']}, {num_ranks(cell['ranks'])}", *ratios])
    shown = [row for row in rows if row[0].endswith(", 2 ranks")] or rows
    return table(["step / step of the best DDP over gloo", *ours], shown)


def section(results: Results) -> str:
    text = [
        "- A step is `zero_grad`, forward and backward, without an optimizer. The time of a step "
        "is the time on its slowest rank.\n"
        "- Ratios are medians of the ratios in the same round.\n"
        "- The best setting of DDP in a launch is the setting that is best by the medians of the "
        "other launches. A choice by the launch's own medians would give a figure that is too low: "
        "the least of many noisy medians.\n"
        f"- ddpx gets no such choice. Verdicts are about `{VERDICT_SETTING}` everywhere.\n"
        "- Brackets contain the lowest and the highest median of a single launch.\n"
        "- The `again` rows are second copies. Their differences are noise.",
        "![ratios](benchmarks/step_time.png)",
    ]
    for cell in results["cells"]:
        text.append(f"### {cell['model']}, {num_ranks(cell['ranks'])}")
        text.append(f"{cell['rounds']} rounds. Best of DDP: {cell['best_ddp']}.")
        rows = [
            [name, with_range(row["ms"], 1)]
            + [with_range(row[key]) for key in ("to_bare", "to_best_ddp")]
            for name, row in cell["rows"].items()
        ]
        text.append(table(["contender", "ms", "to bare", "to the best DDP"], rows))
    return "\n\n".join(text)
