"""The all-reduce alone: gloo, shm resident and staged, MPICH, and the time of copies.

MPICH needs processes of its own. They run after those of the others for each size, so that the
blocks of both alternate.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import contenders
import numpy as np
import torch
import torch.distributed as dist
from goals import Goal
from interleave import Effort, Seconds, slowest_rank, time_rounds
from plan import KIB, MIB, Plan
from pooling import Figure, figure, level, num_rounds
from tables import Results, num_ranks, short, size, table

from ddpx.testing import RankPool

NAME = "all_reduce"
TITLE = "All-reduce alone"

MPICH = "MPICH"
RESIDENT, STAGED = "shm, resident", "shm, staged"
COPY, COPY_WITHIN = "copy", "copy within"
_TIMEOUT_S = 300.0
Array = np.ndarray[Any, np.dtype[np.float32]]
# Above this size memory bandwidth is measured, and the goals of bandwidth apply.
_LARGE_BYTES = 25 * MIB
_SMALL_BYTES = 64 * KIB
_WHY_SMALL = (
    "Python, torch's dispatcher and a Work object for each operation take longer than the whole "
    "operation in MPICH (see the all-reduce of one rank under growth)."
)


def _burst_of(num_bytes: int) -> int:
    """The number of operations in a row. A short operation alone would time the barrier."""
    return min(max(MIB // num_bytes, 1), 32)


def _repeat(run: Callable[[], object], times: int) -> None:
    for _ in range(times):
        run()


def _all_reduce(group: dist.ProcessGroup, tensor: torch.Tensor) -> Callable[[], object]:
    """Calls the backend as ``dist.all_reduce`` does, without its checks."""
    options = dist.AllreduceOptions()
    options.asyncOp = False
    tensors = [tensor]

    def run() -> None:
        group.allreduce(tensors, options).wait()

    return run


def _copy_within(buffer: Array) -> None:
    """Copies one half over the other, and back: as many bytes as a copy, in half the memory."""
    half = buffer.size // 2
    np.copyto(buffer[half:], buffer[:half])
    np.copyto(buffer[:half], buffer[half:])


def time_all_reduces(num_bytes: int, effort: Effort) -> Seconds:
    """Runs on every rank. Returns the seconds of one operation."""
    numel, burst = num_bytes // 4, _burst_of(num_bytes)
    group, gloo = contenders.shm_group(), dist.group.WORLD
    assert gloo is not None
    backend = group._get_backend(torch.device("cpu"))
    resident = backend.allocate_tensor(numel, dtype=torch.float32, device=torch.device("cpu"))
    plain = [torch.zeros(numel) for _ in range(3)]
    source, target, alone = (np.zeros(numel, np.float32) for _ in range(3))
    for buffer in (resident, *plain):
        buffer.zero_()  # allocates the pages; sums of zeros stay zeros
    for array in (source, target, alone):
        array.fill(0)
    runs: dict[str, Callable[[], object]] = {
        "gloo": _all_reduce(gloo, plain[0]),
        "gloo again": _all_reduce(gloo, plain[1]),
        RESIDENT: _all_reduce(group, resident),
        STAGED: _all_reduce(group, plain[2]),
        COPY: partial(np.copyto, target, source),
        COPY_WITHIN: partial(_copy_within, alone),
    }
    bursts = {name: partial(_repeat, run, burst) for name, run in runs.items()}
    # A separate operation first, since gloo's barrier releases ranks one after another.
    times = time_rounds(bursts, effort, before_each=lambda name: runs[name]())
    return {name: [seconds / burst for seconds in per_round] for name, per_round in times.items()}


def why_no_mpich() -> str:
    """Why MPICH cannot run; empty if it can. The extra `bench` has both packages."""
    if importlib.util.find_spec("mpi4py") is None:  # not imported: that would start MPI in here
        return "mpi4py is not installed"
    return "" if _mpiexec().exists() else f"there is no {_mpiexec().name} beside the interpreter"


def _mpiexec() -> Path:
    # Not another mpiexec on the path: mpi4py would use another library than the one that it starts.
    return Path(sys.executable).parent / "mpiexec"


def _time_mpich(ranks: int, num_bytes: int, rounds: int, warm_up: int) -> tuple[list[float], str]:
    """The seconds of one operation in each round, and the version of MPICH."""
    command = [str(_mpiexec()), "-n", str(ranks), sys.executable]
    command += [str(Path(__file__).with_name("mpi_all_reduce.py"))]
    for option, value in {
        "numel": num_bytes // 4,
        "burst": _burst_of(num_bytes),
        "rounds": rounds,
        "warm-up": warm_up,
    }.items():
        command.append(f"--{option}={value}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    answer = json.loads(done.stdout)
    return answer["seconds"], answer["version"]


def measure(plan: Plan) -> Results:
    absent = why_no_mpich()
    if absent:
        print(f"without MPICH: {absent}", flush=True)
    effort = Effort(plan.effort.seconds / 6, plan.effort.min_rounds)
    version = ""
    cells = []
    for ranks in plan.reduce_ranks:
        by_size: dict[int, list[Seconds]] = {num_bytes: [] for num_bytes in plan.sizes_bytes}
        for _ in range(plan.launches):
            with RankPool(ranks, start_method=plan.start_method) as pool:
                for num_bytes, launches in by_size.items():
                    per_rank = pool.run(time_all_reduces, num_bytes, effort, timeout=_TIMEOUT_S)
                    times = slowest_rank(per_rank)
                    if not absent:
                        times[MPICH], version = _time_mpich(
                            ranks, num_bytes, len(times["gloo"]), effort.warm_up
                        )
                    launches.append(times)
        cells += [
            {"ranks": ranks, "bytes": num_bytes, **_summary(launches)}
            for num_bytes, launches in by_size.items()
        ]
    return {"cells": cells, "mpich": version, "without_mpich": absent}


def _summary(launches: list[Seconds]) -> Results:
    return {
        "rounds": num_rounds(launches),
        "ms": {name: level(launches, name, 1e3) for name in launches[0]},
        "min_ms": {name: 1e3 * min(min(t[name]) for t in launches) for name in launches[0]},
        "resident_to": {
            name: _resident_to(launches, name) for name in launches[0] if name != RESIDENT
        },
    }


def _resident_to(launches: list[Seconds], name: str) -> Figure:
    if name != MPICH:
        pairs = [zip(times[RESIDENT], times[name], strict=True) for times in launches]
        return figure([[a / b for a, b in pair] for pair in pairs])
    medians = [
        level([times], RESIDENT)["median"] / level([times], name)["median"] for times in launches
    ]
    return figure([[median] for median in medians])


def goals(results: Results) -> list[Goal]:
    found = []
    for cell in results["cells"]:
        where = f"{size(cell['bytes'])}, {num_ranks(cell['ranks'])}"
        to = {name: ratio["median"] for name, ratio in cell["resident_to"].items()}
        noise = abs(cell["ms"]["gloo again"]["median"] / cell["ms"]["gloo"]["median"] - 1)
        if cell["bytes"] >= _LARGE_BYTES:
            speed_up = 1 / to["gloo"]
            found.append(
                Goal(f"gloo / resident, {where}", speed_up, 3.0, at_least=True, noise=noise)
            )
            found.append(Goal(f"resident / copy, {where}", to[COPY], 1.3, noise=noise))
        if MPICH in to:
            why = _WHY_SMALL if cell["bytes"] <= _SMALL_BYTES else ""
            found.append(Goal(f"resident / MPICH, {where}", to[MPICH], 1.0, noise=noise, why=why))
    return found


def section(results: Results) -> str:
    mpich = results["without_mpich"] or f"MPICH {results['mpich']} with its default settings"
    text = [
        "An operation is a sum of fp32, in place, called on the process group as reducers call it. "
        "Small sizes run several operations in a row, without work between them. Figures are "
        "milliseconds an operation on the slowest rank, as median / minimum over rounds.",
        "- Resident: the buffer came from the backend's `allocate_tensor`, as ReducerDDP's buckets "
        "do.\n"
        "- Staged: the buffer is an ordinary tensor.\n"
        "- Copy: the lower bound. p ranks that all-reduce N bytes in place, in shared memory, with "
        "one owner for each slice, have to read p·N bytes and to write p·N bytes. `copy` is the "
        "time in which p processes move as many bytes at the same time: each copies N bytes "
        "(memcpy) from one private buffer into another.\n"
        "- Copy within: the stricter bound where the data fit into caches. Each process copies one "
        "half of a buffer over the other half, and back. It moves as many bytes, in half the "
        "memory, like the all-reduce. No goal refers to this bound.\n"
        f"- MPICH: {mpich}. It runs in separate processes, between the blocks of the other "
        "contenders, size by size. Its ratio is a ratio of medians. The other ratios are medians "
        "of ratios in the same round.",
        "![time by size](benchmarks/all_reduce.png)",
    ]
    for ranks in sorted({cell["ranks"] for cell in results["cells"]}):
        cells = [cell for cell in results["cells"] if cell["ranks"] == ranks]
        names = list(cells[0]["ms"])
        rows = [
            [f"{size(cell['bytes'])} ({cell['rounds']} rounds)"]
            + [f"{short(cell['ms'][n]['median'])} / {short(cell['min_ms'][n])}" for n in names]
            for cell in cells
        ]
        text.append(f"### {num_ranks(ranks)}")
        text.append(table(["bytes a rank", *names], rows))
        others = [name for name in names if name not in (RESIDENT, "gloo again")]
        rows = [
            [size(cell["bytes"])]
            + [f"{cell['resident_to'][name]['median']:.2f}" for name in others]
            for cell in cells
        ]
        text.append("Resident, as a ratio to the other contenders:")
        text.append(table(["bytes a rank", *others], rows))
    return "\n\n".join(text)
