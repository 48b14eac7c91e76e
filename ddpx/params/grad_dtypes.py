"""Gradients whose dtype differs from the dtype of their parameter."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from ddpx import errors
from ddpx.params.managed import ManagedParam


def check_grad_dtype(managed: Sequence[ManagedParam], grad_dtype: torch.dtype | None) -> None:
    """Raises ValueError if ``grad_dtype`` is narrower than the dtype of a parameter."""
    if grad_dtype is None:
        return
    names = [
        p.name
        for p in managed
        if p.tensor.is_floating_point()
        and torch.promote_types(p.tensor.dtype, grad_dtype) is not grad_dtype
    ]
    if names:
        raise ValueError(
            f"grad_dtype={grad_dtype} cannot hold gradients in the dtype of "
            f"{errors.count_names(names, 'parameter')}. Pass a wider dtype, such as torch.float32 "
            "for a 16-bit model."
        )


class GradDtypes:
    """Allows ``param.grad`` of floating-point parameters to have the dtypes of the reducer.

    :meth:`reset` ends this, and so does the end of this object. :meth:`apply` begins again.

    Args:
        managed: The averaged parameters.
        reduce_dtype: The dtype of sums. Local gradients have this dtype, too, if it is wider.
        grad_dtype: The dtype of ``param.grad``. None: the parameter's dtype after a sum.
        param_dtype: The dtype in which forward and backward run. None: the parameter's dtype.
    """

    def __init__(
        self,
        managed: Sequence[ManagedParam],
        reduce_dtype: torch.dtype | None,
        grad_dtype: torch.dtype | None,
        param_dtype: torch.dtype | None,
    ) -> None:
        changed: list[torch.Tensor] = [p.tensor for p in managed if p.tensor.is_floating_point()]
        if reduce_dtype is None and grad_dtype is None:
            changed = [p for p in changed if param_dtype not in (None, p.dtype)]
        self._changed = changed
        self._grad_dtype = grad_dtype
        self._end: weakref.finalize[..., GradDtypes] | None = None
        self.apply()

    def apply(self) -> None:
        """Allows the dtypes. A second call has no effect."""
        if self._end is not None and self._end.alive:
            return
        for param in self._changed:
            _set(param, self._grad_dtype)  # None allows any dtype
        self._end = weakref.finalize(self, _reset, self._changed)
        self._end.atexit = False

    def reset(self) -> None:
        """Casts gradients to the dtype of their parameter. A second call has no effect."""
        if self._end is not None:
            self._end()


def _reset(params: Sequence[torch.Tensor]) -> None:
    for param in params:
        if param.grad_dtype is not param.dtype:
            _set(param, param.dtype)


def _set(param: torch.Tensor, dtype: torch.dtype | None) -> None:
    grad, param.grad = param.grad, None  # torch checks the dtype of an existing gradient
    param.grad_dtype = dtype
    param.grad = grad if grad is None or dtype is None else grad.to(dtype)
