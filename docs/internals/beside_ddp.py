"""Compares buckets and bits of torch's DDP and ReducerDDP, in the same three processes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP
from ddpx.testing import RankPool, compare_with_ddp


def build() -> nn.Module:
    return nn.Sequential(*(nn.Linear(300, 300) for _ in range(6)))


def train(model: nn.Module, number: int) -> None:
    model(torch.randn(8, 300)).square().mean().backward()


def buckets(wrapper: type[nn.Module]) -> str:
    model = wrapper(build(), bucket_cap_mb=0.5)
    for number in range(12):  # 12 steps: DDP samples the first ten, then every 100th
        train(model, number)
    data = model._get_ddp_logging_data()
    return f"first {data['bucket_sizes']}, rebuilt {data['rebuilt_bucket_sizes']}"


def compare() -> list[str]:
    comparison = compare_with_ddp(build, train, bucket_cap_mb=0.5)
    return [
        f"DDP, bytes of buckets:         {buckets(DistributedDataParallel)}",
        f"ReducerDDP, bytes of buckets:  {buckets(ReducerDDP)}",
        f"{comparison.num_tensors} tensors compared, {len(comparison.differences)} differ",
    ]


if __name__ == "__main__":
    with RankPool(3) as ranks:
        print("\n".join(ranks.run(compare)[0]))
