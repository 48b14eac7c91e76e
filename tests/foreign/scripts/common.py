"""What the scripts share: a model, inputs, checkpoints, and the comparison of final weights."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn

BATCH_SIZE = 5


def make_model() -> nn.Sequential:
    """A model with buffers. Each rank has other weights before the model is wrapped."""
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def make_inputs(num_batches: int, first: int = 0) -> list[torch.Tensor]:
    """Batches of this rank. ``first`` is the number of the first batch."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    generators = (
        torch.Generator().manual_seed(1000 * rank + first + number) for number in range(num_batches)
    )
    return [torch.randn(BATCH_SIZE, 6, generator=generator) for generator in generators]


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def save(file: Path, **states: object) -> None:
    """Rank 0 saves a checkpoint. All ranks wait for the file."""
    if dist.get_rank() == 0:
        torch.save(states, file)
    dist.barrier()


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()
    leave()


def leave() -> NoReturn:
    """Ends the process without the shutdown of Python.

    With torch 2.13, threads of gloo that a DDP keeps alive may abort the process there.
    """
    sys.stdout.flush()
    os._exit(0)


def report(module: nn.Module) -> None:
    """Checks that all ranks have the same params. Rank 0 prints a digest of all ranks' tensors."""
    mine = [_digest(module.parameters()), _digest(module.buffers())]
    of_all: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_all, mine)
    assert len({params for params, _ in of_all}) == 1, "ranks have different params"
    if dist.get_rank() == 0:
        text = "".join(part for parts in of_all for part in parts)
        print(f"\nweights: {hashlib.sha256(text.encode()).hexdigest()[:16]}", flush=True)


def _digest(tensors: Iterator[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()))
    return digest.hexdigest()
