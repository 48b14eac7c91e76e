"""Makes all parts of DDP that do work raise errors. This proves that ddpx does not use them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class PoisonedCall(AssertionError):
    """ddpx used a part of DDP."""


def _poison(name: str) -> Any:
    def raise_poisoned(*args: Any, **kwargs: Any) -> None:
        raise PoisonedCall(f"ddpx used {name}")

    return raise_poisoned


@contextmanager
def ddp_poisoned() -> Iterator[None]:
    """In the block, DDP's methods, reducer, logger and bucket assignment raise PoisonedCall."""
    bindings = torch._C._distributed_c10d
    targets = [
        (owner, name)
        for owner in (dist, bindings)
        for name in ("Reducer", "Logger", "_compute_bucket_assignment_by_size")
        if hasattr(owner, name)
    ]
    targets += [
        (DistributedDataParallel, name)
        for name, value in vars(DistributedDataParallel).items()
        if callable(value) or isinstance(value, (property, staticmethod, classmethod))
    ]
    patches = [mock.patch.object(owner, name, _poison(name)) for owner, name in targets]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
