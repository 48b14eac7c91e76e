"""Checks of the arguments of ``ReducerDDP`` that concern the wrapper as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from ddpx import errors, params
from ddpx.ddp.mixed_precision import check_config
from ddpx.params import ownership
from ddpx.params.delayed import DelayedParams
from ddpx.params.grad_dtypes import check_grad_dtype


def check_module(module: object) -> None:
    """Raises TypeError if ``module`` is not a module."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"ReducerDDP wraps a torch.nn.Module, but got {type(module).__name__}. Pass the model "
            "itself: ReducerDDP(model)."
        )


def check_mixed_precision(
    config: Any, reduce_dtype: torch.dtype | None, grad_dtype: torch.dtype | None
) -> None:
    """Checks ``mixed_precision``.

    Raises:
        TypeError: The object lacks a dtype.
        ValueError: ``reduce_dtype`` or ``grad_dtype`` is given, too.
    """
    if config is None:
        return
    check_config(config)
    if reduce_dtype is not None or grad_dtype is not None:
        raise ValueError(
            "mixed_precision has a reduce_dtype of its own. reduce_dtype= and grad_dtype= cannot "
            "be combined with mixed_precision=. Set mixed_precision.reduce_dtype, or leave "
            "mixed_precision out."
        )


def describe(mixed_precision: Any) -> dict[str, object]:
    """The dtypes of ``mixed_precision``, to be compared between ranks."""
    config = mixed_precision
    dtypes = config and (config.param_dtype, config.reduce_dtype, config.buffer_dtype)
    return {"mixed_precision": dtypes}


def check_trainable(module: nn.Module, managed: Sequence[params.ManagedParam]) -> None:
    """Checks that ``module`` has parameters to average.

    Raises:
        RuntimeError: No parameter requires a gradient. Or parameters are uninitialized, or are the
            results of operations.
    """
    if not managed:
        raise errors.nothing_to_train()
    lazy = [p.name for p in managed if isinstance(p.tensor, UninitializedParameter)]
    if lazy:
        raise RuntimeError(
            "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. "
            "Run a dummy forward pass to correctly initialize the modules. This module has "
            f"{errors.count_names(lazy, 'uninitialized (lazy) parameter')}."
        )
    other = [p.name for p in managed if p.tensor.is_nested or p.tensor.layout != torch.strided]
    if other:
        raise RuntimeError(
            "gradients of dense parameters only can be averaged, but the module trains "
            f"{errors.count_names(other, 'parameter')}, in a sparse, nested or opaque layout. "
            "Freeze such parameters, or hold their values in a dense parameter."
        )
    computed = [p.name for p in managed if not p.tensor.is_leaf]
    if computed:
        raise RuntimeError(
            "only an autograd leaf can be averaged, but the module has "
            f"{errors.count_names(computed, 'parameter')}, computed from other tensors. Make each "
            "of these tensors a torch.nn.Parameter."
        )


def check_averaging(
    owner: ownership.Owner,
    managed: Sequence[params.ManagedParam],
    delayed: DelayedParams,
    grad_dtype: torch.dtype | None,
) -> None:
    """Checks that ``owner`` can average ``managed``, before ranks rely on this rank.

    Raises:
        ValueError: Another wrapper averages some of the parameters beside others; or a delayed
            parameter is not in ``managed``; or ``grad_dtype`` is too narrow.
    """
    ownership.rivals(owner, managed)
    delayed.mark(managed)
    check_grad_dtype(managed, grad_dtype)


def check_sync_batch_norm(module: nn.Module, device_type: str) -> None:
    """Raises ValueError if ``module`` is on the CPU and has SyncBatchNorm layers."""
    if device_type == "cpu":
        names = [n for n, m in module.named_modules() if isinstance(m, nn.SyncBatchNorm)]
        if names:
            raise ValueError(
                "SyncBatchNorm layers only work with GPU modules, but this module is on CPU and "
                f"has {errors.count_names(names, 'SyncBatchNorm layer')}. Move the module to an "
                "accelerator before wrapping, or do not call convert_sync_batchnorm() on CPU."
            )
