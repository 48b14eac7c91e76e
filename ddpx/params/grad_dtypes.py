"""Gradients in another dtype than their parameters."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from ddpx import errors
from ddpx.params.managed import ManagedParam


class GradDtypes:
    """Lets ``grad`` of floating-point parameters have the dtypes that the reducer gives it.

    This ends with :meth:`reset`, or when the object goes.

    Args:
        managed: the parameters that a wrapper averages.
        reduce_dtype: of sums; local gradients that wait for more have it, too, if it is wider.
        grad_dtype: of ``grad`` always; None for the parameter's own behind a sum.
        param_dtype: in which forward and backward run, so that gradients arrive in it; None for the
            parameter's own.

    Raises:
        ValueError: ``grad_dtype`` cannot hold what a parameter's own dtype holds.
    """

    def __init__(
        self,
        managed: Sequence[ManagedParam],
        reduce_dtype: torch.dtype | None,
        grad_dtype: torch.dtype | None,
        param_dtype: torch.dtype | None,
    ) -> None:
        changed = [p.tensor for p in managed if p.tensor.is_floating_point()]
        if reduce_dtype is None and grad_dtype is None:
            changed = [p for p in changed if param_dtype not in (None, p.dtype)]
        if grad_dtype is not None:
            names = [
                p.name
                for p in managed
                if p.tensor.is_floating_point()
                and torch.promote_types(p.tensor.dtype, grad_dtype) is not grad_dtype
            ]
            if names:
                raise _grad_dtype_too_narrow(grad_dtype, names)
        for param in changed:
            _set(param, grad_dtype)  # None: any dtype
        self._end = weakref.finalize(self, _reset, changed)
        self._end.atexit = False

    def reset(self) -> None:
        """``grad`` has the parameter's own dtype again; one in another dtype is cast. Once."""
        self._end()


def _reset(params: Sequence[torch.Tensor]) -> None:
    for param in params:
        if param.grad_dtype is not param.dtype:
            _set(param, param.dtype)


def _set(param: torch.Tensor, dtype: torch.dtype | None) -> None:
    grad, param.grad = param.grad, None  # torch checks the dtype of one that is there
    param.grad_dtype = dtype
    param.grad = grad if grad is None or dtype is None else grad.to(dtype)


# ---- errors --------------------------------------------------------------------------------------


def _grad_dtype_too_narrow(dtype: object, names: Sequence[str]) -> ValueError:
    return ValueError(
        f"grad_dtype={dtype} cannot hold gradients in the dtype of "
        f"{errors.count_names(names, 'parameter')}. "
        "Pass a wider dtype, such as torch.float32 for a 16-bit model."
    )
