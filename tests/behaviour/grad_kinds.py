"""Kinds of gradient tensors: what autograd hands over, and what user code puts into ``param.grad``.

A module has one parameter for each kind. Its gradients are small integers, or halves of them, so
that every mean over two ranks is exact in every dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WORLD_SIZE = 2


@dataclass(frozen=True)
class Kind:
    """One kind of gradient.

    Attributes:
        make: Makes the gradient from a plain tensor. The values may change, but not the shape.
        shape: The shape of the parameter.
        complex: Whether the parameter is complex.
        sparse: Whether the parameter is the weight of an embedding with sparse gradients.
        by_user: Whether user code sets ``param.grad``. Otherwise a backward function returns the
            gradient.
        grows: Whether autograd can add to such a gradient in place.
    """

    make: Callable[[torch.Tensor], torch.Tensor]
    shape: tuple[int, ...] = (3, 4)
    complex: bool = False
    sparse: bool = False
    by_user: bool = False
    grows: bool = True


class Subclass(torch.Tensor):
    """A subclass without ``__torch_dispatch__``: its memory holds its values."""


class Doubled(torch.Tensor):
    """A subclass with ``__torch_dispatch__``, whose memory holds the halves of its values."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Doubled:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls, values.shape, strides=values.stride(), dtype=values.dtype
        )

    def __init__(self, values: torch.Tensor) -> None:
        self.half = values / 2

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        args = list(args)
        if isinstance(args[0], Doubled) and func is torch.ops.aten.copy_.default:
            args[0].half.copy_(_undoubled(args[1]) / 2)
            return args[0]
        if isinstance(args[0], Doubled) and func is torch.ops.aten.detach.default:
            return Doubled(_undoubled(args[0]))
        return func(*map(_undoubled, args), **(kwargs or {}))


class Closed(Doubled):
    """A subclass that no operator can read."""

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"Closed has no {func}")


def _undoubled(value: Any) -> Any:
    return value.half * 2 if isinstance(value, Doubled) else value


def _conj(values: torch.Tensor) -> torch.Tensor:
    return values.conj().resolve_conj().conj()


