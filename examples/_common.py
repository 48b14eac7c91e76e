"""Helpers that the examples share.

If you run an example as a script (``python examples/basic_spawn.py``), Python finds this module in
the same folder.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Imported here, before any process group exists. Otherwise torch.optim imports it on first use. Its
# default arguments would then keep the group and gloo's threads alive until the interpreter exits,
# where a thread that needs the interpreter aborts the process.
import torch.distributed.nn.functional
from torch import nn


def pick_device(local_rank: int, local_world_size: int) -> torch.device:
    """Return a GPU of this rank's own if every local rank can have one, else the CPU."""
    if torch.cuda.device_count() >= local_world_size:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        return device
    # All ranks share the cores. More threads per rank would only wait for each other.
    torch.set_num_threads(1)
    return torch.device("cpu")


def backend_for(device: torch.device) -> str:
    """Return the process-group backend for tensors of this device."""
    return "nccl" if device.type == "cuda" else "gloo"


def device_ids_for(device: torch.device) -> list[int] | None:
    """Return the value for ``device_ids``: the one GPU of this process, or None on the CPU."""
    return [device.index] if device.type == "cuda" else None


@contextmanager
def process_group(device: torch.device, **rendezvous: Any) -> Iterator[None]:
    """Join the default process group, and leave it even if the body raises.

    Without ``rendezvous`` arguments, the rank, world size and address come from the environment
    variables that torchrun sets.

    Keep the model in a function that the body calls, so that the model is gone at the end of the
    body. A wrapped model holds a reference to the group.
    """
    dist.init_process_group(backend_for(device), **rendezvous)
    try:
        yield
    finally:
        dist.destroy_process_group()


def torchrun_local_ranks() -> tuple[int, int]:
    """Return the local rank and the local world size that torchrun gave this process."""
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit(
            "error: no LOCAL_RANK in the environment; start this script with\n"
            f"  torchrun --standalone --nproc-per-node=2 {sys.argv[0]} ..."
        )
    return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])


def mean_over_ranks(value: torch.Tensor) -> float:
    """Average a one-element tensor over all ranks. Every rank gets the result."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def ranks_agree(module: nn.Module) -> bool:
    """Return whether all ranks hold bit-identical parameters. Every rank gets the same answer."""
    parameters = [p.detach() for p in module.parameters()]
    device = parameters[0].device
    mine = torch.cat([p.flatten().to(device) for p in parameters])
    of_rank_0 = mine.clone()
    dist.broadcast(of_rank_0, src=0)
    verdict = torch.tensor(int(torch.equal(mine, of_rank_0)), device=device)
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
    return bool(verdict.item())


def expect(condition: bool, message: str) -> None:
    """End the script with a non-zero exit status if a result is not as expected."""
    if not condition:
        raise RuntimeError(f"FAILED: {message}")


def positive_int(text: str) -> int:
    """Argument type: an integer of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return value


def path_in_folder(text: str) -> Path:
    """Argument type: a file path whose folder exists, so that saving cannot fail after training."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"folder {str(path.parent)!r} does not exist")
    return path
