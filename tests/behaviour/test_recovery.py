"""The step after a failed step, and ``reset()``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import slow_ddp as ref
import torch
from raising import Raises
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
    ref.backward(model, ref.loss_of(model(ref.data())))


def _accumulating_step(model: ref.SlowDDP | ReducerDDP, number: int) -> None:
    with model.no_sync():
        _step(model, number)
    _step(model, number)


def _fail(ours: ReducerDDP, failure: str) -> None:
    expected = torch.OutOfMemoryError if failure == "out of memory" else RuntimeError
    with pytest.raises(expected, match=r"user code failed|out of memory"):
        ref.loss_of(ours(ref.data(), failure)).backward()


def _check_failure(failure: str, mode: str) -> None:
    """A failure on all ranks, in the first, second and fourth step, also within ``no_sync()``."""
    for when, reset in ((0, False), (1, True), (3, False)):
        ours, slow = ref.make_pair(Fragile, mode)
        ref.check_steps(ours, slow, _step, when)
        _fail(ours, failure)
        if reset:
            ours.reset()
        ref.check_steps(ours, slow, _step, 2)
        with ours.no_sync():
            _fail(ours, failure)
        ref.check_steps(ours, slow, _accumulating_step, 2)


@ref.modes
@pytest.mark.parametrize("failure", FAILURES)
def test_step_after_a_failure(ranks, failure, mode, world):
    ref.on_ranks(ranks, world, _check_failure, failure, mode)


def _check_kept_gradients(failure: str, mode: str) -> None:
    """A loop that zeroes its gradients in place after a failure."""
    ours, slow = ref.make_pair(Fragile, mode)
    for _ in range(2):
        ref.check_steps(ours, slow, _step, 2, "zeros")
        _fail(ours, failure)
        ref.zero_grads("zeros", ours, slow)
        ref.check_steps(ours, slow, _step, 2, "keep")


@ref.modes
@pytest.mark.parametrize("failure", ["function", "out of memory"])
def test_gradients_zeroed_after_a_failure(ranks, failure, mode, world):
    ref.on_ranks(ranks, world, _check_kept_gradients, failure, mode)


def _check_reset(mode: str) -> None:
    """reset() changes no gradient and costs no step, wherever it is called between backwards."""
    ours, slow = ref.make_pair(Fragile, mode)

    def reset(model: nn.Module) -> None:
        if isinstance(model, ReducerDDP):
            model.reset()

    def with_resets(model: ref.SlowDDP | ReducerDDP, number: int) -> None:
        reset(model)
        with model.no_sync():
            _step(model, number)
            reset(model)
        loss = ref.loss_of(model(ref.data()))
        if number % 2:
            reset(model)
        ref.backward(model, loss)
        reset(model)
        reset(model)

    reset(ours)
    for zero_style in ("none", "zeros", "keep"):
        ref.check_steps(ours, slow, with_resets, 3, zero_style)
    ref.check_steps(ours, slow, _step, 2)
    for number in range(2):
        ref.zero_grads("none", ours, slow)
        ref.run_both(ours, slow, with_resets, number)
        held = [param.grad for param in ours.parameters()]
        ours.reset()
        ref.assert_same(ours, slow)
        assert all(a is b for a, b in zip(held, (p.grad for p in ours.parameters()), strict=True))
    ref.assert_in_step()


@ref.modes
def test_reset_between_steps(ranks, mode, world):
    ref.on_ranks(ranks, world, _check_reset, mode)


def _check_reset_within_backward(mode: str) -> None:
    """reset() is refused within a backward.

    The backward continues if its caller catches the error.
    """
    ours, slow = ref.make_pair(Fragile, mode)
    texts: list[str] = []
    handle = ours.module.second.weight.register_hook(
        lambda grad: texts.append(ref.error_of(ours.reset))
    )
    ref.check_steps(ours, slow, _step, 2)
    assert len(texts) == 2 and all("backward" in text for text in texts), texts
    handle.remove()
    ref.seed(0)
    ref.check_steps(ours, slow, _step, 2)


@ref.modes
def test_reset_within_backward(ranks, mode, world):
    ref.on_ranks(ranks, world, _check_reset_within_backward, mode)


class _TwoHeads(nn.Module):
    """The backward of the second output raises before any gradient arrives, if ``fails`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(6, 3)
        self.right = nn.Linear(6, 3)
        self.fails = False

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        right = self.right(x)
        return self.left(x), Raises.apply(right) if self.fails else right


def _both(model: nn.Module, number: int) -> None:
    left, right = model(ref.data())
    ref.backward(model, ref.loss_of(left) + ref.loss_of(right))


def _check_second_backward(mode: str) -> None:
    """The first backward of a forward ends its step. The second one raises."""
    ours, slow = ref.make_pair(_TwoHeads, mode)
    ref.check_steps(ours, slow, _both, 2)
    ours.module.fails = True
    left, right = ours(ref.data())
    ref.loss_of(left).backward()
    with pytest.raises(RuntimeError, match="user code failed"):
        ref.loss_of(right).backward()
    ours.module.fails = False
    ref.check_steps(ours, slow, _both, 2)
    ours.module.fails = True
    _, right = ours(ref.data())
    with pytest.raises(RuntimeError, match="user code failed"):
        ref.loss_of(right).backward()
    ours.require_manual_backward_finalization = True  # no backward is expected
    ref.assert_in_step()


@pytest.mark.parametrize("mode", ["default", "view", "unused", "unused-view"])
def test_second_backward_of_a_forward_fails(ranks, mode):
    ref.on_ranks(ranks, 2, _check_second_backward, mode)


def _check_backward_in_hook_of_leaf(mode: str) -> None:
    """No node of the outer backward is left, so its end is not known. The next forward raises."""
    ours, slow = ref.make_pair(ref.Net, mode)
    ref.check_steps(ours, slow, ref.plain_step, 2)
    ours.zero_grad()
    outer = torch.ones(1, dtype=torch.float64, requires_grad=True)

    def run_inner(_: torch.Tensor) -> None:
        with torch.enable_grad():
            ours.module.first(ref.data()).sum().backward()

    outer.register_hook(run_inner)
    outer.sum().backward()
    text = ref.error_of(ours, ref.data())
    names = ["second.weight", "second.bias", "third.weight", "third.bias"]
    ref.assert_names(text, names, "the last backward ended without gradients")
    ref.check_steps(ours, slow, ref.plain_step, 2)


@ref.modes
def test_backward_in_a_hook_of_a_leaf(ranks, mode):
    ref.on_ranks(ranks, 2, _check_backward_in_hook_of_leaf, mode)
