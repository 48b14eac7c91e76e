"""Checks of the arguments of ``ReducerDDP`` that concern the wrapper as a whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from ddpx import errors, params


def check_module(module: object) -> None:
    """Raises TypeError if ``module`` is not a module."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"ReducerDDP wraps a torch.nn.Module, but got {type(module).__name__}. Pass the model "
            "itself: ReducerDDP(model)."
        )


def check_trainable(module: nn.Module, managed: Sequence[params.ManagedParam]) -> None:
    """Checks that ``module`` has parameters to average.

    Raises:
        RuntimeError: No parameter requires a gradient. Or parameters are uninitialized, or are the
            results of operations.
        ValueError: Parameters are on the meta device.
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
    meta = [p.name for p in managed if p.tensor.device.type == "meta"]
    if meta:
        raise ValueError(
            f"the module trains {errors.count_names(meta, 'parameter')}, on the meta device, where "
            "tensors have no values. Materialize the module with to_empty(), initialize it, then "
            "wrap it."
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
