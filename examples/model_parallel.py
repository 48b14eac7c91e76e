"""Wrap a module that itself spans two devices.

Each rank has two devices and keeps half of the model on each (model parallelism). ReducerDDP
averages the gradients between the ranks (data parallelism). Such a module moves its own data, so
``device_ids`` must stay unset. With fewer than two GPUs per rank, both "devices" are the CPU.

    python examples/model_parallel.py --world-size 2
"""

import argparse
import tempfile
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _common import (
    expect,
    mean_over_ranks,
    positive_int,
    process_group,
    ranks_agree,
)
from torch import nn

from ddpx import ReducerDDP


class TwoDeviceModel(nn.Module):
    """A network with its first layer on one device and its second layer on another."""

    def __init__(self, first: torch.device, second: torch.device) -> None:
        """Put one layer on each device."""
        super().__init__()
        self.first, self.second = first, second
        self.encoder = nn.Linear(10, 20).to(first)
        self.decoder = nn.Linear(20, 2).to(second)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Run the inputs through both devices. The result is on the second."""
        hidden = torch.relu(self.encoder(inputs.to(self.first)))
        return self.decoder(hidden.to(self.second))


def pick_device_pair(rank: int, world_size: int) -> tuple[torch.device, torch.device]:
    """Return two GPUs of this rank's own if every rank can have two, else the CPU twice."""
    if torch.cuda.device_count() >= 2 * world_size:
        torch.cuda.set_device(2 * rank)
        return torch.device("cuda", 2 * rank), torch.device("cuda", 2 * rank + 1)
    cpu = torch.device("cpu")
    torch.set_num_threads(1)
    return cpu, cpu


def train(rank: int, first: torch.device, second: torch.device, steps: int) -> None:
    """Train this rank's copy of the two-device model, then compare it with those of other ranks."""
    torch.manual_seed(rank)
    # no device_ids: the module moves its data itself
    model = ReducerDDP(TwoDeviceModel(first, second))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    losses = []
    for _ in range(steps):
        inputs = torch.randn(32, 10)
        outputs = model(inputs)
        # the loss is computed on the device of the outputs
        targets = inputs[:, :2].to(outputs.device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(outputs, targets)
        loss.backward()
        optimizer.step()
        losses.append(mean_over_ranks(loss))

    expect(outputs.device == second, f"outputs are on {outputs.device}, not on {second}")
    expect(ranks_agree(model), "ranks hold different weights")
    expect(losses[-1] < losses[0], f"loss did not fall: {losses[0]:.4f} -> {losses[-1]:.4f}")
    if rank == 0:
        print(
            f"OK: {dist.get_world_size()} ranks of a two-device model agree, "
            f"loss {losses[0]:.4f} -> {losses[-1]:.4f}",
            flush=True,
        )


def run(rank: int, world_size: int, folder: str, steps: int) -> None:
    """Run one rank. ``mp.spawn`` passes the rank as the first argument."""
    first, second = pick_device_pair(rank, world_size)
    if rank == 0:
        note = "" if first != second else " (no two GPUs a rank here: both halves are on the cpu)"
        print(f"rank 0: encoder on {first}, decoder on {second}{note}", flush=True)
    init_method = f"file://{folder}/rendezvous"
    with process_group(first, init_method=init_method, rank=rank, world_size=world_size):
        train(rank, first, second, steps)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="data parallelism over a two-device model")
    parser.add_argument("--world-size", type=positive_int, default=2, help="processes to start")
    parser.add_argument("--steps", type=positive_int, default=30, help="optimizer steps")
    return parser.parse_args(argv)


def main() -> None:
    """Start one process per rank."""
    args = parse_args()
    with tempfile.TemporaryDirectory() as folder:  # has the rendezvous file
        mp.spawn(run, args=(args.world_size, folder, args.steps), nprocs=args.world_size)


if __name__ == "__main__":
    main()
