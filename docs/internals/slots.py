"""Shows where gradients lie with gradient_as_bucket_view=True: side by side in flat buffers."""

from __future__ import annotations

import torch
from torch import nn

from ddpx import ReducerDDP
from ddpx.testing import RankPool


def slots() -> list[str]:
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model = ReducerDDP(module, gradient_as_bucket_view=True)
    for _ in range(2):  # the second step has its buckets in order of arrival
        model(torch.ones(2, 3)).sum().backward()
    names = [name for name, _ in module.named_parameters()]
    params = list(module.parameters())
    lines = []
    for index, members in enumerate(model.reducer.plan.buckets):
        grads = {names[i]: params[i].grad for i in members}
        memory = {grad.untyped_storage().data_ptr() for grad in grads.values()}
        lines.append(f"bucket {index}: {len(grads)} gradients in {len(memory)} piece of memory")
        for name, grad in grads.items():
            shape = "x".join(map(str, grad.shape))
            lines.append(f"  {name:<9}offset {grad.storage_offset()}, {shape}")
    return lines


if __name__ == "__main__":
    with RankPool(2) as ranks:
        print("\n".join(ranks.run(slots)[0]))
