"""The step after a failed step, and ``reset()``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from raising import Raises
from slow_ddp import (
    SlowDDP,
    assert_in_step,
    assert_same,
    backward,
    check_steps,
    data,
    error_of,
    loss_of,
    make_pair,
    modes,
    on_ranks,
    run_both,
    seed,
    zero_grads,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddpx import ReducerDDP


class Fragile(nn.Module):
    """``failure`` selects the error in the middle of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.second = nn.Linear(7, 7)
        self.third = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor, failure: str = "") -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if failure == "forward":
            raise RuntimeError("user code failed")
        if "checkpoint" in failure:
            reentrant = "non" not in failure
            hidden = checkpoint(self._middle, hidden, "function", use_reentrant=reentrant)
        else:
            hidden = self._middle(hidden, failure)
        return self.third(torch.tanh(hidden))

    def _middle(self, hidden: torch.Tensor, failure: str) -> torch.Tensor:
        hidden = self.second(hidden)
        if failure == "function":
            hidden = Raises.apply(hidden)
        elif failure == "hook":
            hidden.register_hook(_raise)
        elif failure == "out of memory":
            hidden.register_hook(_raise_out_of_memory)
        return hidden


def _raise(grad: torch.Tensor) -> None:
    raise RuntimeError("user code failed")


def _raise_out_of_memory(grad: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


FAILURES = (
    "function",
    "hook",
    "out of memory",
    "forward",
    "reentrant checkpoint",
    "non-reentrant checkpoint",
)
Between = Callable[[ReducerDDP], None]


def _step(model: nn.Module, number: int) -> None:
    backward(model, loss_of(model(data())))


def _accumulating_step(model: SlowDDP | ReducerDDP, number: int) -> None:
    with model.no_sync():
        _step(model, number)
    _step(model, number)


def _fail(ours: ReducerDDP, failure: str) -> None:
    expected = torch.OutOfMemoryError if failure == "out of memory" else RuntimeError
    with pytest.raises(expected, match=r"user code failed|out of memory"):
        loss_of(ours(data(), failure)).backward()


def _check_failure(failure: str, mode: str) -> None:
    """A failure on all ranks, in the first, second and fourth step, also within ``no_sync()``."""
    for when, reset in ((0, False), (1, True), (3, False)):
        ours, slow = make_pair(Fragile, mode)
        check_steps(ours, slow, _step, when)
        _fail(ours, failure)
        if reset:
            ours.reset()
        check_steps(ours, slow, _step, 2)
        with ours.no_sync():
            _fail(ours, failure)
        check_steps(ours, slow, _accumulating_step, 2)


@modes
@pytest.mark.parametrize("failure", FAILURES)
def test_step_after_a_failure(ranks, failure, mode, world):
    on_ranks(ranks, world, _check_failure, failure, mode)


def _check_kept_gradients(failure: str, mode: str) -> None:
    """A loop that zeroes its gradients in place after a failure."""
    ours, slow = make_pair(Fragile, mode)
    for _ in range(2):
        check_steps(ours, slow, _step, 2, "zeros")
        _fail(ours, failure)
        zero_grads("zeros", ours, slow)
        check_steps(ours, slow, _step, 2, "keep")


@modes
@pytest.mark.parametrize("failure", ["function", "out of memory"])
def test_gradients_zeroed_after_a_failure(ranks, failure, mode, world):
    on_ranks(ranks, world, _check_kept_gradients, failure, mode)


def _check_reset(mode: str) -> None:
    """reset() changes no gradient and costs no step, wherever it is called between backwards."""
    ours, slow = make_pair(Fragile, mode)

    def reset(model: nn.Module) -> None:
        if isinstance(model, ReducerDDP):
            model.reset()

    def with_resets(model: SlowDDP | ReducerDDP, number: int) -> None:
        reset(model)
        with model.no_sync():
            _step(model, number)
            reset(model)
        loss = loss_of(model(data()))
        if number % 2:
            reset(model)
        backward(model, loss)
        reset(model)
        reset(model)

    reset(ours)
    for zero_style in ("none", "zeros", "keep"):
        check_steps(ours, slow, with_resets, 3, zero_style)
    check_steps(ours, slow, _step, 2)
    for number in range(2):
        zero_grads("none", ours, slow)
        run_both(ours, slow, with_resets, number)
        held = [param.grad for param in ours.parameters()]
        ours.reset()
        assert_same(ours, slow)
        assert all(a is b for a, b in zip(held, (p.grad for p in ours.parameters()), strict=True))
    assert_in_step()


@modes
def test_reset_between_steps(ranks, mode, world):
    on_ranks(ranks, world, _check_reset, mode)


def _check_reset_within_backward(mode: str) -> None:
    """reset() is refused within a backward.

    The backward continues if its caller catches the error.
    """
    ours, slow = make_pair(Fragile, mode)
    texts: list[str] = []
    handle = ours.module.second.weight.register_hook(
        lambda grad: texts.append(error_of(ours.reset))
    )
    check_steps(ours, slow, _step, 2)
    assert len(texts) == 2 and all("backward" in text for text in texts), texts
    handle.remove()
    seed(0)
    check_steps(ours, slow, _step, 2)


@modes
def test_reset_within_backward(ranks, mode, world):
    on_ranks(ranks, world, _check_reset_within_backward, mode)
