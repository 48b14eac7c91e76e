"""Compares bucket plans: the best of a grid, the default and bucket_cap_mb="auto".

python benchmarks/plan_table.py [--steps 200] [--only 'shm *'] [--tiny] [--dry]

Writes each row into benchmarks/results/plan_table.json, and the table of all rows into
docs/bucket_plans.md. With --only, other rows stay as they were measured before. Needs root,
util-linux and iproute2.

Each row has two new ranks, with one wrapper whose plan changes between blocks of steps. First the
wrapper searches its plan. Then all plans of a grid run in turns. Then the winner of the grid, the
default plan and the searched plan run again, in turns. A time is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import machine
import models
import torch
import torch.distributed as dist
from contenders import VIEWS, step
from tables import table

import ddpx
from ddpx import _C
from ddpx.planning.search import MOST_STEPS

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests"), str(ROOT / "tests" / "hosts")]

from emulated_hosts import CannotEmulate  # type: ignore[import-not-found]  # noqa: E402
from host_ranks import RankedHosts  # type: ignore[import-not-found]  # noqa: E402
from marked_page import write_between_marks  # noqa: E402

_PAGE = ROOT / "docs" / "bucket_plans.md"
_RESULTS = ROOT / "benchmarks" / "results" / "plan_table.json"
_STORE_PORT = 29500
_LIMIT_S = 3600.0
_MIB = 1 << 20
_MBIT_PER_S = 500
_CAPS_MB = (0.25, 1, 5, 25, 100, 200)
_FIRST_CAPS_MB = (0.25, 1, 5, 25)
_BLOCK, _GRID_ROUNDS = 4, 3  # measured steps of a block; blocks of each plan of the grid
_DEFAULT, _AGAIN, _GRID, _AUTO = "default", "default again", "best of the grid", "auto"

Plan = list[list[int]]


@dataclass(frozen=True)
class Row:
    """A row of the table: where the two ranks are, and their model."""

    place: str
    ranks_per_host: tuple[int, ...]
    model: str

    def __str__(self) -> str:
        return f"{self.place} {self.model}"


_LINK = f"link of {_MBIT_PER_S} Mbit/s"
ROWS = [
    Row(place, ranks, model)
    for place, ranks in (("shm", (2,)), (_LINK, (1, 1)))
    for model in models.MODELS
]


# ---- on each rank --------------------------------------------------------------------------------


def _run_rank(row: Row, rank: int, address: str, num_steps: int, tiny: bool) -> None:
    """Prints the result of a rank. The process then waits, since peers may still need the store."""
    torch.set_num_threads(1)
    store = dist.TCPStore(address, _STORE_PORT, 2, rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    module, x = models.build(row.model, tiny)
    model = ddpx.ReducerDDP(module, bucket_cap_mb="auto", **VIEWS)
    run = functools.partial(step, model, x)
    report = None
    for _ in range(MOST_STEPS):
        run()
        report = ddpx.plan_report(model)
        if report is not None and report.final:
            break
    run()
    assert report is not None and report.final, report
    searched = model.reducer.plan.buckets
    grid = _grid(model)
    times = _run_blocks(model, run, grid, _GRID_ROUNDS)
    best = min(times, key=lambda name: statistics.median(times[name]))
    default = list(map(list, report.plans[0].buckets)) if report.plans else searched
    plans = {_DEFAULT: default, _AGAIN: default, _GRID: grid[best], _AUTO: searched}
    finals = _run_blocks(model, run, plans, max(num_steps // _BLOCK, 2))
    event = {"event": "times", "grid": best, "plans": {n: len(p) for n, p in plans.items()}}
    found = {**event, "report": str(report), "times": finals, "num_grid": len(grid)}
    os.write(1, f"{json.dumps(found)}\n".encode())
    time.sleep(_LIMIT_S)


def _grid(model: ddpx.ReducerDDP) -> dict[str, Plan]:
    """The plans that DDP would make with pairs of caps, without equal plans."""
    metas = [_C.ParamMeta(p.tensor, p.expect_sparse) for p in model._ddpx.managed]
    order = model.reducer.arrival_order
    plans: dict[str, Plan] = {}
    for cap, first in itertools.product(_CAPS_MB, _FIRST_CAPS_MB):
        caps = _C.BucketCaps(int(first * _MIB), int(cap * _MIB), ())
        plan = _C.BucketPlan.by_arrival(metas, caps, order).buckets
        if plan not in plans.values():
            plans[f"{cap:g} MiB, first {first:g}"] = plan
    return plans


def _run_blocks(
    model: ddpx.ReducerDDP, run: Callable[[], None], plans: Mapping[str, Plan], rounds: int
) -> dict[str, list[float]]:
    """The median step of each block in seconds, on the slowest rank of each step."""
    times: dict[str, list[float]] = {name: [] for name in plans}
    for number in range(rounds):
        for name in random.Random(number).sample(list(plans), len(plans)):
            model.reducer.use_buckets(plans[name])
            run()
            block = torch.zeros(_BLOCK, dtype=torch.float64)
            for place in range(_BLOCK):
                dist.barrier()
                start = time.perf_counter()
                run()
                block[place] = time.perf_counter() - start
            dist.all_reduce(block, dist.ReduceOp.MAX)
            times[name].append(block.median().item())
    return times


# ---- the table -----------------------------------------------------------------------------------


def _measure(row: Row, num_steps: int, tiny: bool) -> dict[str, Any]:
    """The event of rank 0."""
    with RankedHosts(row.ranks_per_host) as hosts:
        if len(row.ranks_per_host) > 1:
            for rank in range(2):
                hosts.host_of(rank).limit_rate(_MBIT_PER_S)
        address = hosts.host_of(0).address
        for rank in range(2):
            arguments = (row, rank, address, num_steps, tiny)
            hosts.start_beside(rank, f"rank{rank}", _run_rank, *arguments)
        deadline = time.monotonic() + _LIMIT_S
        while True:
            events = [hosts.events(rank) for rank in range(2)]
            if all(events):
                event: dict[str, Any] = events[0][0]
                return event
            outputs = [hosts.output(rank) for rank in range(2)]
            if time.monotonic() > deadline or any("Traceback" in (o or "") for o in outputs):
                raise SystemExit("\n".join([f"{row}: ranks did not end", *filter(None, outputs)]))
            time.sleep(0.5)


def cells(row: Row, event: Mapping[str, Any]) -> list[str]:
    """The cells of a row."""
    times = event["times"]
    default_ms = 1e3 * statistics.median(times[_DEFAULT])
    numbers = event["plans"]
    return [
        row.place,
        row.model,
        f"{default_ms:.1f} ms ({numbers[_DEFAULT]})",
        f"{event['grid']} ({numbers[_GRID]})",
        f"{_ratio(times, _GRID)[0]:.3f}",
        f"{_ratio(times, _AUTO)[0]:.3f} ({numbers[_AUTO]})",
        f"± {_ratio(times, _AGAIN)[1]:.3f}",
        str(_BLOCK * len(times[_DEFAULT])),
        machine.now()["date"].split()[0],
    ]


def _ratio(times: Mapping[str, Sequence[float]], name: str) -> tuple[float, float]:
    """The median ratio to the default plan in the same round, and the half-width of its 95 %
    interval."""
    ratios = [a / b for a, b in zip(times[name], times[_DEFAULT], strict=True)]
    middle = statistics.median(ratios)
    deviation = 1.4826 * statistics.median(abs(ratio - middle) for ratio in ratios)
    half_width = 1.96 * math.sqrt(math.pi / 2) * deviation / math.sqrt(len(ratios))
    return middle, abs(middle - 1) + half_width if name == _AGAIN else half_width


@dataclass(frozen=True)
class Result:
    """A measured row: its cells in the table, and the machine."""

    cells: list[str]
    machine: str


def _machine() -> str:
    about = machine.describe()
    return f"{about['cores']} cores ({about['processor']}), {about['versions']}"


def text(results: Mapping[str, Result]) -> str:
    """The table of all rows that were measured, with their machines."""
    measured = [results[str(row)] for row in ROWS if str(row) in results]
    machines = list(dict.fromkeys(result.machine for result in measured))
    rows = [result.cells for result in measured]
    headers = ["place", "model", "default", "best of the grid", "ratio", _AUTO, "A/A", "steps"]
    headers.append("date")
    if len(machines) > 1:
        headers.append("machine")
        rows = [[*each.cells, str(1 + machines.index(each.machine))] for each in measured]
    note = (
        "Steps as multiples of a step with the default plan, 2 ranks on "
        f"{'; '.join(machines)}. In brackets: the number of buckets. A/A: the half-width of the "
        "interval that a second copy of the default plan needs to contain 1. A ratio within it is "
        "noise."
    )
    return f"{note}\n\n{table(headers, rows)}"


def _read() -> dict[str, Result]:
    stored = json.loads(_RESULTS.read_text()) if _RESULTS.exists() else {}
    return {row: Result(**values) for row, values in stored.items()}


def _write(results: Mapping[str, Result]) -> None:
    values = {row: asdict(result) for row, result in results.items()}
    _RESULTS.write_text(f"{json.dumps(values, indent=1)}\n")
    write_between_marks(_PAGE, "plan table", text(results))


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="measured steps of each contender")
    parser.add_argument("--only", default="*", help="a pattern for rows, such as 'shm *'")
    parser.add_argument("--tiny", action="store_true", help="small models, to see that it runs")
    parser.add_argument("--dry", action="store_true", help="print the table only")
    arguments = parser.parse_args()
    is_dry = arguments.dry or arguments.tiny
    results = {} if is_dry else _read()
    try:
        for row in ROWS:
            if fnmatchcase(str(row), arguments.only):
                event = _measure(row, arguments.steps, arguments.tiny)
                result = results[str(row)] = Result(cells(row, event), _machine())
                print(" | ".join(result.cells), event["report"], sep="\n  ", flush=True)
                if not is_dry:
                    _write(results)
    except CannotEmulate as reason:
        raise SystemExit(f"hosts cannot be emulated here: {reason}") from None
    if is_dry:
        print(text(results))


if __name__ == "__main__":
    main()
