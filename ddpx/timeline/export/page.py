"""Writes a recording as one HTML page, which shows a step in detail.

``page.html`` refers to its style sheets and scripts. The written page contains them, and the data.
``page_state.js`` decodes the data. Times are whole µs since the first rank began the step. Values
that are the same in many steps are stored once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from importlib import resources
from pathlib import Path
from typing import Any

from ddpx.planning import PlanReport
from ddpx.timeline.analyze import focus
from ddpx.timeline.analyze.diagnoses import advise
from ddpx.timeline.analyze.extent import find_step, not_begun, step_extent
from ddpx.timeline.analyze.figures import holdup, step_figures
from ddpx.timeline.analyze.turns import in_turn
from ddpx.timeline.export import rows
from ddpx.timeline.export.plan_rows import arrivals_ms, plan_rows, title
from ddpx.timeline.model import Recording, Step


def write(recording: Recording, path: str | Path) -> None:
    """Writes the page.

    Raises:
        RuntimeError: No complete step was recorded.
    """
    find_step(recording, None)
    # Without `<`, the data cannot end the script element or begin a comment.
    data = json.dumps(page_data(recording), separators=(",", ":")).replace("<", "\\u003c")
    colors = "".join(f"--{name}: {color}; " for name, color in rows.COLORS.items())
    page = _file("page.html").replace(">{}</script>", f">{data}</script>")
    page = page.replace("<style></style>", f"<style>:root {{ {colors}}}</style>")
    page = re.sub(
        r'<link rel="stylesheet" href="([a-z_.]+)">',
        lambda found: f"<style>\n{_file(found[1])}</style>",
        page,
    )
    page = re.sub(
        r'<script src="([a-z_.]+)"></script>',
        lambda found: f"<script>\n{_file(found[1])}</script>",
        page,
    )
    Path(path).write_text(page, encoding="utf-8")


def _file(name: str) -> str:
    return (resources.files("ddpx.timeline.export") / name).read_text(encoding="utf-8")


def page_data(recording: Recording) -> dict[str, Any]:
    """The data of the page, as values that JSON supports."""
    # Equal layouts, and equal orders of arrival, are stored once: the index of each.
    layouts: dict[Hashable, int] = {}
    orders: dict[Hashable, int] = {}
    steps = [_step(recording, step, layouts, orders) for step in recording.steps]
    median = find_step(recording, None)
    return {
        "backend": recording.backend,
        "device": recording.device,
        "worldSize": recording.world_size,
        "hosts": recording.hosts,
        "clockErrors": {rank: clock.error_ns / 1e3 for rank, clock in recording.clocks.items()},
        "params": recording.param_names,
        "paramSizes": [rows.size(num_bytes) for num_bytes in recording.param_bytes],
        "legend": rows.LEGEND,
        "states": rows.STATES,
        "mayBeExposed": rows.MAY_BE_EXPOSED,
        "negligible": rows.NEGLIGIBLE,
        "maxFolded": rows.MAX_FOLDED,
        "times": (*rows.Times._fields, "launched"),
        "layouts": list(layouts),
        "orders": list(orders),
        "steps": steps,
        "advice": advise(recording),
        "shown": recording.steps.index(median),
        "why": focus.why_text(recording, median, None),
        "detailed": focus.detailed_ranks(median),
        "plans": _plans(recording.plan_report),
    }


def _plans(report: PlanReport | None) -> dict[str, Any] | None:
    drawn = [] if report is None else plan_rows(report)
    if report is None or not drawn:
        return None
    return {
        "title": title(report),
        "ready": arrivals_ms(report),
        "rows": [vars(row) for row in drawn],
    }


def _step(
    recording: Recording, step: Step, layouts: dict[Hashable, int], orders: dict[Hashable, int]
) -> dict[str, Any]:
    extent = step_extent(step)
    groups = focus.bucket_rows(step, focus.detailed_ranks(step))
    drawn = in_turn(recording, step)
    layout = tuple((bucket.params, rows.size(bucket.num_bytes)) for bucket in step.layout)
    return {
        "number": step.number,
        "length": _us(extent.end, extent.begin),
        "layout": layouts.setdefault(layout, len(layouts)),
        "wait": focus.wait_text(recording, step),
        "rows": [(group, rows.label(step, group)) for group in groups],
        "byExposed": focus.by_exposed(step, list(step.ranks)),
        "ranks": {rank: _rank(step, drawn, rank, orders) for rank in step.ranks},
        "holdups": [
            None if found is None else [found.rank, found.param, _us(found.waited_ns)]
            for found in (holdup(step, index) for index in range(len(step.layout)))
        ],
    }


def _rank(step: Step, drawn: Step, rank: int, orders: dict[Hashable, int]) -> dict[str, Any]:
    rank_step = step.ranks[rank]
    begin = step_extent(step).begin

    def at(ns: int) -> int:
        return _us(ns, begin)

    order = tuple(arrival.param for arrival in rank_step.arrivals)
    arrived = [at(arrival.at) for arrival in rank_step.arrivals]
    return {
        "forwards": [[at(span.begin), at(span.end)] for span in rank_step.forwards],
        "localBackwards": [[at(span.begin), at(span.end)] for span in rank_step.local_backwards],
        "backward": [at(rank_step.backward.begin), at(rank_step.backward.end)],
        "end": at(rank_step.end),
        "phases": [[p.phase, at(p.span.begin), at(p.span.end)] for p in rank_step.phases],
        "order": orders.setdefault(order, len(orders)),
        # The differences of times have fewer digits than the times.
        "arrivals": [b - a for a, b in zip([0, *arrived], arrived, strict=False)],
        "buckets": [
            None if times is None or bucket is None else [*map(at, times), at(bucket.launched)]
            for index, bucket in enumerate(rank_step.buckets)
            for times in [rows.bucket_times(drawn, rank, index)]
        ],
        "figures": {
            "notBegun": _us(not_begun(step, rank).ns),
            **{name: _us(ns) for name, ns in vars(step_figures(rank_step)).items()},
        },
    }


def _us(ns: int, since: int = 0) -> int:
    return round((ns - since) / 1e3)
