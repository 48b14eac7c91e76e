"""Run one job with torch.nn.DataParallel and with ReducerDDP, and compare the weights.

DataParallel is one process. In each step it copies the model to every GPU, splits the batch, and
collects the gradients on the first GPU. ReducerDDP uses one process per GPU. Each process keeps its
own copy of the model and its own slice of the batch, and sends only gradients. The mean of the
gradients of equal slices is the gradient of the whole batch, so both must end with the same
weights.

    python examples/data_parallel_comparison.py --world-size 2
"""

import argparse
import tempfile
from collections.abc import Sequence

import torch
import torch.multiprocessing as mp
from _common import device_ids_for, expect, pick_device, positive_int, process_group, ranks_agree
from torch import nn
from torch.nn.utils import parameters_to_vector

from ddpx import ReducerDDP

SAMPLES_PER_RANK = 16
TOLERANCE = 1e-4  # both add the same numbers in a different order


def build_module() -> nn.Module:
    """Return the model, with the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 3))


def make_batch(step: int, world_size: int) -> torch.Tensor:
    """Return the global batch of a step, the same in every process."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES_PER_RANK * world_size, 12, generator=generator)


def train_step(model: nn.Module, inputs: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Make one optimizer step. This part of a script is the same for both wrappers."""
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), inputs[:, :3].square()).backward()
    optimizer.step()


def train_data_parallel(world_size: int, steps: int) -> list[float]:
    """Train in this process, on whole batches, and return the weights."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    model = nn.DataParallel(build_module().to(device))
    if len(model.device_ids) > 1:
        print(f"DataParallel: one process on GPUs {model.device_ids}")
    else:
        print(
            f"DataParallel: one process, which runs on {device.type} without a split of the batch"
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        train_step(model, make_batch(step, world_size).to(device), optimizer)
    return parameters_to_vector(model.parameters()).tolist()


def compare(
    rank: int, world_size: int, device: torch.device, steps: int, reference: list[float]
) -> None:
    """Train this rank's slices with ReducerDDP, and compare with DataParallel's weights."""
    model = ReducerDDP(build_module().to(device), device_ids=device_ids_for(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        my_slice = make_batch(step, world_size).chunk(world_size)[rank]
        train_step(model, my_slice.to(device), optimizer)

    expect(ranks_agree(model), "ranks hold different weights")
    weights = parameters_to_vector(model.parameters()).detach().cpu()
    difference = (weights - torch.tensor(reference)).abs().max().item()
    expect(difference < TOLERANCE, f"weights differ from DataParallel's by {difference:.2e}")
    if rank == 0:
        print(f"ReducerDDP: {world_size} processes on {device.type}, one slice each")
        print(
            f"OK: same weights after {steps} steps (largest difference {difference:.1e})",
            flush=True,
        )


def run(rank: int, world_size: int, folder: str, steps: int, reference: list[float]) -> None:
    """Run one rank. ``mp.spawn`` passes the rank as the first argument."""
    device = pick_device(rank, world_size)
    init_method = f"file://{folder}/rendezvous"
    with process_group(device, init_method=init_method, rank=rank, world_size=world_size):
        compare(rank, world_size, device, steps, reference)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="torch.nn.DataParallel beside ReducerDDP")
    parser.add_argument("--world-size", type=positive_int, default=2, help="processes to start")
    parser.add_argument("--steps", type=positive_int, default=20, help="optimizer steps")
    return parser.parse_args(argv)


def main() -> None:
    """Train with DataParallel here, then with ReducerDDP in one process per rank."""
    args = parse_args()
    reference = train_data_parallel(args.world_size, args.steps)
    with tempfile.TemporaryDirectory() as folder:  # has the rendezvous file
        job = (args.world_size, folder, args.steps, reference)
        mp.spawn(run, args=job, nprocs=args.world_size)


if __name__ == "__main__":
    main()
