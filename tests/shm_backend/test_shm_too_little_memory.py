"""Too little memory for gradient buckets: all ranks raise an error with a remedy."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fault_ranks import again_if_held_up
from mortal_ranks import error_of, run_mortal
from torch import nn

from ddpx import ReducerDDP

DEADLINE_S = 5.0
MIB = 1 << 20
ADVICE = "Cannot allocate memory. Reduce the number of ranks"


@contextmanager
def _room(num_bytes: int) -> Iterator[None]:
    """Limits the address space to ``num_bytes`` more than the process uses."""
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _allocate_too_much() -> Any:
    group = dist.group.WORLD
    assert group is not None
    backend = group._get_backend(torch.device("cpu"))
    with _room(64 * MIB):
        return error_of(
            lambda: backend.allocate_tensor(
                128 * MIB, dtype=torch.uint8, device=torch.device("cpu")
            )
        )


def test_allocation():
    for outcome in run_mortal(2, _allocate_too_much):
        text, _ = outcome.value
        assert "could not allocate 134217728 bytes of shared memory" in text, text
        assert ADVICE in text, text


def _wrap(module: nn.Module) -> ReducerDDP:
    # the broadcast would need as much memory again, in torch
    return ReducerDDP(module, init_sync=False)


def _train(module: nn.Module) -> None:
    model = _wrap(module)
    model(torch.ones(1, 2048)).sum().backward()


def _construct_with_room(num_bytes: int) -> Any:
    """Constructs a wrapper while rank 1 has this much memory."""
    module = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)))
    dist.barrier()
    if dist.get_rank() != 1:
        return error_of(lambda: _train(module))
    with _room(num_bytes):
        return error_of(lambda: _wrap(module))


@again_if_held_up
def test_buckets() -> None:
    outcomes = run_mortal(3, _construct_with_room, 40 * MIB, stay=True)
    for rank, outcome in enumerate(outcomes):
        text, seconds = outcome.value
        assert f"[ddpx shm rank {rank}, phase" in text, (rank, text)
        assert f"] rank 1: could not allocate {64 * MIB} bytes of shared memory" in text, (
            rank,
            text,
        )
        assert ADVICE in text, (rank, text)
        assert seconds < DEADLINE_S, (rank, seconds)


def _reduce_with_room(num_bytes: int) -> Any:
    group = dist.group.WORLD
    assert group is not None
    backend = group._get_backend(torch.device("cpu"))
    tensor = backend.allocate_tensor(16 * MIB, dtype=torch.float32, device=torch.device("cpu"))
    dist.barrier()
    if dist.get_rank() != 1:
        return error_of(lambda: dist.all_reduce(tensor))
    with _room(num_bytes):
        return error_of(lambda: dist.all_reduce(tensor))


@again_if_held_up
def test_buckets_of_others() -> None:
    """The first operation maps the buckets of other ranks."""
    outcomes = run_mortal(2, _reduce_with_room, 40 * MIB, stay=True)
    for rank, outcome in enumerate(outcomes):
        text, seconds = outcome.value
        assert f"] rank 1: could not allocate {64 * MIB} bytes of shared memory" in text, (
            rank,
            text,
        )
        assert ADVICE in text, (rank, text)
        assert seconds < DEADLINE_S, (rank, seconds)


def _reduce_what_cannot_be_copied() -> Any:
    """Rank 1 passes an expanded tensor, whose elements share one address. It needs a copy."""
    tensor = torch.ones(8)
    if dist.get_rank() == 1:
        tensor = torch.ones(1).expand(1 << 46)
    dist.barrier()
    first = error_of(lambda: dist.all_reduce(tensor))
    # A script that catches the error makes the next call. Peers must not match it with this call.
    second = error_of(lambda: dist.all_reduce(torch.ones(8)))
    return first, second


@pytest.mark.parametrize("identities", ["", "aab"])
def test_copies(identities: str) -> None:
    """A failed copy fails the group, so that peers do not wait for the call."""
    outcomes = run_mortal(3, _reduce_what_cannot_be_copied, identities=identities, stay=True)
    causes = ["rank 1: all_reduce failed", "rank 1: no memory"]
    for rank, outcome in enumerate(outcomes):
        elsewhere = identities and identities[rank] != identities[1]
        for text, seconds in outcome.value:
            expected = ["the exchange with rank 0 "] if elsewhere else causes
            assert any(cause in text for cause in expected), (rank, text)
            assert seconds < DEADLINE_S, (rank, seconds)
