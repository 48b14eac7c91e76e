"""Times steps on emulated hosts, whose links are limited, and writes tables into pages.

python benchmarks/between_hosts.py [--seconds 20] [--only '2x4 *'] [--dry]

Needs root, util-linux and iproute2. Each row starts new ranks. All contenders run in the same
ranks, in turns. A time is that of the slowest rank. docs/shm.md gets all rows, docs/multi_node.md a
few. With ``--only``, only pages whose rows were all measured change.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import contenders
import machine
import models
import torch
import torch.distributed as dist
from interleave import Effort, Seconds, slowest_rank, time_rounds
from tables import table
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests"), str(ROOT / "tests" / "hosts")]

from emulated_hosts import CannotEmulate  # type: ignore[import-not-found]  # noqa: E402
from host_ranks import RankedHosts  # type: ignore[import-not-found]  # noqa: E402
from marked_page import write_between_marks  # noqa: E402

_PAGE = ROOT / "docs" / "shm.md"
_PAGE_OF_FEW_ROWS = ROOT / "docs" / "multi_node.md"
_STORE_PORT = 29500
_START_LIMIT_S = 120.0
_LAYERS, _LAYER_NUMEL = 12, 1 << 17  # 6.3 MB of float32
_GLOO, _BATCHED, _AGAIN = "DDP over gloo", "the same, batched copy", "DDP over gloo again"
_OURS_GLOO, _OURS_WITH_SHM = "ddpx over gloo", 'ddpx over gloo, transport="shm"'
_DDP_SHM, _OURS_SHM = "DDP over shm", "ddpx over shm"
_COLUMNS = [_GLOO, _OURS_GLOO, _OURS_WITH_SHM, _DDP_SHM, _OURS_SHM]


@dataclass(frozen=True)
class Row:
    """A row of the table: hosts with equal numbers of ranks, and the rate of each host's link."""

    num_hosts: int
    ranks_per_host: int
    mbit_per_s: int
    model: str = "no computation"

    def __str__(self) -> str:
        return f"{self.num_hosts}x{self.ranks_per_host} {self.mbit_per_s} {self.model}"

    @property
    def num_ranks(self) -> int:
        return self.num_hosts * self.ranks_per_host

    def bound_s(self, num_bytes: int) -> float:
        """The time in which the link can carry the gradients, without headers of packets."""
        share = 2 * (self.num_hosts - 1) / self.num_hosts
        return share * num_bytes * 8 / (self.mbit_per_s * 1e6)


FEW_ROWS = [Row(2, 2, 500)]  # bound by the link, also on a busy machine
ROWS = [
    Row(2, 1, 500),
    Row(2, 2, 200),
    Row(2, 2, 1000),
    Row(2, 4, 500),
    Row(4, 2, 500),
    Row(2, 2, 1000, models.TRANSFORMER),
    *FEW_ROWS,
    Row(2, 2, 500, models.TRANSFORMER),
]


# ---- on each rank --------------------------------------------------------------------------------


