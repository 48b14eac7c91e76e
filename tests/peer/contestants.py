"""The two compared classes, and how to put one of them in DDP's place in a rank."""

from __future__ import annotations

import functools
import importlib
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

CONTESTANTS = ("torch", "ddpx")

# Modules from which scripts import DDP, and modules of torch that construct DDP by an imported
# name. Others only call isinstance, and ReducerDDP is a virtual subclass of DDP: they keep torch's
# class.
_PLACES = (
    "torch.nn",
    "torch.nn.parallel",
    "torch.nn.parallel.distributed",
    "torch.distributed._composable.replicate",
)

built: Counter[str] = Counter()
"""How many wrappers of each class the rank has begun to construct."""


def install(contestant: str, test_module: Any) -> None:
    """Lets the tests of ``test_module`` run with ``contestant``. Needs a process of its own."""
    _prepare(TorchDDP, "torch")
    if contestant == "ddpx":
        _install_ddpx(test_module)


def _install_ddpx(test_module: Any) -> None:
    import ddpx

    _prepare(ddpx.ReducerDDP, "ddpx")
    for name in _PLACES:
        importlib.import_module(name)
    for place in (*(sys.modules[name] for name in _PLACES), test_module):
        if getattr(place, "DistributedDataParallel", None) is TorchDDP:
            place.DistributedDataParallel = ddpx.ReducerDDP
    # No part of DDP may do the work.
    dist.Reducer = _refuse_torch  # type: ignore[misc, assignment]


def _refuse_torch(*_args: Any, **_kwargs: Any) -> Any:
    raise AssertionError("torch's own Reducer was constructed while ReducerDDP is under test")


def _prepare(cls: Any, name: str) -> None:
    """Counts constructions, and changes what both classes refuse on a CPU.

    Device arguments are removed. SyncBatchNorm is allowed, for which the harness has kernels.
    """
    init = cls.__init__
    cls._passing_sync_batchnorm_handle = _sync_batch_norm_allowed(
        cls._passing_sync_batchnorm_handle
    )

    @functools.wraps(init)
    def counted(
        self: nn.Module,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        built[name] += 1
        init(self, module, None, None, *args, **kwargs)

    cls.__init__ = counted


def _sync_batch_norm_allowed(check: Callable[..., None]) -> Callable[..., None]:
    """Both classes refuse SyncBatchNorm on a CPU. The harness has kernels for it."""

    @functools.wraps(check)
    def checked(*args: Any) -> None:
        try:
            check(*args)
        except ValueError as error:
            if "SyncBatchNorm" not in str(error):
                raise

    return checked
