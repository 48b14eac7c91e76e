"""Fit y = x under torchrun, with a DistributedSampler and a checkpoint to resume from.

torchrun starts the processes and gives each its rank through the environment. It also restarts them
after a failure. A script that resumes from its checkpoint then loses at most one epoch. Run the
command twice, the second time with more epochs, to see it resume.

    torchrun --standalone --nproc-per-node=2 examples/torchrun_sampler.py --checkpoint line.pt
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _common import (
    device_ids_for,
    expect,
    path_in_folder,
    pick_device,
    positive_int,
    process_group,
    ranks_agree,
    torchrun_local_ranks,
)
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ddpx import ReducerDDP


class Line(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points of y = x, evenly spaced over [-1, 1]."""

    def __init__(self, points: int) -> None:
        """Create the points."""
        self.x = torch.linspace(-1, 1, points).unsqueeze(1)

    def __len__(self) -> int:
        """Return the number of points."""
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one point as (input, target)."""
        return self.x[index], self.x[index]


def save(path: Path, model: ReducerDDP, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Write the checkpoint atomically, so that a crash cannot leave half a file."""
    unfinished = path.with_name(path.name + ".tmp")
    state = {
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epochs_done": epoch + 1,
    }
    torch.save(state, unfinished)
    os.replace(unfinished, path)


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Train from the checkpoint, or from the start, up to ``args.epochs``."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    module = nn.Linear(1, 1).to(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.5)

    first_epoch = 0
    if args.checkpoint.exists():
        state = torch.load(args.checkpoint, map_location=device, weights_only=True)
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epochs_done"]
        if rank == 0:
            print(f"resumed at epoch {first_epoch} from {args.checkpoint}", flush=True)

    model = ReducerDDP(module, device_ids=device_ids_for(device))
    data = Line(64)
    sampler: DistributedSampler[Any] = DistributedSampler(data)  # a shuffled share for each rank
    loader = DataLoader(data, batch_size=8, sampler=sampler)

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)  # otherwise every epoch would have the same order
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
        if rank == 0:
            points = " ".join(str(index) for index in list(sampler)[:6])
            print(f"epoch {epoch}: loss {loss.item():.6f}, rank 0 began with points {points}")
            # No rank can still be reading the old file, since `backward` has waited for all of
            # them.
            save(args.checkpoint, model, optimizer, epoch)

    slope, intercept = module.weight.item(), module.bias.item()
    expect(ranks_agree(model), "ranks hold different weights")
    expect(abs(slope - 1) < 0.05 and abs(intercept) < 0.05, f"fitted {slope}x + {intercept}")
    if rank == 0:
        print(
            f"OK: {world_size} ranks on {device.type} agree on y = {slope:.3f}x + "
            f"{intercept:.3f} after {max(first_epoch, args.epochs)} epochs",
            flush=True,
        )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="fit y = x under torchrun")
    parser.add_argument(
        "--checkpoint",
        type=path_in_folder,
        required=True,
        help="file to save to each epoch, and to resume from if it exists",
    )
    parser.add_argument(
        "--epochs", type=positive_int, default=6, help="epochs in all, resumed ones included"
    )
    return parser.parse_args(argv)


def main() -> None:
    """Join the group of torchrun's ranks, and train."""
    args = parse_args()
    device = pick_device(*torchrun_local_ranks())
    with process_group(device):
        train(args, device)


if __name__ == "__main__":
    main()
