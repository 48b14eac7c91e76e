"""Split the optimizer state over the ranks with ZeroRedundancyOptimizer.

With a plain optimizer every rank keeps the whole state (Adam: two numbers per parameter).
ZeroRedundancyOptimizer lets each rank keep and update one share, then broadcasts the new weights.
ReducerDDP averages the gradients, as always. Both trainings must end with the same weights.

    python examples/zero_redundancy.py --world-size 2
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _common import device_ids_for, expect, pick_device, positive_int, process_group, ranks_agree
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.utils import parameters_to_vector
from torch.optim import Adam, Optimizer

from ddpx import ReducerDDP

WIDTH = 64
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def state_bytes(optimizer: Optimizer) -> int:
    """Return the size of the optimizer's state tensors on this rank."""
    tensors = [t for state in optimizer.state.values() for t in state.values()]
    return sum(t.numel() * t.element_size() for t in tensors)


def train(
    make_optimizer: Callable[[nn.Module], AnyOptimizer],
    rank: int,
    device: torch.device,
    steps: int,
) -> tuple[ReducerDDP, AnyOptimizer]:
    """Train a new model. Equal arguments give equal initial weights and equal data."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)]
    module = nn.Sequential(*layers).to(device)
    model = ReducerDDP(module, device_ids=device_ids_for(device))
    optimizer = make_optimizer(model)

    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        inputs = torch.randn(16, WIDTH, generator=generator).to(device)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), inputs.relu()).backward()
        optimizer.step()
    return model, optimizer


def make_plain(model: nn.Module) -> Adam:
    """Return an Adam that keeps the state of every parameter."""
    return Adam(model.parameters(), lr=1e-3)


def make_sharded(model: nn.Module) -> ZeroRedundancyOptimizer:
    """Return an Adam that keeps the state of this rank's share of the parameters."""
    return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=Adam, lr=1e-3)


def compare(rank: int, world_size: int, device: torch.device, steps: int) -> None:
    """Train with either optimizer and compare weights and memory."""
    plain_model, plain = train(make_plain, rank, device, steps)
    sharded_model, sharded = train(make_sharded, rank, device, steps)

    plain_bytes = state_bytes(plain)
    # `optim` is the inner optimizer, which holds this rank's share.
    shares = torch.zeros(world_size, dtype=torch.int64, device=device)
    shares[rank] = state_bytes(sharded.optim)
    dist.all_reduce(shares)  # each rank has filled in its own entry
    largest = int(shares.max())
    if rank == 0:
        print(f"plain Adam: {plain_bytes} bytes of optimizer state on every rank")
        for owner, share in enumerate(shares.tolist()):
            print(f"ZeroRedundancyOptimizer: {share} bytes on rank {owner}", flush=True)

    expect(int(shares.sum()) == plain_bytes, "the shares don't add up to the whole state")
    expect(world_size == 1 or largest < plain_bytes, "one rank keeps the whole state")
    expect(ranks_agree(sharded_model), "ranks hold different weights")
    torch.testing.assert_close(
        parameters_to_vector(sharded_model.parameters()),
        parameters_to_vector(plain_model.parameters()),
    )
    if rank == 0:
        print(
            f"OK: same weights as plain Adam on {world_size} ranks, with "
            f"{largest / plain_bytes:.0%} of its state on the fullest rank",
            flush=True,
        )


def run(rank: int, world_size: int, folder: str, steps: int) -> None:
    """Run one rank. ``mp.spawn`` passes the rank as the first argument."""
    device = pick_device(rank, world_size)
    init_method = f"file://{folder}/rendezvous"
    with process_group(device, init_method=init_method, rank=rank, world_size=world_size):
        compare(rank, world_size, device, steps)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="optimizer state split over the ranks")
    parser.add_argument("--world-size", type=positive_int, default=2, help="processes to start")
    parser.add_argument("--steps", type=positive_int, default=10, help="optimizer steps")
    return parser.parse_args(argv)


def main() -> None:
    """Start one process per rank."""
    args = parse_args()
    with tempfile.TemporaryDirectory() as folder:  # has the rendezvous file
        mp.spawn(run, args=(args.world_size, folder, args.steps), nprocs=args.world_size)


if __name__ == "__main__":
    main()
