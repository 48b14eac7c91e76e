"""Shows that all-reduces in different orders sum different tensors, without an error."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ddpx.testing import RankPool


def sums(in_order: bool) -> str:
    rank = dist.get_rank()
    a = torch.full((4,), 1.0 + rank)  # 1 on rank 0, 2 on rank 1: the sum is 3
    b = torch.full((4,), 10.0 + 10 * rank)  # 10 and 20: the sum is 30
    order = [a, b] if in_order or rank == 0 else [b, a]
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in order]:
        work.wait()
    return f"a = {a[0]:g}, b = {b[0]:g}"


if __name__ == "__main__":
    with RankPool(2) as ranks:
        for in_order in (True, False):
            print("same order on both ranks" if in_order else "rank 1 sends b first")
            for rank, text in enumerate(ranks.run(sums, in_order)):
                print(f"  rank {rank}: {text}")
