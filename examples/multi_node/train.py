"""Training on several nodes: ReducerDDP over gloo, shm or NCCL, resumed from a checkpoint.

The launchers beside this file start it: torchrun.sh, job.sbatch and pytorchjob.yaml. The checkpoint
lies on a file system that all nodes share. Rank 0 writes it, and all ranks read it after a restart.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ddpx import ReducerDDP

NUM_SAMPLES = 960  # each step's batch, over all ranks
STEPS_PER_CHECKPOINT = 5


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=["gloo", "shm", "nccl"], help="default: by the device")
    parser.add_argument("--steps", type=int, default=30, help="steps in all, resumed ones included")
    parser.add_argument("--checkpoint", type=Path, help="file on a file system of all nodes")
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=300.0,
        help="group timeout: longer than the longest pause of a rank, such as a checkpoint",
    )
    return parser.parse_args()


def pick_device(backend: str | None) -> torch.device:
    """The GPU of this local rank, or the CPU if there is none or the backend is of CPUs."""
    if backend in ("gloo", "shm") or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def make_batch(step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of a step's batch. The whole batch is the same for any number of ranks."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(NUM_SAMPLES, 16, generator=generator)[dist.get_rank() :: dist.get_world_size()]
    return x.to(device), x.square().mean(dim=1, keepdim=True).to(device)


def save(path: Path, step: int, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Writes the checkpoint atomically, since a node may be lost at any time."""
    unfinished = path.with_name(path.name + ".unfinished")
    state = {"step": step, "module": module.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, unfinished)
    os.replace(unfinished, path)


def train(
    wrap: Callable[[nn.Module], nn.Module],
    device: torch.device,
    steps: int,
    checkpoint: Path | None,
) -> nn.Module:
    """Trains up to ``steps``, from the checkpoint if it exists, and returns the module."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    first_step = 0
    if checkpoint is not None and checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        first_step = state["step"]
        module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])
        print(f"rank {dist.get_rank()} resumes at step {first_step}", flush=True)
    model = wrap(module)
    for step in range(first_step, steps):
        x, y = make_batch(step, device)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        steps_done = step + 1
        due = steps_done % STEPS_PER_CHECKPOINT == 0 or steps_done == steps
        if checkpoint is not None and due and dist.get_rank() == 0:
            save(checkpoint, steps_done, module, optimizer)
    return module


def main() -> None:
    arguments = parse_arguments()
    device = pick_device(arguments.backend)
    if device.type == "cpu":
        torch.set_num_threads(1)  # ranks share the cores
    backend = arguments.backend or ("nccl" if device.type == "cuda" else "gloo")
    # The default of 30 minutes is long for a node that disappears without a message.
    dist.init_process_group(backend, timeout=timedelta(seconds=arguments.timeout_s))

    nodes: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(nodes, socket.gethostname())
    if dist.get_rank() == 0:
        print(f"{backend} on {device.type}, nodes of ranks: {' '.join(nodes)}", flush=True)

    module = train(ReducerDDP, device, arguments.steps, arguments.checkpoint)

    weights = torch.cat([param.detach().flatten() for param in module.parameters()])
    weights_of_rank_0 = weights.clone()
    dist.broadcast(weights_of_rank_0, 0)
    if not torch.equal(weights, weights_of_rank_0):
        raise RuntimeError(f"rank {dist.get_rank()} has other weights than rank 0")
    dist.barrier()
    if dist.get_rank() == 0:
        x, y = make_batch(arguments.steps, device)
        loss = nn.functional.mse_loss(module(x), y).item()
        print(
            f"OK: {arguments.steps} steps, loss {loss:.4f}, the same weights on {len(nodes)} ranks "
            f"of {len(set(nodes))} nodes",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
