"""Compares the cost of a step of this checkout with that of another, in turns on one machine.

    python benchmarks/before_after.py ../other
    taskset -c 1 python benchmarks/before_after.py ../other --ranks 1 \\
        --model "4,000 tiny tensors" --measure cpu-time --starts 30 --rounds 60 --steps 1
    python benchmarks/before_after.py ../other --ranks 1 --model "4,000 tiny tensors" \\
        --measure instructions --starts 1 --rounds 2

The second and third command measure no waits. They measure the CPU time of the training thread,
or count its instructions, for forward and backward of a model with almost no arithmetic, with all
work of a reducer (DDPX_FORCE_COMM=1). The number of instructions differs by 0.1 % from run to run,
but it does not show a cache miss. Counting needs valgrind.

Each checkout has ranks of its own, with its own build of the extension. A second set of ranks of
the other checkout shows the noise: the column A/A compares it with the first set. In each round
every setting runs on all three sides, directly one after another, in an order that changes. A
process may be fast or slow for its whole life, by the places of its memory. So the ranks are
started several times (`--starts`). A cost is the mean of the rounds of a start, and a ratio the
mean of the ratios of all starts, beside its 95 % interval. Each mean leaves out the lowest and the
highest twentieth. On a virtual machine, the load of other machines changes the time of a step at
random. The mean of many rounds then differs less from start to start than a percentile.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[1]
SIDES = ("before", "before, again", "after")
# name -> the wrapper's options, and whether a rank leaves out a layer in some steps
SETTINGS: dict[str, tuple[dict[str, Any], bool]] = {
    "default": ({}, False),
    "views": ({"gradient_as_bucket_view": True}, False),
    "views, batched copy": ({"gradient_as_bucket_view": True, "batched_grad_copy": True}, False),
    "static, views": ({"static_graph": True, "gradient_as_bucket_view": True}, False),
    "find unused": ({"find_unused_parameters": True}, False),
    "find unused, use varies": ({"find_unused_parameters": True}, True),
    "mixed precision": ({"mixed_precision": "bfloat16"}, False),
}
TINY = "4,000 tiny tensors"
# measure -> the units of a step and of a difference, and their number per second or per instruction
UNITS = {
    "time": ("ms", 1e3, "us", 1e6),
    "cpu-time": ("ms", 1e3, "us", 1e6),
    "instructions": ("million", 1e-6, "thousand", 1e-3),
}
CALLGRIND = "valgrind --quiet --tool=callgrind --instr-atstart=no --callgrind-out-file=/dev/null"
DRAWS = 4000  # resamplings of an interval
CONTENDERS = ("DDP, default", "DDP, find unused, use varies", *(f"ddpx, {s}" for s in SETTINGS))


class Side:
    """The ranks of one checkout."""

    def __init__(self, root: Path, world_size: int, measure: str, arguments: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {**os.environ, "PYTHONPATH": str(root), "MASTER_PORT": str(port)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        environment |= {"DDPX_FORCE_COMM": "1"}
        command = CALLGRIND.split() if measure == "instructions" else []
        command += [sys.executable, __file__, "--worker", str(root), *arguments]
        self._ranks = [
            subprocess.Popen(
                command,
                env={**environment, "RANK": str(rank), "WORLD_SIZE": str(world_size)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]
        self._answers()

    def cost_of_step(self, contender: str) -> float:
        for rank in self._ranks:
            assert rank.stdin is not None
            print(contender, file=rank.stdin, flush=True)
        return max(map(float, self._answers()))

    def close(self) -> None:
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self._ranks:
            rank.wait(timeout=60)

    def _answers(self) -> list[str]:
        return [line for rank in self._ranks if rank.stdout and (line := rank.stdout.readline())]


@contextmanager
def sides(
    other: Path, world_size: int, measure: str, arguments: list[str]
) -> Iterator[dict[str, Side]]:
    made: dict[str, Side] = {}
    try:
        for name, root in zip(SIDES, (other, other, ROOT), strict=True):
            made[name] = Side(root, world_size, measure, arguments)
        yield made
    finally:
        for side in made.values():
            side.close()


def compare(
    started: dict[str, Side], contenders: Sequence[str], rounds: int, order: random.Random
) -> dict[str, list[tuple[float, ...]]]:
    """The costs of a step in each round, by contender, for each side."""
    costs: dict[str, list[list[float]]] = {contender: [] for contender in contenders}
    for number in range(rounds + 1):  # the first round warms up
        for contender in order.sample(contenders, len(contenders)):
            names = order.sample(SIDES, len(SIDES))
            found = {name: started[name].cost_of_step(contender) for name in names}
            if number > 0:
                costs[contender].append([found[name] for name in SIDES])
    return {contender: list(zip(*rows, strict=True)) for contender, rows in costs.items()}


def trimmed_mean(values: Iterable[float]) -> float:
    """The mean without the lowest and the highest twentieth."""
    ordered = sorted(values)
    cut = len(ordered) // 20
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def mean_and_interval(ratios: Sequence[float]) -> list[float | str]:
    """The mean, and its 95 % interval by resampling."""
    draw = random.Random(0)
    means = sorted(trimmed_mean(draw.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    return [trimmed_mean(ratios), f"{means[DRAWS // 40]:.3f} - {means[-DRAWS // 40]:.3f}"]


def table_of(costs: dict[str, list[list[float]]], measure: str) -> str:
    unit, per, small_unit, small_per = UNITS[measure]
    rows: list[list[object]] = []
    for contender, starts in costs.items():
        before, _, after = map(trimmed_mean, zip(*starts, strict=True))
        ratio = mean_and_interval([2 * a / (b + again) for b, again, a in starts])
        noise = mean_and_interval([again / b for b, again, _ in starts])
        more = small_per * trimmed_mean(a - (b + again) / 2 for b, again, a in starts)
        rows.append([contender, per * before, per * after, *ratio, *noise, more])
    headers = ["contender", f"before, {unit}", f"after, {unit}"]
    headers += ["ratio", "95 %", "A/A", "95 %", f"more, {small_unit}"]
    formats = ("", ".2f", ".2f", ".3f", "", ".3f", "", ".0f")
    return tabulate(rows, headers, tablefmt="github", floatfmt=formats, disable_numparse=[4, 6])


# ---- a rank --------------------------------------------------------------------------------------


def _work(root: Path, model: str, num_steps: int, clock: Callable[[], float]) -> None:
    import torch
    import torch.distributed as dist

    import ddpx

    assert Path(str(ddpx.__file__)).is_relative_to(root), ddpx.__file__
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    make_step = functools.cache(functools.partial(_step, model=model))
    print("ready", flush=True)
    for line in sys.stdin:
        step = make_step(line.strip())
        dist.barrier()
        start = clock()
        for number in range(num_steps):
            step(number)
        print((clock() - start) / num_steps, flush=True)
    dist.destroy_process_group()


def _callgrind(action: str) -> str:
    command = ["callgrind_control", action, str(os.getpid())]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@functools.cache
def _start_counting() -> None:
    _callgrind("--instr=on")


def _instructions() -> float:
    """The number of instructions of the first thread since the first call."""
    _start_counting()
    counts = re.search(r"Th 1 +([\d,]+)", _callgrind("-e"))
    assert counts is not None
    return float(counts[1].replace(",", ""))


CLOCKS: dict[str, Callable[[], float]] = {
    "time": time.perf_counter,
    "cpu-time": time.thread_time,
    "instructions": _instructions,
}


def _step(contender: str, model: str) -> Callable[[int], None]:
    import torch
    import torch.distributed as dist
    from models import MODELS, joined
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.nn.parallel.distributed import _MixedPrecision

    from ddpx import ReducerDDP

    name, _, setting = contender.partition(", ")
    options, varies = SETTINGS[setting]
    if "mixed_precision" in options:
        options = {**options, "mixed_precision": _MixedPrecision(torch.bfloat16)}

    class WithOption(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.x = joined(4000) if model == TINY else MODELS[model]()
            self.optional = nn.Linear(self.x.shape[-1], self.x.shape[-1])

        def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
            return self.body(x + self.optional(x) if use else x)

    torch.manual_seed(0)
    module = WithOption()
    wrapped = (DistributedDataParallel if name == "DDP" else ReducerDDP)(module, **options)

    def step(number: int) -> None:
        wrapped.zero_grad()
        use = not varies or (number + dist.get_rank()) % 2 == 0
        wrapped(module.x, use).float().sum().backward()

    for number in range(3):  # buckets are rebuilt after the first step
        step(number)
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("other", nargs="?", type=Path, help="the other checkout, built")
    parser.add_argument(
        "--model", default="1,000 small tensors", help=f"{TINY}, or one of benchmarks/models.py"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--starts", type=int, default=3, help="how often ranks are started")
    parser.add_argument("--rounds", type=int, default=15, help="rounds per start")
    parser.add_argument("--steps", type=int, default=3, help="steps per round")
    parser.add_argument(
        "--contender", dest="contenders", action="append", choices=CONTENDERS, help="default: all"
    )
    parser.add_argument(
        "--measure", default="time", choices=UNITS, help="default: time, by the clock on the wall"
    )
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        _work(arguments.worker, arguments.model, arguments.steps, CLOCKS[arguments.measure])
        return
    if arguments.other is None:
        parser.error("which checkout is the one from before?")
    if arguments.measure == "instructions" and shutil.which("valgrind") is None:
        parser.error("--measure instructions needs valgrind (Debian package valgrind)")
    for_ranks = ["--model", arguments.model, "--steps", str(arguments.steps)]
    for_ranks += ["--measure", arguments.measure]
    order = random.Random(0)
    contenders = arguments.contenders or CONTENDERS
    costs: dict[str, list[list[float]]] = {contender: [] for contender in contenders}
    for _ in range(arguments.starts):
        with sides(
            arguments.other.resolve(), arguments.ranks, arguments.measure, for_ranks
        ) as started:
            found = compare(started, contenders, arguments.rounds, order)
        for contender, per_side in found.items():
            costs[contender].append([trimmed_mean(side) for side in per_side])
    print(
        f"{arguments.model}, {arguments.ranks} ranks, {arguments.starts} starts of "
        f"{arguments.rounds} rounds"
    )
    print(table_of(costs, arguments.measure))


if __name__ == "__main__":
    main()
