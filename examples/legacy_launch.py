"""Support the older launchers that many tutorials still show.

New scripts should use torchrun. This script shows what an old script has to read. ReducerDDP works
with every kind of launch.

The launcher passes ``--local-rank`` (before PyTorch 2.0: ``--local_rank``) to the script:

    python -m torch.distributed.launch --nproc-per-node=2 examples/legacy_launch.py

With ``--use-env`` it sets LOCAL_RANK instead, as torchrun does:

    python -m torch.distributed.launch --use-env --nproc-per-node=2 examples/legacy_launch.py

Without a launcher, the ranks meet at a file that all of them can access, and that must not exist
beforehand:

    python examples/legacy_launch.py --init-method=file:///tmp/meet --world-size=2 --rank=0 &
    python examples/legacy_launch.py --init-method=file:///tmp/meet --world-size=2 --rank=1
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
    mean_over_ranks,
    pick_device,
    positive_int,
    process_group,
    ranks_agree,
)
from torch import nn

from ddpx import ReducerDDP


def train(device: torch.device, steps: int, origin: str) -> None:
    """Train a linear model for a few steps and check that the ranks agree."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = ReducerDDP(nn.Linear(4, 1).to(device), device_ids=device_ids_for(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    losses = []
    for _ in range(steps):
        inputs = torch.randn(32, 4, device=device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
        losses.append(mean_over_ranks(loss))

    expect(ranks_agree(model), "ranks hold different weights")
    expect(losses[-1] < losses[0], f"loss did not fall: {losses[0]:.4f} -> {losses[-1]:.4f}")
    if rank == 0:
        print(
            f"OK: {world_size} ranks on {device.type} agree ({origin}), "
            f"loss {losses[0]:.4f} -> {losses[-1]:.4f}",
            flush=True,
        )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, and check that it or the environment gives the rank."""
    parser = argparse.ArgumentParser(description="the older launch forms")
    parser.add_argument(
        "--local-rank", "--local_rank", type=int, help="passed by torch.distributed.launch"
    )
    parser.add_argument("--init-method", default="env://", help="env:// or file:///path")
    parser.add_argument("--rank", type=int, help="with file:// only")
    parser.add_argument("--world-size", type=positive_int, help="with file:// only")
    parser.add_argument("--steps", type=positive_int, default=20, help="optimizer steps")
    args = parser.parse_args(argv)

    if args.local_rank is not None and args.local_rank < 0:
        parser.error(f"--local-rank must be 0 or more, got {args.local_rank}")
    if args.init_method.startswith("file://"):
        if args.rank is None or args.world_size is None:
            parser.error("a file:// rendezvous needs --rank and --world-size")
        if not 0 <= args.rank < args.world_size:
            parser.error(f"--rank must be from 0 to {args.world_size - 1}, got {args.rank}")
        folder = Path(args.init_method.removeprefix("file://")).parent
        if not folder.is_dir():
            parser.error(f"folder {str(folder)!r} of the file:// rendezvous does not exist")
    elif args.init_method == "env://":
        if args.rank is not None or args.world_size is not None:
            parser.error("--rank and --world-size go with a file:// rendezvous")
        if "RANK" not in os.environ:
            parser.error(
                "no RANK in the environment: start this script with torch.distributed.launch, "
                "or pass --init-method=file:///path --rank=R --world-size=N"
            )
    else:
        parser.error(f"--init-method must be env:// or file:///path, got {args.init_method!r}")
    return args


def find_local_rank(args: argparse.Namespace) -> tuple[int, str]:
    """Return the local rank and its source. The most explicit source comes first."""
    if args.local_rank is not None:
        return args.local_rank, "--local-rank"
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"]), "LOCAL_RANK"
    return args.rank, "--rank"  # file:// with all ranks on one machine


def main() -> None:
    """Join the process group in the requested way, and train."""
    args = parse_args()
    local_rank, source = find_local_rank(args)
    if args.init_method == "env://":
        rendezvous: dict[str, Any] = {}  # rank, world size and address are in the environment
        local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    else:
        rendezvous = {"rank": args.rank, "world_size": args.world_size}
        local_world_size = args.world_size
    device = pick_device(local_rank, local_world_size)
    with process_group(device, init_method=args.init_method, **rendezvous):
        scheme = args.init_method.partition("//")[0] + "//"
        train(device, args.steps, f"met through {scheme}, local rank from {source}")


if __name__ == "__main__":
    main()
