"""Gradients arrive in another order on rank 1, but buckets are launched in plan order."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from ddpx import _C, ReducerDDP
from ddpx.testing import RankPool

SHOWN = {
    int(_C.EventKind.BUCKET_READY): "ready",
    int(_C.EventKind.LAUNCHED): "launched",
}


class Branches(nn.Module):
    """Autograd runs the node first that was computed last. Rank 1 computes b before a."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 64, bias=False)
        self.b = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 0:
            return self.a(x) + self.b(x)
        from_b = self.b(x)
        return self.a(x) + from_b


def ready_and_launched() -> str:
    model = ReducerDDP(Branches(), bucket_cap_mb=0.001)
    for _ in range(2):
        model(torch.randn(4, 64)).sum().backward()
    recording = _C.Recording(1024, torch.device("cpu"))
    model.reducer.add_recording(recording)
    model(torch.randn(4, 64)).sum().backward()
    events = [(kind, index) for _, _, kind, index in recording.events().tolist()]
    return ", ".join(f"{SHOWN[kind]} {index}" for kind, index in events if kind in SHOWN)


if __name__ == "__main__":
    with RankPool(2) as ranks:
        for rank, text in enumerate(ranks.run(ready_and_launched)):
            print(f"rank {rank}: {text}")
