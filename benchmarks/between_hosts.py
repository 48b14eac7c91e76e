"""Times steps on emulated hosts, whose links are limited, and writes a table into docs/shm.md.

python benchmarks/between_hosts.py [--seconds 8] [--only '2x4 *'] [--dry]

Needs root, util-linux and iproute2. Each row starts new ranks. DDP over gloo, DDP over shm and ddpx
over shm run in the same ranks, in turns. A time is that of the slowest rank, as a median of rounds.
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
_STORE_PORT = 29500
_START_LIMIT_S = 60.0
_LAYERS, _LAYER_NUMEL = 12, 1 << 17  # 6.3 MB of float32
_GLOO, _DDP_SHM, _OURS = "DDP over gloo", "DDP over shm", "ddpx over shm"


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


ROWS = [
    Row(2, 2, 200),
    Row(2, 2, 1000),
    Row(2, 4, 500),
    Row(4, 2, 500),
    Row(2, 2, 1000, models.TRANSFORMER),
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
        _DDP_SHM: contenders.ddp_over_shm(**contenders.VIEWS),
        _OURS: contenders.ours_over_shm(**contenders.VIEWS),
    }
    steps = contenders.make_steps(lambda: _build(row), wraps)
    times = time_rounds(steps, Effort(seconds, min_rounds=5))
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
        deadline = time.monotonic() + _START_LIMIT_S + 3 * seconds
        while True:
            events = [hosts.events(rank) for rank in range(row.num_ranks)]
            if all(events):
                return slowest_rank([event["times"] for (event,) in events])
            if time.monotonic() > deadline:
                outputs = [hosts.output(rank) for rank in range(row.num_ranks)]
                raise SystemExit("\n".join([f"{row}: ranks did not end", *filter(None, outputs)]))
            time.sleep(0.2)


def _cells(row: Row, times: Seconds) -> list[str]:
    num_bytes = sum(param.nbytes for param in _build(row)[0].parameters())
    medians = {name: statistics.median(values) for name, values in times.items()}
    bound_s = max(row.bound_s(num_bytes), medians["bare"])
    place = f"{row.num_hosts} x {row.ranks_per_host}"
    return [
        place,
        f"{row.mbit_per_s} Mbit/s",
        f"{row.model}, {num_bytes / 1e6:.1f} MB",
        f"{bound_s * 1e3:.0f} ms",
        *(f"{medians[name] / bound_s:.2f}" for name in (_GLOO, _DDP_SHM, _OURS)),
        str(len(times["bare"])),
    ]


def _text(cells: list[list[str]]) -> str:
    about = machine.describe()
    headers = ["hosts x ranks", "link", "gradients", "bound", _GLOO, _DDP_SHM, _OURS, "rounds"]
    note = (
        f"Steps as multiples of the bound, on {about['cores']} cores ({about['processor']}), "
        f"{about['versions']}, {machine.now()['date'].split()[0]}:"
    )
    return f"{note}\n\n{table(headers, cells)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8.0, help="the time of a row's rounds")
    parser.add_argument("--only", default="*", help="a pattern for rows, such as '2x2 *'")
    parser.add_argument("--dry", action="store_true", help="print the table only")
    arguments = parser.parse_args()
    cells = []
    try:
        for row in ROWS:
            if fnmatchcase(str(row), arguments.only):
                cells.append(_cells(row, _times(row, arguments.seconds)))
                print(" | ".join(cells[-1]), flush=True)
    except CannotEmulate as reason:
        raise SystemExit(f"hosts cannot be emulated here: {reason}") from None
    if not arguments.dry:
        write_between_marks(_PAGE, "between hosts", _text(cells))


if __name__ == "__main__":
    main()
