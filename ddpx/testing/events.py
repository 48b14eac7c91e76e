"""The events of a training, with digests in place of tensors, and their comparison."""

from __future__ import annotations

import ctypes
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from ddpx.errors import count

Tensors = Mapping[str, torch.Tensor | None]  # by name; None for a missing gradient

_DIGEST_BYTES = 16
# The order within a step. The weights of step 0 precede step 1.
_ORDER = ("step", "weight", "loss", "gradient")


@dataclass(frozen=True)
class Event:
    """Losses, gradients or weights of one step.

    Attributes:
        kind: "loss", "gradient" or "weight". "step" for all tensors of a step together.
        step: The number of the synchronized backward, from 1. The step of weights is the step that
            made them, and 0 at the start.
        model: The number of the wrapper, from 0, in the order of construction. -1 for a loss.
        values: Losses as decimal text and tensors as digests, by name. None for a missing gradient.
    """

    kind: str
    step: int
    model: int
    values: dict[str, str | None]

    @classmethod
    def of(cls, kind: str, step: int, model: int, tensors: Tensors) -> Event:
        """An event with the digests of tensors."""
        return cls(kind, step, model, {name: digest(t) for name, t in tensors.items()})


@dataclass(frozen=True)
class Difference:
    """An event that differs between two trainings.

    Attributes:
        rank: The rank of the event.
        index: The index of the event on this rank.
        expected: The event of the first training. None if the training has no such event.
        actual: The event of the second training. None if the training has no such event.
    """

    rank: int
    index: int
    expected: Event | None
    actual: Event | None

    @property
    def event(self) -> Event:
        """The event of one of the trainings."""
        event = self.expected or self.actual
        assert event is not None
        return event

    @property
    def same_course(self) -> bool:
        """Whether both trainings have the same kind of event with other values."""
        return (
            self.expected is not None
            and self.actual is not None
            and _what(self.expected) == _what(self.actual)
        )

    @property
    def names(self) -> list[str]:
        """The names of the values that differ, in order."""
        if self.expected is None or self.actual is None:
            return []
        left, right = self.expected.values, self.actual.values
        return [name for name in left | right if left.get(name, "") != right.get(name, "")]

    @property
    def step(self) -> int:
        """The step of the event."""
        return self.event.step


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison.

    Attributes:
        num_values: The number of compared losses, gradients and weights, by kind.
        differences: All differences. The earliest difference is first.
    """

    num_values: dict[str, int]
    differences: tuple[Difference, ...]

    @property
    def identical(self) -> bool:
        """Whether there is no difference."""
        return not self.differences


def compare(expected: Sequence[Sequence[Event]], actual: Sequence[Sequence[Event]]) -> Verdict:
    """Compares the events of each rank bit for bit.

    The comparison of a rank ends at an event that only one training has.
    """
    num_values: Counter[str] = Counter()
    differences = []
    for rank, (left, right) in enumerate(zip(expected, actual, strict=True)):
        for index, (one, other) in enumerate(zip_longest(left, right)):
            if one != other:
                difference = Difference(rank, index, one, other)
                differences.append(difference)
                if not difference.same_course:
                    break
            num_values[one.kind] += len(one.values)
    differences.sort(key=_when)
    return Verdict(dict(num_values), tuple(differences))


def digest(tensor: torch.Tensor | None) -> str | None:
    """The digest of every bit, and of dtype, shape and strides. A sparse tensor is coalesced."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    header, parts = "", [tensor]
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        header, parts = f"sparse {tuple(tensor.shape)}", [tensor.indices(), tensor.values()]
    state = hashlib.blake2b(header.encode(), digest_size=_DIGEST_BYTES)
    for part in parts:
        state.update(f"{part.dtype} {tuple(part.shape)} {part.stride()}".encode())
        bits = _bits(part)
        if bits.numel():
            # Needs neither numpy nor a copy.
            state.update((ctypes.c_ubyte * bits.numel()).from_address(bits.data_ptr()))
    return state.hexdigest()


def describe(expected: torch.Tensor | None, actual: torch.Tensor | None) -> str:
    """Describes the difference of two tensors with different digests."""
    if expected is None or actual is None or expected.is_sparse != actual.is_sparse:
        return f"is {_layout(expected)} against {_layout(actual)}"
    if expected.is_sparse:
        expected, actual = expected.to_dense(), actual.to_dense()
    for what, left, right in (
        ("dtype", expected.dtype, actual.dtype),
        ("shape", tuple(expected.shape), tuple(actual.shape)),
        ("strides", expected.stride(), actual.stride()),
    ):
        if left != right:
            return f"has {what} {left} against {right}"
    different = (_bits(expected) != _bits(actual)).view(-1, expected.element_size()).any(1)
    if not different.any():  # sparse tensors: one has explicit zeros
        return "has other indices"
    text = f"differs in {int(different.sum())} of {count(expected.numel(), 'element')}"
    if expected.dtype == torch.bool:
        return text
    # Unsigned integers have no negative differences, and 8-bit floats no subtraction.
    wide = torch.complex128 if expected.is_complex() else torch.float64
    if expected.dtype == torch.int64:
        wide = torch.int64
    distances = (expected.detach().cpu().to(wide) - actual.detach().cpu().to(wide)).abs()
    return f"{text}, largest difference {distances.max().item():.3g}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the values in order, without a copy where the tensor allows it."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = flat.as_strided((flat.numel(),), (1,))
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8)


def _layout(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else "sparse" if tensor.is_sparse else "dense"


def _what(event: Event) -> tuple[str, int, int, tuple[str, ...]]:
    return event.kind, event.step, event.model, tuple(event.values)


def _when(difference: Difference) -> tuple[float, int, int, int]:
    event = difference.event
    # The weights of a step follow all other events of the step.
    late = 0.5 if event.kind == "weight" else 0.0
    return event.step + late, _ORDER.index(event.kind), difference.index, difference.rank
