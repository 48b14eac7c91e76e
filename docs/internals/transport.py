"""The same all-reduce over gloo and over shared memory, on three ranks: bits and time."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from ddpx import ShmOptions
from ddpx.testing import RankPool

ELEMENTS = 1 << 20  # 4 MiB
ROUNDS = 10


def reduced(group: dist.ProcessGroup, numel: int) -> tuple[torch.Tensor, float]:
    """The sum of random numbers, and the median time of an all-reduce in ms."""
    torch.manual_seed(dist.get_rank(group))
    values = torch.randn(ELEMENTS)[:numel]
    times = []
    for _ in range(ROUNDS):
        total = values.clone()
        dist.barrier(group)
        begin = time.perf_counter()
        dist.all_reduce(total, group=group)
        times.append((time.perf_counter() - begin) * 1e3)
    return total, sorted(times)[ROUNDS // 2]


def compare() -> list[str]:
    groups = {
        "gloo": dist.new_group(backend="gloo"),
        "shm": dist.new_group(backend="shm"),
        "shm, fixed order": dist.new_group(backend="shm", pg_options=ShmOptions(order="fixed")),
    }
    expected, _ = reduced(groups["gloo"], ELEMENTS)
    lines = []
    for name, group in groups.items():
        total, ms = reduced(group, ELEMENTS)
        half, _ = reduced(group, ELEMENTS // 2)
        same_as_gloo = torch.equal(total, expected)
        any_size = torch.equal(total[: ELEMENTS // 2], half)
        lines.append(f"{name:<18}gloo's bits: {same_as_gloo!s:<6}")
        lines[-1] += f"whatever the buffer's size: {any_size!s:<6}{ms:.2f} ms"
    return lines


if __name__ == "__main__":
    with RankPool(3) as ranks:
        print("\n".join(ranks.run(compare)[0]))