class _AnyGrad(torch.autograd.Function):
    """Passes its input on. The gradient of the parameter is memory as it was found."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        ctx.numel = param.numel()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grads[0], torch.empty(ctx.numel)


class _NoComputation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shapes = [_LAYER_NUMEL] * _LAYERS
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(numel)) for numel in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for param in self.layers:
            x = _AnyGrad.apply(x, param)
        return x


def _build(row: Row) -> tuple[nn.Module, torch.Tensor]:
    if row.model in models.MODELS:
        return models.build(row.model, tiny=False)
    return _NoComputation(), torch.ones(1, requires_grad=True)


def _run_rank(row: Row, rank: int, address: str, seconds: float) -> None:
    """Prints the times of a rank. The process then waits, since peers may still need the store."""
    torch.set_num_threads(1)
    store = dist.TCPStore(address, _STORE_PORT, row.num_ranks, rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=row.num_ranks)
    wraps = {
        "bare": contenders.bare(),
        _GLOO: contenders.ddp(**contenders.VIEWS),
        _BATCHED: contenders.ddp(**contenders.VIEWS, **contenders.BATCHED),
        _AGAIN: contenders.ddp(**contenders.VIEWS),
        _OURS_GLOO: contenders.ours_over_gloo(**contenders.VIEWS),
        _OURS_WITH_SHM: contenders.ours_with_shm(**contenders.VIEWS),
        _DDP_SHM: contenders.ddp_over_shm(**contenders.VIEWS),
        _OURS_SHM: contenders.ours_over_shm(**contenders.VIEWS),
    }
    steps = contenders.make_steps(lambda: _build(row), wraps)
    times = time_rounds(steps, Effort(seconds, min_rounds=7))
    os.write(1, f"{json.dumps({'event': 'times', 'times': times})}\n".encode())
    time.sleep(3600)


# ---- the table -----------------------------------------------------------------------------------


def _times(row: Row, seconds: float) -> Seconds:
    """The seconds of each contender on its slowest rank, by round."""
    with RankedHosts((row.ranks_per_host,) * row.num_hosts) as hosts:
        for rank in range(0, row.num_ranks, row.ranks_per_host):
            hosts.host_of(rank).limit_rate(row.mbit_per_s)
        address = hosts.host_of(0).address
        for rank in range(row.num_ranks):
            hosts.start_beside(rank, f"rank{rank}", _run_rank, row, rank, address, seconds)
        deadline = time.monotonic() + _START_LIMIT_S + 6 * seconds
        while True:
            events = [hosts.events(rank) for rank in range(row.num_ranks)]
            if all(events):
                return slowest_rank([event["times"] for (event,) in events])
            if time.monotonic() > deadline:
                outputs = [hosts.output(rank) for rank in range(row.num_ranks)]
                raise SystemExit("\n".join([f"{row}: ranks did not end", *filter(None, outputs)]))
            time.sleep(0.2)


def _best_of_ddp(times: Seconds) -> str:
    """The setting of DDP over gloo with the least median."""
    return min((_GLOO, _BATCHED), key=lambda name: statistics.median(times[name]))


def _cells(row: Row, times: Seconds) -> list[str]:
    num_bytes = sum(param.nbytes for param in _build(row)[0].parameters())
    medians = {name: statistics.median(values) for name, values in times.items()}
    medians[_GLOO] = medians[_best_of_ddp(times)]
    bound_s = max(row.bound_s(num_bytes), medians["bare"])
    return [
        f"{row.num_hosts} x {row.ranks_per_host}",
        f"{row.mbit_per_s} Mbit/s",
        f"{row.model}, {num_bytes / 1e6:.1f} MB",
        f"{bound_s * 1e3:.0f} ms",
        *(f"{medians[name] / bound_s:.2f}" for name in _COLUMNS),
        _ratio(times, _AGAIN, _GLOO),
        str(len(times["bare"])),
    ]


def _ratio(times: Seconds, name: str, base: str) -> str:
    """The median of the ratios in the same round, with their quartiles."""
    ratios = [a / b for a, b in zip(times[name], times[base], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f} - {high:.2f})"


def _about() -> str:
    about, now = machine.describe(), machine.now()
    return (
        f"on {about['cores']} cores ({about['processor']}), {about['versions']}, "
        f"{now['date'].split()[0]}, load average at the end {now['load']}"
    )


def _text(cells: list[list[str]]) -> str:
    headers = ["hosts x ranks", "link", "gradients", "bound", *_COLUMNS, "noise", "rounds"]
    return f"Steps as multiples of the bound, {_about()}:\n\n{table(headers, cells)}"


def _text_of_few_rows(times: dict[Row, Seconds]) -> str:
    names = [_OURS_GLOO, _OURS_WITH_SHM, _DDP_SHM]
    headers = ["step / step of the best DDP over gloo", *names, "DDP against itself", "rounds"]
    cells = []
    for row in FEW_ROWS:
        base = _best_of_ddp(times[row])
        place = f"{row.num_hosts} hosts of {row.ranks_per_host} ranks"
        cells.append(
            [
                f"{row.model}, {place}, {row.mbit_per_s} Mbit/s",
                *(_ratio(times[row], name, base) for name in names),
                _ratio(times[row], _AGAIN, _GLOO),
                str(len(times[row]["bare"])),
            ]
        )
    note = f"`python benchmarks/between_hosts.py`, emulated hosts {_about()}, medians (quartiles):"
    return f"{note}\n\n{table(headers, cells)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="the time of a row's rounds")
    parser.add_argument("--only", default="*", help="a pattern for rows, such as '2x2 *'")
    parser.add_argument("--dry", action="store_true", help="print the tables only")
    arguments = parser.parse_args()
    times: dict[Row, Seconds] = {}
    try:
        for row in ROWS:
            if fnmatchcase(str(row), arguments.only):
                times[row] = _times(row, arguments.seconds)
                print(" | ".join(_cells(row, times[row])), flush=True)
    except CannotEmulate as reason:
        raise SystemExit(f"hosts cannot be emulated here: {reason}") from None
    pages: dict[Path, tuple[str, str]] = {}
    if times.keys() >= {*FEW_ROWS}:
        pages[_PAGE_OF_FEW_ROWS] = "few rows between hosts", _text_of_few_rows(times)
        print(pages[_PAGE_OF_FEW_ROWS][1])
    if times.keys() >= {*ROWS}:
        pages[_PAGE] = "between hosts", _text([_cells(row, times[row]) for row in ROWS])
    for page, (name, text) in pages.items() if not arguments.dry else ():
        write_between_marks(page, name, text)


if __name__ == "__main__":
    main()
