"""``reduce_dtype`` and ``grad_dtype``: gradients in another dtype than their parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddpx.params import ManagedParam


def set_grad_dtypes(
    managed: Sequence[ManagedParam],
    reduce_dtype: torch.dtype | None,
    grad_dtype: torch.dtype | None,
) -> None:
    """Lets ``grad`` of floating-point parameters have the dtypes that the reducer gives it.

    Args:
        managed: the parameters that a wrapper averages.
        reduce_dtype: of sums; local gradients that wait for more have it, too, if it is wider.
        grad_dtype: of ``grad`` always; None for the parameter's own behind a sum.
    """
    if reduce_dtype is not None or grad_dtype is not None:
        for param in managed:
            _set(param.tensor, grad_dtype)  # None: any dtype


def reset_grad_dtypes(managed: Sequence[ManagedParam]) -> None:
    """``grad`` has the parameter's own dtype again; one in another dtype is cast."""
    for param in managed:
        if param.tensor.grad_dtype is not param.tensor.dtype:
            _set(param.tensor, param.tensor.dtype)


def _set(param: torch.Tensor, dtype: torch.dtype | None) -> None:
    if param.is_floating_point():
        grad, param.grad = param.grad, None  # torch checks the dtype of one that is there
        param.grad_dtype = dtype
        param.grad = grad if grad is None or dtype is None else grad.to(dtype)
