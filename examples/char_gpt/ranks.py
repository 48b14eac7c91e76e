"""This process's rank, and operations over all ranks."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
TIMEOUT = timedelta(minutes=5)  # a rank that waits longer than this has lost its peers


class LaunchError(Exception):
    """The process was not started in a way that lets it join the other ranks."""


@dataclass(frozen=True)
class Rank:
    """One process of the job: its number, the number of processes, and its hardware."""

    rank: int
    world_size: int
    device: torch.device
    backend: str

    @property
    def is_first(self) -> bool:
        """True on rank 0, the only rank that prints and writes files."""
        return self.rank == 0

    def share_of(self, items: Tensor) -> Tensor:
        """Every world_size-th row of `items`. Each row goes to exactly one rank."""
        return items[self.rank :: self.world_size]


def rank_from_environment(device_choice: str) -> Rank:
    """Read torchrun's environment variables, and choose the device: "auto", "cpu" or "cuda"."""
    missing = [name for name in LAUNCHER_VARIABLES if name not in os.environ]
    if missing:
        raise LaunchError(
            f"{', '.join(missing)} not set: this script runs as one process per rank, "
            "started by torchrun:\n"
            "  torchrun --nproc-per-node=2 examples/char_gpt/train.py"
        )
    rank, local_rank, world_size, local_world_size = (
        int(os.environ[name]) for name in LAUNCHER_VARIABLES
    )
    # NCCL requires a GPU for each process. With fewer GPUs, all ranks use the CPU.
    enough_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= local_world_size
    if device_choice == "cuda" and not enough_gpus:
        raise LaunchError(
            f"--device cuda needs a GPU for each of this machine's {local_world_size} ranks, "
            f"found {torch.cuda.device_count()}"
        )
    if enough_gpus and device_choice != "cpu":
        return Rank(rank, world_size, torch.device("cuda", local_rank), "nccl")
    return Rank(rank, world_size, torch.device("cpu"), "gloo")


@contextmanager
def process_group(rank: Rank) -> Iterator[None]:
    """Join the other ranks, and leave them again however the body ends."""
    device_id = None
    if rank.device.type == "cuda":
        torch.cuda.set_device(rank.device)
        device_id = rank.device
    dist.init_process_group(rank.backend, timeout=TIMEOUT, device_id=device_id)
    try:
        yield
    finally:
        dist.destroy_process_group()


def weights_digest(model: nn.Module) -> str:
    """SHA-256 in hex of all parameters and buffers. One flipped bit changes it."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        # Flattened first, since a tensor without dimensions cannot be viewed as bytes.
        digest.update(tensor.cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def gather_digests(model: nn.Module, world_size: int) -> list[str]:
    """The weights digest of each rank, in rank order. Every rank gets the whole list."""
    digests = [""] * world_size
    dist.all_gather_object(digests, weights_digest(model))
    return digests
