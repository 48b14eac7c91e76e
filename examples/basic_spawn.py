"""Train a toy model in processes that ``mp.spawn`` starts: the smallest complete example.

Each rank builds its own model from its own seed, draws its own data and computes its own gradients.
ReducerDDP makes the initial weights equal by broadcasting rank 0's. It keeps them equal by
averaging the gradients during ``backward``.

    python examples/basic_spawn.py --world-size 2
"""

import argparse
import os
import socket
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _common import (
    backend_for,
    device_ids_for,
    expect,
    mean_over_ranks,
    pick_device,
    positive_int,
    ranks_agree,
)
from torch import nn

from ddpx import ReducerDDP


class ToyModel(nn.Module):
    """A two-layer network from 8 inputs to 1 output."""

    def __init__(self) -> None:
        """Create both layers."""
        super().__init__()
        self.hidden = nn.Linear(8, 16)
        self.output = nn.Linear(16, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return one prediction for each row of inputs."""
        return self.output(torch.tanh(self.hidden(inputs)))


def setup(rank: int, world_size: int, port: int) -> torch.device:
    """Join the process group and return the device of this rank."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    device = pick_device(rank, world_size)
    dist.init_process_group(backend_for(device), rank=rank, world_size=world_size)
    return device


def cleanup() -> None:
    """Leave the process group."""
    dist.destroy_process_group()


def train(rank: int, world_size: int, device: torch.device, steps: int) -> None:
    """Train on this rank's batches, then check the results."""
    torch.manual_seed(rank)  # every rank has other initial weights and other data
    model = ReducerDDP(ToyModel().to(device), device_ids=device_ids_for(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    losses = []
    for _ in range(steps):
        inputs = torch.randn(32, 8, device=device)
        targets = inputs.mean(dim=1, keepdim=True)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()  # averages the gradients over all ranks
        optimizer.step()
        losses.append(mean_over_ranks(loss))

    expect(ranks_agree(model), "ranks hold different weights")
    expect(losses[-1] < losses[0], f"loss did not fall: {losses[0]:.4f} -> {losses[-1]:.4f}")
    if rank == 0:
        print(
            f"OK: {world_size} ranks on {device.type} agree after {steps} steps, "
            f"loss {losses[0]:.4f} -> {losses[-1]:.4f}",
            flush=True,
        )


def run(rank: int, world_size: int, port: int, steps: int) -> None:
    """Run one rank. ``mp.spawn`` passes the rank as the first argument."""
    device = setup(rank, world_size, port)
    try:
        train(rank, world_size, device, steps)
    finally:
        cleanup()


def find_free_port() -> int:
    """Return a free port, at which the ranks meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="mp.spawn training of a toy model")
    parser.add_argument("--world-size", type=positive_int, default=2, help="processes to start")
    parser.add_argument("--steps", type=positive_int, default=30, help="optimizer steps")
    return parser.parse_args(argv)


def main() -> None:
    """Start one process per rank and wait for all of them."""
    args = parse_args()
    # The port is chosen once, here. Ranks that chose their own ports would not meet.
    mp.spawn(run, args=(args.world_size, find_free_port(), args.steps), nprocs=args.world_size)


if __name__ == "__main__":
    main()
