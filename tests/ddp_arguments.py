"""What the installed torch's DDP takes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

_ARGUMENTS = inspect.signature(DistributedDataParallel).parameters
_NEWER = ("batched_grad_copy", "forward_sync_buffers", "lazy_bucket_allocation")  # than torch 2.11


def ddp_takes(options: Iterable[str]) -> bool:
    """Whether DDP of the installed torch has all of these options."""
    return not _missing(options)


def skip_unless_ddp_takes(options: Iterable[str]) -> None:
    """Skips a test that compares with DDP, if DDP of this torch lacks one of the options."""
    if missing := _missing(options):
        pytest.skip(f"DDP of torch {torch.__version__} has no {', '.join(missing)}")


def _missing(options: Iterable[str]) -> list[str]:
    return [name for name in options if name in _NEWER and name not in _ARGUMENTS]
