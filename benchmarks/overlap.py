"""Exposed communication of a step, by the wrappers' own clocks and by the time of the step."""

from __future__ import annotations

import functools
from typing import Any

import contenders
from contenders import VIEWS, Wrap
from goals import Goal
from interleave import Effort, Seconds, slowest_rank, time_rounds
from models import TRANSFORMER, WIDE, build
from plan import Plan
from pooling import Figure, difference, figure, level, num_rounds
from tables import Results, num_ranks, table, with_range

NAME = "overlap"
TITLE = "Exposed communication and overlap"

_MODELS = (TRANSFORMER, WIDE)
_RANKS = 2
# Times in ns that both wrappers report of a step, under DDP's names.
_PARTS = {
    "backward": "backward_compute_time",
    "comm": "backward_comm_time",
    "overlap": "backward_compute_comm_overlap_time",
}
Parts = dict[str, dict[str, list[float]]]  # milliseconds, by contender and part


def _wraps() -> dict[str, Wrap]:
    return {
        "bare": contenders.bare(),
        "bare again": contenders.bare(),
        "DDP, views": contenders.ddp(**VIEWS),
        "DDP, views again": contenders.ddp(**VIEWS),
        "ddpx over gloo": contenders.ours_over_gloo(**VIEWS),
        "DDP over shm": contenders.ddp_over_shm(**VIEWS),
        "ddpx over shm": contenders.ours_over_shm(**VIEWS),
    }


def _time_parts(model_name: str, tiny: bool, effort: Effort) -> tuple[Seconds, Parts]:
    models, x = contenders.make_models(functools.partial(build, model_name, tiny), _wraps())
    wrapped: dict[str, Any] = {n: m for n, m in models.items() if not n.startswith("bare")}
    for model in wrapped.values():
        model._set_ddp_runtime_logging_sample_rate(1)
    parts: Parts = {name: {part: [] for part in (*_PARTS, "exposed")} for name in wrapped}

    def record(name: str) -> None:
        if name not in wrapped:
            return
        data = wrapped[name]._get_ddp_logging_data()
        for part, key in _PARTS.items():
            parts[name][part].append(int(data.get(key, 0)) / 1e6)
        parts[name]["exposed"].append(parts[name]["comm"][-1] - parts[name]["overlap"][-1])

    steps = {name: functools.partial(contenders.step, model, x) for name, model in models.items()}
    return time_rounds(steps, effort, after_each=record), parts


def time_models(tiny: bool, effort: Effort) -> dict[str, tuple[Seconds, Parts]]:
    """Runs on every rank."""
    return {name: _time_parts(name, tiny, effort) for name in _MODELS}


def measure(plan: Plan) -> Results:
    cells = []
    launches = plan.launch(_RANKS, time_models, plan.tiny, plan.effort)
    for model in _MODELS:
        times = [slowest_rank([rank[model][0] for rank in launch]) for launch in launches]
        parts = [[rank[model][1] for rank in launch] for launch in launches]
        cells.append(
            {
                "model": model,
                "ranks": _RANKS,
                "rounds": num_rounds(times),
                "ms": {name: level(times, name, 1e3) for name in times[0]},
                "beyond_bare": {name: difference(times, name, "bare", 1e3) for name in times[0]},
                "parts": {name: _of_all_ranks(parts, name) for name in parts[0][0]},
            }
        )
    return {"cells": cells}


def _of_all_ranks(launches: list[list[Parts]], name: str) -> dict[str, Figure]:
    """Medians over steps and ranks."""
    return {
        part: figure([[ms for rank in launch for ms in rank[name][part]] for launch in launches])
        for part in launches[0][0][name]
    }


def goals(results: Results) -> list[Goal]:
    del results
    return []


def section(results: Results) -> str:
    text = [
        "Figures are milliseconds. Communication lasts from the launch of the first bucket to the "
        "end of the last bucket. Overlap is the part of communication before the end of backward, "
        "and the rest is exposed. These three figures are from the wrappers' own clocks "
        "(`_get_ddp_logging_data`), as medians over steps and ranks.",
        "On few cores, overlap alone is no gain: threads that communicate take cores from threads "
        "that compute. The time of a step beyond the bare step shows the whole cost.",
    ]
    parts = ("backward", "comm", "overlap", "exposed")
    for cell in results["cells"]:
        rows = [
            [name, with_range(cell["ms"][name], 1), with_range(cell["beyond_bare"][name], 1)]
            + [_cell(cell["parts"].get(name), part) for part in parts]
            + [_share(cell["parts"].get(name))]
            for name in cell["ms"]
        ]
        text.append(f"### {cell['model']}, {num_ranks(cell['ranks'])}")
        text.append(f"{cell['rounds']} rounds.")
        headers = ["contender", "step", "beyond bare", *parts, "hidden"]
        text.append(table(headers, rows))
    return "\n\n".join(text)


def _cell(parts: dict[str, Figure] | None, part: str) -> str:
    return "" if parts is None else with_range(parts[part], 1)


def _share(parts: dict[str, Figure] | None) -> str:
    if parts is None or not parts["comm"]["median"]:
        return ""
    return f"{parts['overlap']['median'] / parts['comm']['median']:.0%}"
