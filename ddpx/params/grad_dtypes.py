"""Gradients whose dtype differs from the dtype of their parameter."""

from __future__ import annotations

import weakref
from collections.abc import Sequence, Set

import torch

from ddpx import _C, errors
from ddpx.params.managed import ManagedParam


def check_grad_dtype(
    managed: Sequence[ManagedParam], grad_dtype: torch.dtype | None, owned: Set[int]
) -> None:
    """Raises ValueError if parameters cannot have gradients in ``grad_dtype``.

    Args:
        managed: The averaged parameters.
        grad_dtype: The argument of the wrapper.
        owned: Ids of parameters whose ``grad_dtype`` may be that of an earlier wrapper.
    """
    chosen = {
        p.name: p.tensor.grad_dtype
        for p in managed
        if _has_another(p.tensor, grad_dtype) and id(p.tensor) not in owned
    }
    if chosen:
        raise ValueError(
            f"the script has set grad_dtype of {errors.count_names(list(chosen), 'parameter')}. "
            f"Pass grad_dtype={next(iter(chosen.values()))} to the wrapper, or leave "
            "param.grad_dtype as it is: "
            "the wrapper chooses the dtype of param.grad."
        )
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


def _has_another(param: torch.Tensor, grad_dtype: torch.dtype | None) -> bool:
    """Whether gradients of ``param`` have a dtype that is not the wrapper's."""
    return param.grad_dtype not in (None, param.dtype, grad_dtype)


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
        earlier = [(p, p.grad_dtype, p.grad_dtype is not p.dtype) for p in self._changed]
        for param in self._changed:
            _set(param, self._grad_dtype)  # None allows any dtype
        self._end = weakref.finalize(self, _reset, earlier)
        self._end.atexit = False

    def reset(self) -> None:
        """Casts gradients to their dtype without the wrapper. A second call has no effect."""
        if self._end is not None:
            self._end()


def _reset(earlier: Sequence[tuple[torch.Tensor, torch.dtype | None, bool]]) -> None:
    """``earlier``: parameters with their earlier ``grad_dtype``, and whether a script chose it."""
    for param, grad_dtype, by_script in earlier:
        _set(param, grad_dtype if by_script and grad_dtype else param.dtype)
        if not by_script:
            _C.forget_grad_dtype(param)
        elif grad_dtype is None:
            param.grad_dtype = None


def _set(param: torch.Tensor, dtype: torch.dtype | None) -> None:
    grad, param.grad = param.grad, None  # torch checks the dtype of an existing gradient
    param.grad_dtype = dtype
    param.grad = grad if grad is None or dtype is None else grad.to(dtype)
