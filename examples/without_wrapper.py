"""Average gradients of a module without a wrapper: ``ddpx.replicate``.

The model computes its loss in a method of its own, and is saved, copied and inspected as it is.
With a wrapper, each of these would need ``model.module``.

    python examples/without_wrapper.py --world-size 2
"""

import argparse
import copy
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.multiprocessing as mp
from _common import device_ids_for, expect, pick_device, positive_int, process_group, ranks_agree
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ddpx

MICRO_STEPS = 2


class Autoencoder(nn.Module):
    """A small model with a method for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 3)
        self.decoder = nn.Linear(3, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the reconstruction of ``x``."""
        return self.decoder(torch.tanh(self.encoder(x)))

    def reconstruction_loss(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss. The method calls layers, and not ``forward``."""
        return nn.functional.mse_loss(self.decoder(torch.tanh(self.encoder(x))), x)


def train(rank: int, device: torch.device, steps: int) -> None:
    """Train this rank with its own batches."""
    torch.manual_seed(rank)  # ranks begin with different weights, and rank 0's count
    model = ddpx.replicate(Autoencoder().to(device), device_ids=device_ids_for(device))
    expect(type(model) is Autoencoder, "the class has changed")
    expect("encoder.weight" in model.state_dict(), "names have a prefix")
    average = AveragedModel(model)  # a plain copy, whose gradients are not averaged
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        for micro_step in range(MICRO_STEPS):
            is_last = micro_step == MICRO_STEPS - 1
            with nullcontext() if is_last else ddpx.no_sync(model):
                loss = model.reconstruction_loss(torch.randn(16, 8, device=device))
                (loss / MICRO_STEPS).backward()
        optimizer.step()
        average.update_parameters(model)
        losses.append(loss.item())
    expect(ranks_agree(model), "ranks hold different weights")
    expect(ranks_agree(average), "ranks hold different averages of weights")
    expect(sum(losses[-10:]) < sum(losses[:10]), f"the loss did not fall: {losses}")
    expect(type(copy.deepcopy(model)) is Autoencoder, "a copy has another class")
    if rank == 0:
        print(f"OK: a plain module on {device.type}, averaged over all ranks", flush=True)


def run(rank: int, world_size: int, folder: str, steps: int) -> None:
    """Run one rank. ``mp.spawn`` passes the rank as the first argument."""
    device = pick_device(rank, world_size)
    init_method = f"file://{folder}/rendezvous"
    with process_group(device, init_method=init_method, rank=rank, world_size=world_size):
        train(rank, device, steps)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="average gradients without a wrapper")
    parser.add_argument("--world-size", type=positive_int, default=2, help="processes to start")
    parser.add_argument("--steps", type=positive_int, default=60, help="optimizer steps")
    return parser.parse_args(argv)


def main() -> None:
    """Start one process per rank."""
    args = parse_args()
    with tempfile.TemporaryDirectory() as folder:  # has the rendezvous file
        mp.spawn(run, args=(args.world_size, folder, args.steps), nprocs=args.world_size)


if __name__ == "__main__":
    main()
