"""Shows the phases of a reducer whose backward raises, and that the next step works."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from ddpx import _C, ReducerDDP
from ddpx.testing import RankPool

PHASE = int(_C.EventKind.PHASE)
PHASES = {int(phase): phase.name for phase in _C.Phase.__members__.values()}


def explode(grad: torch.Tensor) -> None:
    raise ValueError("boom")


class Fragile(nn.Module):
    """Two layers. A hook raises after the backward of the last layer, or after all gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, raise_at: str | None) -> torch.Tensor:
        start = torch.ones(2, 4, requires_grad=True)
        middle = self.first(2 * start)
        if raise_at is not None:
            {"start": start, "middle": middle}[raise_at].register_hook(explode)
        return self.second(middle)


def steps() -> list[str]:
    model, lines = ReducerDDP(Fragile(), bucket_cap_mb=0), []
    recording = _C.Recording(4096, torch.device("cpu"))
    model.reducer.add_recording(recording)

    def step(what: str, raise_at: str | None = None) -> None:
        before = recording.num_added
        try:
            model(raise_at).sum().backward()
            outcome = "fine"
        except ValueError as error:
            outcome = str(error)
        phases = [PHASES[i] for _, _, k, i in recording.events().tolist()[before:] if k == PHASE]
        lines.append(f"{what:<30}{outcome:<6}{' '.join(phases)}")

    step("first")
    step("second")
    step("both raise in the middle", "middle")
    step("next")
    step("rank 1 raises at the end", "start" if dist.get_rank() == 1 else None)
    step("next")
    return lines


if __name__ == "__main__":
    with RankPool(2) as ranks:
        for rank, lines in enumerate(ranks.run(steps)):
            print(f"rank {rank}", *lines, sep="\n  ")
