"""Forms in which autograd may hand over a gradient: lazy conjugates, expanded memory, nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Form = Callable[[torch.Tensor], torch.Tensor | None]


def _expanded(grad: torch.Tensor) -> torch.Tensor:
    return grad.flatten()[0].expand(grad.shape) if grad.numel() else grad


def _transposed(grad: torch.Tensor) -> torch.Tensor:
    return grad.mT.contiguous().mT if grad.dim() > 1 else _strided(grad)


def _strided(grad: torch.Tensor) -> torch.Tensor:
    return torch.stack([grad, grad], -1)[..., 0]


def _conj(grad: torch.Tensor) -> torch.Tensor:
    return grad.conj().resolve_conj().conj()


def _neg(grad: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(-grad)


def _conj_neg(grad: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(-grad.conj().resolve_conj()).conj()


def _zero(grad: torch.Tensor) -> torch.Tensor:
    return torch._efficientzerotensor(grad.shape, dtype=grad.dtype, device=grad.device)


# All forms but "expanded", "zero tensor" and "none" keep the value.
FORMS: dict[str, Form] = {
    "plain": lambda grad: grad,
    "conj": _conj,
    "neg": _neg,
    "conj neg": _conj_neg,
    "expanded": _expanded,
    "transposed": _transposed,
    "strided": _strided,
    "zero tensor": _zero,
    "none": lambda grad: None,
}
SPARSE_FORMS: dict[str, Form] = {
    "plain": lambda grad: grad,
    "coalesced": lambda grad: grad.coalesce(),
    "none": lambda grad: None,
}


def forms_of(kind: str) -> tuple[str, ...]:
    """The forms that the gradient of a layer of this kind may have."""
    if kind == "norm":
        return ("plain",)
    if kind == "sparse":
        return tuple(SPARSE_FORMS)
    forms = tuple(FORMS)
    return forms if kind == "complex" else tuple(name for name in forms if "conj" not in name)


class _Formed(torch.autograd.Function):
    """The identity. Its gradient has another form."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, form: str) -> torch.Tensor:
        ctx.form = form
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        forms = SPARSE_FORMS if grads[0].is_sparse else FORMS
        return forms[ctx.form](grads[0]), None


def formed(weight: torch.Tensor, form: str) -> torch.Tensor:
    """``weight``, with a gradient of another form."""
    if form == "plain":
        return weight
    return _Formed.apply(weight, form)
