"""Save on rank 0, load on every rank, and continue the training.

The script trains once without a break, and saves a checkpoint half way. Then it starts again from
other weights, loads the checkpoint and trains the second half. Both trainings must end with the
same weights.

    python examples/checkpoint.py --world-size 2
"""

import argparse
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _common import (
    device_ids_for,
    expect,
    pick_device,
    positive_int,
    process_group,
    ranks_agree,
)
from torch import nn
from torch.nn.utils import parameters_to_vector

from ddpx import ReducerDDP


def build(seed: int, device: torch.device) -> tuple[ReducerDDP, torch.optim.Optimizer]:
    """Return a new wrapped model and its optimizer."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1)).to(device)
    model = ReducerDDP(module, device_ids=device_ids_for(device))
    # Adam has a state of its own, so a missing restore of the optimizer would show.
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train(
    model: ReducerDDP,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int],
    rank: int,
    device: torch.device,
) -> None:
    """Train for the given steps. The data depends only on rank and step number."""
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * rank + step)
        inputs = torch.randn(16, 6, generator=generator).to(device)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), inputs[:, :1]).backward()
        optimizer.step()


def save(
    path: Path,
    model: ReducerDDP,
    optimizer: torch.optim.Optimizer,
    rank: int,
    device: torch.device,
) -> None:
    """Write the checkpoint on rank 0. On return every rank can read it."""
    if rank == 0:  # all ranks hold the same weights, so one copy is enough
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    # No rank may read the file before rank 0 has finished writing it.
    dist.barrier(device_ids=device_ids_for(device))


def load(
    path: Path, model: ReducerDDP, optimizer: torch.optim.Optimizer, device: torch.device
) -> None:
    """Read the checkpoint on every rank."""
    # The tensors were saved from rank 0's device. map_location puts them on this rank's device.
    state = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def compare(rank: int, device: torch.device, path: Path, steps: int) -> None:
    """Train without a break, train again from the checkpoint, and compare the weights."""
    first_half, second_half = range(steps), range(steps, 2 * steps)

    unbroken, optimizer = build(seed=1, device=device)
    train(unbroken, optimizer, first_half, rank, device)
    save(path, unbroken, optimizer, rank, device)
    train(unbroken, optimizer, second_half, rank, device)

    resumed, optimizer = build(seed=2, device=device)
    load(path, resumed, optimizer, device)
    train(resumed, optimizer, second_half, rank, device)

    expect(ranks_agree(resumed), "ranks hold different weights after loading")
    unbroken_weights = parameters_to_vector(unbroken.parameters())
    resumed_weights = parameters_to_vector(resumed.parameters())
    difference = (resumed_weights - unbroken_weights).abs().max().item()
    expect(difference < 1e-6, f"resumed training ended {difference:.2e} away")
    if rank == 0:
        print(
            f"OK: {dist.get_world_size()} ranks on {device.type} resumed after step {steps} and "
            f"agree with unbroken training (largest difference {difference:.1e})",
            flush=True,
        )


def run(rank: int, world_size: int, folder: str, steps: int) -> None:
    """Run one rank. ``mp.spawn`` passes the rank as the first argument."""
    device = pick_device(rank, world_size)
    init_method = f"file://{folder}/rendezvous"
    with process_group(device, init_method=init_method, rank=rank, world_size=world_size):
        compare(rank, device, Path(folder, "checkpoint.pt"), steps)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="checkpoint on rank 0, load on every rank")
    parser.add_argument("--world-size", type=positive_int, default=2, help="processes to start")
    parser.add_argument(
        "--steps", type=positive_int, default=10, help="steps before, and after, the checkpoint"
    )
    return parser.parse_args(argv)


def main() -> None:
    """Start one process per rank, with a folder for the rendezvous file and the checkpoint."""
    args = parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(args.world_size, folder, args.steps), nprocs=args.world_size)


if __name__ == "__main__":
    main()
