"""Logs two steps of the reference reducer on three ranks, and compares its bits with DDP's."""

from __future__ import annotations

import torch
from reference_reducer import ReferenceDDP
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx.testing import RankPool, compare_traces, record_training


class LoggedDDP(ReferenceDDP):
    """Keeps a line for each gradient that is packed, and for each bucket that is launched."""

    def __init__(self, module: nn.Module, cap_mb: float) -> None:
        super().__init__(module, cap_mb)
        self.names = [name for name, _ in module.named_parameters()]
        self.lines: list[str] = []

    def _pack(self, index: int) -> None:
        num_before = len(self.works)
        super()._pack(index)
        self.lines.append(f"packed    {self.names[index]}")
        self.lines += [f"launched  bucket {b}" for b in range(num_before, len(self.works))]

    def _on_backward_end(self) -> None:
        self.lines.append("backward has ended")
        super()._on_backward_end()


def log_step() -> list[str]:
    model = LoggedDDP(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), cap_mb=0.02)
    for number in range(2):
        model.lines.append(f"step {number}, buckets {model.plan}")
        model(torch.randn(8, 64)).square().mean().backward()
    return model.lines


def compare() -> str:
    def train(model: nn.Module, number: int) -> None:
        model(torch.randn(8, 300)).square().mean().backward()

    traces = [
        record_training(
            lambda: nn.Sequential(*(nn.Linear(300, 300) for _ in range(6))),
            lambda module, wrapper=wrapper: wrapper(module, bucket_cap_mb=0.5),
            train,
        )
        for wrapper in (DistributedDataParallel, ReferenceDDP)
    ]
    comparison = compare_traces(*traces)
    return f"{comparison.num_tensors} tensors compared, {len(comparison.differences)} differ"


if __name__ == "__main__":
    with RankPool(3) as ranks:
        print("\n".join(ranks.run(log_step)[0]))
        print(ranks.run(compare)[0])