def _neg(values: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(-values)


def _zero(values: torch.Tensor) -> torch.Tensor:
    return torch._efficientzerotensor(values.shape, dtype=values.dtype)


def _overlapping(values: torch.Tensor) -> torch.Tensor:
    return values.flatten()[:6].clone().as_strided((3, 4), (1, 1))


def _gapped(values: torch.Tensor) -> torch.Tensor:
    return torch.stack([values, values + 1], dim=-1)[..., 0]


def _inference(values: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return values.clone()


def _sparse(values: torch.Tensor) -> torch.Tensor:
    rows = torch.tensor([[0, 2]])
    return torch.sparse_coo_tensor(rows, values[:2], values.shape, check_invariants=True)


def _uncoalesced(values: torch.Tensor) -> torch.Tensor:
    rows = torch.tensor([[2, 0, 2]])
    return torch.sparse_coo_tensor(rows, values, values.shape, check_invariants=True)


LAZY = {
    "conj": Kind(_conj, complex=True),
    "neg": Kind(_neg),
    "neg of complex": Kind(_neg, complex=True),
    "conj and neg": Kind(lambda v: _neg(_conj(v)), complex=True),
    "0-d conj": Kind(_conj, (), complex=True),
    "0-d neg": Kind(_neg, ()),
    "empty conj": Kind(_conj, (0, 4), complex=True),
    "zeros without memory": Kind(_zero, grows=False),
    "complex zeros without memory": Kind(_zero, complex=True, grows=False),
    "conj by user": Kind(_conj, complex=True, by_user=True),
    "neg with gaps, by user": Kind(lambda v: _gapped(_neg(v)), by_user=True),
}
LAYOUTS = {
    "plain": Kind(torch.clone),
    "complex": Kind(torch.clone, complex=True),
    "0-d": Kind(torch.clone, ()),
    "empty": Kind(torch.clone, (0, 4)),
    "expanded": Kind(lambda v: v[0, 0].expand(3, 4)),
    "transposed": Kind(lambda v: v.t().contiguous().t()),
    "channels last": Kind(
        lambda v: v.contiguous(memory_format=torch.channels_last), shape=(2, 3, 2, 2)
    ),
    "with gaps": Kind(_gapped),
    "overlapping": Kind(_overlapping),
    "expanded by user": Kind(lambda v: v[0, 0].expand(3, 4), by_user=True, grows=False),
    "transposed by user": Kind(lambda v: v.t().contiguous().t(), by_user=True),
    "with gaps, by user": Kind(_gapped, by_user=True),
    "overlapping by user": Kind(_overlapping, by_user=True, grows=False),
}
OBJECTS = {
    "parameter": Kind(nn.Parameter, by_user=True),
    "subclass": Kind(lambda v: v.as_subclass(Subclass)),
    "subclass by user": Kind(lambda v: v.as_subclass(Subclass), by_user=True),
    "subclass with dispatch, by user": Kind(Doubled, by_user=True, grows=False),
    "inference tensor": Kind(_inference, by_user=True, grows=False),
}
SPARSE = {
    "sparse": Kind(_sparse, sparse=True),
    "uncoalesced": Kind(_uncoalesced, sparse=True),
    "sparse by user": Kind(_sparse, sparse=True, by_user=True),
}
TABLE: dict[str, dict[str, Kind]] = {
    "lazy": LAZY,
    "layouts": LAYOUTS,
    "objects": OBJECTS,
    "sparse": SPARSE,
}


def dense(grad: torch.Tensor) -> torch.Tensor:
    """The values of a gradient of any kind, in double precision."""
    grad = grad.detach()
    if isinstance(grad, Doubled):
        grad = _undoubled(grad)
    values = grad.to_dense() if grad.is_sparse else grad
    values = values.as_subclass(torch.Tensor).clone().resolve_conj().resolve_neg()
    return values.to(torch.complex128 if values.is_complex() else torch.float64).contiguous()


class _Give(torch.autograd.Function):
    """The gradient of the input is what ``give(dtype)`` returns."""

    @staticmethod
    def forward(ctx: Any, param: torch.Tensor, give: Callable[..., torch.Tensor]) -> torch.Tensor:
        ctx.give = partial(give, param.dtype)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.give(), None


class Given(nn.Module):
    """Has a parameter for each kind, and parameters with plain gradients at both ends.

    Attributes:
        number: The number of the backward, which determines all gradients.
        local: The values of this rank's gradients since :meth:`clear`, by name, in double
            precision.
        left_out: Names of parameters that forward does not use.
    """

    def __init__(self, kinds: Mapping[str, Kind], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        plain = Kind(torch.clone)
        self.kinds = {"first": plain, **kinds, "last": plain}
        self.number = 0
        self.left_out: set[str] = set()
        for name, kind in self.kinds.items():
            if kind.sparse:
                layer = nn.Embedding(*kind.shape, sparse=True, dtype=dtype)
                self.add_module(name, layer)
                param = layer.weight
            else:
                param = nn.Parameter(
                    torch.zeros(kind.shape, dtype=torch.complex64 if kind.complex else dtype)
                )
                self.register_parameter(name, param)
            if kind.by_user:
                param.register_post_accumulate_grad_hook(partial(self._set, name))
        self.clear()

    def clear(self) -> None:
        """Begins new sums of gradients, with zeros."""
        self.local = {name: torch.zeros_like(dense(p)) for name, p in self.named().items()}

    def named(self) -> dict[str, nn.Parameter]:
        """The parameters by the names of their kinds."""
        return {name.removesuffix(".weight"): p for name, p in self.named_parameters()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = x.sum()
        for name, kind in self.kinds.items():
            if name not in self.left_out:
                holder = getattr(self, name)
                param = holder.weight if kind.sparse else holder
                loss = loss + _Give.apply(param, partial(self._give, name))
        return loss

    def _give(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        kind, values = self.kinds[name], self._draw(name, dtype)
        if kind.by_user:
            return _sparse(values) if kind.sparse else values
        grad = kind.make(values)
        self.record(name, grad)
        return grad

    def _set(self, name: str, param: torch.Tensor) -> None:
        assert param.grad is not None
        grad = self.kinds[name].make(self._draw(name, param.grad.dtype))
        self.record(name, grad)
        param.grad = grad

    def record(self, name: str, grad: torch.Tensor) -> None:
        """Adds a gradient from autograd to ``local``. A gradient by the user replaces the sum."""
        before = 0 if self.kinds[name].by_user else self.local[name]
        self.local[name] = dense(grad) + before

    def _draw(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        place = list(self.kinds).index(name)
        seed = self.number + 100 * place + 10_000 * dist.get_rank()
        generator = torch.Generator().manual_seed(seed)
        shape = self.kinds[name].shape
        values = torch.randint(-4, 5, shape, generator=generator)
        if dtype.is_complex:
            return torch.complex(
                values.float(), torch.randint(-4, 5, shape, generator=generator).float()
            ).to(dtype)
        return values.to(dtype)


def mean(local: torch.Tensor) -> torch.Tensor:
    """The mean over ranks of a plain tensor in double precision."""
    total = local.clone()
    dist.all_reduce(torch.view_as_real(total) if total.is_complex() else total)
    return total / WORLD_SIZE


def wrong_grads(
    module: Given, shares: Mapping[str, torch.Tensor] | None = None, skipped: Sequence[str] = ()
) -> list[str]:
    """Compares each gradient with the mean of the ranks' local gradients, in a collective call.

    Args:
        module: The module.
        shares: What this rank contributes, by name, instead of its local gradients.
        skipped: Names of parameters that are not compared.

    Returns:
        A sentence for each gradient that differs by a bit.
    """
    found = []
    shares = module.local if shares is None else shares
    for name, param in module.named().items():
        expected = mean(shares[name])
        if name in skipped:
            continue
        actual = None if param.grad is None else dense(param.grad)
        if actual is None or not torch.equal(actual, expected):
            found.append(f"{name}: {actual}, expected {expected}")
    return found
