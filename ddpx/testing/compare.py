"""Trains a model under DDP and under ReducerDDP and compares every bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx.ddp.module import ReducerDDP
from ddpx.errors import count
from ddpx.testing.events import Event, compare, describe

Build = Callable[[], nn.Module]
Wrap = Callable[[nn.Module], nn.Module]
Step = Callable[[nn.Module, int], None]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Trace:
    """The tensors of a training on one rank.

    Attributes:
        steps: The tensors of each step, by kind and name. None for a missing gradient.

    Example:
        >>> from ddpx.testing import record_training
        >>> def step(model, number):
        ...     model(torch.randn(8, 4)).sum().backward()
        >>> trace = record_training(lambda: module, ddpx.ReducerDDP, step, num_steps=1)
        >>> sorted(trace.steps[0])[:2]
        ['gradient of module.bias', 'gradient of module.weight']
    """

    steps: tuple[dict[str, torch.Tensor | None], ...]


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison of two traces on one rank.

    Attributes:
        num_tensors: The number of compared tensors: gradients, parameters and buffers.
        differences: A sentence for each tensor that differs in a bit, or in its strides.

    Example:
        >>> from ddpx.testing import Comparison
        >>> Comparison(2, ("step 0: parameter weight differs",)).identical
        False
    """

    num_tensors: int
    differences: tuple[str, ...]

    @property
    def identical(self) -> bool:
        """True if there are no differences."""
        return not self.differences

    def raise_if_different(self) -> None:
        """Raises an error if there are differences.

        Raises:
            AssertionError: The text lists all differences.

        Example:
            >>> from ddpx.testing import Comparison
            >>> comparison = Comparison(2, ("step 0: parameter weight differs",))
            >>> comparison.raise_if_different()
            Traceback (most recent call last):
                ...
            AssertionError: step 0: parameter weight differs
        """
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
    """Trains a model and records its tensors.

    Every rank of an initialized process group calls this function. The trace has the gradients
    before each optimizer step, and the parameters and buffers after the optimizer step. Ranks
    build models with different weights, so the training also tests the broadcast of the wrapper.

    Args:
        build: Returns a new model.
        wrap: Wraps the model for data parallelism, and returns the wrapper.
        step: Runs forward and backward of one step. Its arguments are the wrapped model and the
            number of the step, from 0. ``step`` draws data from torch's generator, which is
            seeded by step and rank.
        num_steps: The number of steps. Default 5.
        make_optimizer: Returns an optimizer for parameters. Default: SGD with a learning rate of
            0.1 and a momentum of 0.9.
        set_to_none: The argument of ``zero_grad`` before each step. None keeps gradients. Default
            True.
        seed: The seed of weights and data. Default 0.

    Returns:
        A :class:`Trace`, with one entry for each step.

    Example:
        >>> from ddpx.testing import record_training
        >>> def step(model, number):
        ...     model(torch.randn(8, 4)).sum().backward()
        >>> trace = record_training(lambda: module, ddpx.ReducerDDP, step)
        >>> len(trace.steps)
        5
    """
    rank = dist.get_rank()
    torch.manual_seed(seed + 7919 * rank)
    model = wrap(build())
    optimizer = make_optimizer(p for p in model.parameters() if p.requires_grad)
    steps = []
    for number in range(num_steps):
        if set_to_none is not None:
            optimizer.zero_grad(set_to_none=set_to_none)
        _seed_data(seed + 7919 * rank + 104729 * (number + 1))
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


def _seed_data(seed: int) -> None:
    """Like ``torch.manual_seed()``, which on a machine without accelerators formats the stack."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def compare_traces(expected: Trace, actual: Trace) -> Comparison:
    """Compares two traces bit for bit.

    The sign of zero, the payload of NaN and the strides must be equal, too.

    Args:
        expected: The first trace.
        actual: The second trace.

    Returns:
        A :class:`Comparison`.

    Example:
        >>> from ddpx.testing import Trace, compare_traces
        >>> left = Trace(({"weight": torch.tensor([0.0])},))
        >>> right = Trace(({"weight": torch.tensor([-0.0])},))
        >>> compare_traces(left, right).differences
        ('step 0: weight differs in 1 of 1 element, largest difference 0',)
    """
    verdict = compare([_events(expected)], [_events(actual)])
    texts = []
    for difference in verdict.differences:
        number = difference.step
        if difference.expected is None or difference.actual is None:
            texts.append(f"{count(len(expected.steps), 'step')} against {len(actual.steps)}")
            continue
        left, right = expected.steps[number], actual.steps[number]
        for name in difference.names:
            both = name in left and name in right
            text = describe(left[name], right[name]) if both else "is in one trace only"
            texts.append(f"step {number}: {name} {text}")
    return Comparison(verdict.num_values.get("step", 0), tuple(texts))


def _events(trace: Trace) -> list[Event]:
    return [Event.of("step", number, 0, tensors) for number, tensors in enumerate(trace.steps)]


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
    """Trains a model under DDP and under ReducerDDP, and compares the results on this rank.

    Every rank of an initialized process group calls this function. Except for ``options``, the
    arguments are those of :func:`record_training`.

    Args:
        build: Returns a new model.
        step: Runs forward and backward of one step.
        num_steps: The number of steps. Default 5.
        make_optimizer: Returns an optimizer for parameters. Default: SGD with momentum.
        set_to_none: The argument of ``zero_grad`` before each step. None keeps gradients. Default
            True.
        seed: The seed of weights and data. Default 0.
        options: Further arguments of both wrappers.

    Returns:
        A :class:`Comparison`.

    Example:
        >>> from ddpx.testing import compare_with_ddp
        >>> def step(model, number):
        ...     model(torch.randn(8, 16)).square().mean().backward()
        >>> compare_with_ddp(lambda: nn.Linear(16, 4), step).raise_if_different()
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


def summarize(comparisons: Sequence[Comparison]) -> Comparison:
    """Merges the comparisons of all ranks. Each difference begins with its rank."""
    return Comparison(
        sum(comparison.num_tensors for comparison in comparisons),
        tuple(
            f"rank {rank}, {difference}"
            for rank, comparison in enumerate(comparisons)
            for difference in comparison.differences
        ),
    )
