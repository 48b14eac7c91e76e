"""Replace an old pattern: several ``device_ids`` in one process.

Early versions of DistributedDataParallel could use several GPUs from one process. This is no longer
possible: each process uses one device, and more devices need more processes. The old call raises a
ValueError. This script shows the message, then the replacement.

    python examples/several_device_ids.py --world-size 2
"""

import argparse
import tempfile
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _common import device_ids_for, expect, pick_device, positive_int, process_group, ranks_agree
from torch import nn

from ddpx import ReducerDDP


def try_old_pattern(module: nn.Module) -> str:
    """Wrap a module for two devices at once, and return the resulting error message."""
    try:
        ReducerDDP(module, device_ids=[0, 1])
    except ValueError as error:
        return str(error)
    raise RuntimeError("FAILED: ReducerDDP accepted several device_ids")


def replace_old_pattern(rank: int, device: torch.device) -> None:
    """Show the error on every rank, then wrap the module for this rank's one device."""
    torch.manual_seed(rank)
    module = nn.Linear(4, 1).to(device)

    message = try_old_pattern(module)
    if rank == 0:
        print(f"device_ids=[0, 1] raises ValueError: {message}", flush=True)

    # The fix: one process per device, with device_ids=[local rank] on a GPU, and None on the CPU.
    device_ids = device_ids_for(device)
    model = ReducerDDP(module, device_ids=device_ids)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(8, 4, device=device)).square().mean().backward()
    optimizer.step()

    expect(ranks_agree(model), "ranks hold different weights")
    if rank == 0:
        print(
            f"OK: {dist.get_world_size()} processes agree, rank 0 with device_ids={device_ids}",
            flush=True,
        )


def run(rank: int, world_size: int, folder: str) -> None:
    """Run one rank. ``mp.spawn`` passes the rank as the first argument."""
    device = pick_device(rank, world_size)
    init_method = f"file://{folder}/rendezvous"
    with process_group(device, init_method=init_method, rank=rank, world_size=world_size):
        replace_old_pattern(rank, device)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="what replaces several device_ids a process")
    parser.add_argument("--world-size", type=positive_int, default=2, help="processes to start")
    return parser.parse_args(argv)


def main() -> None:
    """Start one process per rank."""
    args = parse_args()
    with tempfile.TemporaryDirectory() as folder:  # has the rendezvous file
        mp.spawn(run, args=(args.world_size, folder), nprocs=args.world_size)


if __name__ == "__main__":
    main()
