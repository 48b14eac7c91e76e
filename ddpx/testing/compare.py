"""Trains a model under DDP and under ReducerDDP and compares every bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx.module import ReducerDDP

Build = Callable[[], nn.Module]
Wrap = Callable[[nn.Module], nn.Module]
Step = Callable[[nn.Module, int], None]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Trace:
    """What a training did, step by step: tensors by kind and name; None for a missing gradient."""

    steps: tuple[dict[str, torch.Tensor | None], ...]


@dataclass(frozen=True)
class Comparison:
    """The outcome of comparing two traces on one rank.

    Attributes:
        num_tensors: how many tensors (gradients, parameters, buffers) were compared.
        differences: one sentence for each that differs in any bit, or in its strides.
    """

    num_tensors: int
    differences: tuple[str, ...]

    @property
    def identical(self) -> bool:
        return not self.differences

    def raise_if_different(self) -> None:
        """Raises AssertionError with all differences."""
        if self.differences:
            raise AssertionError("\n".join(self.differences))


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def record_training(
    build: Build,
    wrap: Wrap,
    step: Step,
    *,
    num_steps: int = 5,
    make_optimizer: MakeOptimizer = sgd,
    set_to_none: bool | None = True,
    seed: int = 0,
) -> Trace:
    """Trains on this rank and records gradients before, and parameters after, each optimizer step.

    Ranks build models with different weights, so that the wrapper's broadcast is tested too.

    Args:
        build: makes the model.
        wrap: wraps it for data parallelism.
        step: runs forward and backward of one step, given the wrapped model and the step's number.
            It draws its data from torch's generator, which is seeded by step and rank.
        set_to_none: as for ``zero_grad`` before each step; None to keep gradients.
        seed: of everything random.
    """
    rank = dist.get_rank()
    torch.manual_seed(seed + 7919 * rank)
    model = wrap(build())
    optimizer = make_optimizer(p for p in model.parameters() if p.requires_grad)
    steps = []
    for number in range(num_steps):
        if set_to_none is not None:
            optimizer.zero_grad(set_to_none=set_to_none)
        torch.manual_seed(seed + 7919 * rank + 104729 * (number + 1))
        step(model, number)
        record: dict[str, torch.Tensor | None] = {}
        for name, param in model.named_parameters():
            record[f"gradient of {name}"] = None if param.grad is None else param.grad.clone()
        optimizer.step()
        for name, param in model.named_parameters():
            record[f"parameter {name}"] = param.detach().clone()
        for name, buffer in model.named_buffers():
            record[f"buffer {name}"] = buffer.clone()
        steps.append(record)
    return Trace(tuple(steps))


def compare_traces(expected: Trace, actual: Trace) -> Comparison:
    """Compares bit for bit: the sign of zero and the payload of NaN count, and so do strides."""
    num_tensors = 0
    differences = []
    if len(expected.steps) != len(actual.steps):
        differences.append(f"{len(expected.steps)} steps against {len(actual.steps)}")
    for number, (left, right) in enumerate(zip(expected.steps, actual.steps, strict=False)):
        for name in left.keys() ^ right.keys():
            differences.append(f"step {number}: {name} is in one trace only")
        for name in left.keys() & right.keys():
            num_tensors += 1
            difference = _difference(left[name], right[name])
            if difference:
                differences.append(f"step {number}: {name} {difference}")
    return Comparison(num_tensors, tuple(differences))


def compare_with_ddp(
    build: Build,
    step: Step,
    *,
    num_steps: int = 5,
    make_optimizer: MakeOptimizer = sgd,
    set_to_none: bool | None = True,
    seed: int = 0,
    **options: Any,
) -> Comparison:
    """Trains ``build()`` under torch's DDP, then under ReducerDDP; compares on this rank.

    To be called on every rank of an initialised process group. ``options`` go to both wrappers;
    the other arguments are those of :func:`record_training`.

    Example::

        def step(model, number):
            model(torch.randn(8, 16)).square().mean().backward()

        compare_with_ddp(lambda: nn.Linear(16, 4), step).raise_if_different()
    """
    traces = [
        record_training(
            build,
            lambda module, wrapper=wrapper: wrapper(module, **options),  # type: ignore[misc]
            step,
            num_steps=num_steps,
            make_optimizer=make_optimizer,
            set_to_none=set_to_none,
            seed=seed,
        )
        for wrapper in (DistributedDataParallel, ReducerDDP)
    ]
    return compare_traces(*traces)


def _difference(expected: torch.Tensor | None, actual: torch.Tensor | None) -> str:
    """What differs, or an empty string."""
    if expected is None or actual is None:
        return "" if expected is actual else f"is {_kind(expected)} against {_kind(actual)}"
    if expected.is_sparse or actual.is_sparse:
        if expected.is_sparse != actual.is_sparse:
            return f"is {_kind(expected)} against {_kind(actual)}"
        expected, actual = expected.to_dense(), actual.to_dense()
    for what, left, right in (
        ("dtype", expected.dtype, actual.dtype),
        ("shape", tuple(expected.shape), tuple(actual.shape)),
        ("strides", expected.stride(), actual.stride()),
    ):
        if left != right:
            return f"has {what} {left} against {right}"
    left_bytes, right_bytes = _bytes(expected), _bytes(actual)
    if torch.equal(left_bytes, right_bytes):
        return ""
    width = expected.element_size()
    num_different = int((left_bytes != right_bytes).view(-1, width).any(1).sum())
    elements = "element" if expected.numel() == 1 else "elements"
    text = f"differs in {num_different} of {expected.numel()} {elements}"
    if expected.dtype == torch.bool:
        return text
    return f"{text}, largest difference {(expected - actual).abs().max().item():.3g}"


def _kind(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else "sparse" if tensor.is_sparse else "dense"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8)


def summarize(comparisons: Sequence[Comparison]) -> Comparison:
    """The comparisons of all ranks as one, each difference with its rank in front."""
    return Comparison(
        sum(comparison.num_tensors for comparison in comparisons),
        tuple(
            f"rank {rank}, {difference}"
            for rank, comparison in enumerate(comparisons)
            for difference in comparison.differences
        ),
    )
