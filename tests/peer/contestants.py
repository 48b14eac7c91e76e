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
    TorchDDP._passing_sync_batchnorm_handle = _sync_batch_norm_allowed(  # type: ignore[method-assign]
        TorchDDP._passing_sync_batchnorm_handle
    )
    if contestant == "ddpx":
        _install_ddpx(test_module)


def _install_ddpx(test_module: Any) -> None:
    import ddpx
    import ddpx.ddp.checks

    _prepare(ddpx.ReducerDDP, "ddpx")
    ddpx.ddp.checks.check_trainable = _sync_batch_norm_allowed(ddpx.ddp.checks.check_trainable)
    for name in _PLACES:
        importlib.import_module(name)
    for place in (*(sys.modules[name] for name in _PLACES), test_module):
        if getattr(place, "DistributedDataParallel", None) is TorchDDP:
            place.DistributedDataParallel = ddpx.ReducerDDP
    # No part of DDP may do the work.
    dist.Reducer = _refuse_torch  # type: ignore[misc, assignment]


def _refuse_torch(*_args: Any, **_kwargs: Any) -> Any:
    raise AssertionError("torch's own Reducer was constructed while ReducerDDP is under test")


def _prepare(cls: type[nn.Module], name: str) -> None:
    """Counts constructions, and removes device arguments: both classes require None on a CPU."""
    init = cls.__init__

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

    cls.__init__ = counted  # type: ignore[method-assign]


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
