"""A layer in two reentrant checkpoints: its gradient comes in two parts."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddpx import _C, ReducerDDP
from ddpx.testing import RankPool


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.last = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.shared, x, use_reentrant=True)
        x = checkpoint(self.shared, x, use_reentrant=True)
        return self.last(x)


def parts_and_launches() -> list[str]:
    model = ReducerDDP(Twice(), bucket_cap_mb=0.00001)  # every param in a bucket of its own
    names = [name for name, _ in model.module.named_parameters()]
    recording = _C.Recording(4096, torch.device("cpu"))
    model.reducer.add_recording(recording)
    for _ in range(2):
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    lines = []
    for number in range(2):
        events = [(k, i) for _, s, k, i in recording.events().tolist() if s == number]
        parts = Counter(names[i] for k, i in events if k == int(_C.EventKind.GRAD_ARRIVED))
        kinds = [k for k, _ in events]
        before_end = kinds[: kinds.index(int(_C.EventKind.BACKWARD_END))]
        launches = before_end.count(int(_C.EventKind.LAUNCHED))
        lines.append(f"step {number}: parts {dict(sorted(parts.items()))}")
        lines.append(f"        buckets launched before backward ended: {launches}")
    return lines


if __name__ == "__main__":
    with RankPool(2) as ranks:
        print("\n".join(ranks.run(parts_and_launches)[0]))
