"""Forwards and backwards in any order and number. Gradients are the mean over ranks after each."""

from __future__ import annotations

import re
import warnings

import pytest
import slow_ddp as ref
import torch
from torch import nn

from ddpx import ReducerDDP


def _bypass(model: nn.Module, number: int) -> None:
    ref.backward(model, ref.loss_of(ref.bare(model)(ref.data())))


def _bypass_now_and_then(model: nn.Module, number: int) -> None:
    ref.backward(model, ref.loss_of((ref.bare(model) if number % 2 else model)(ref.data())))


def _two_forwards_two_backwards(model: nn.Module, number: int) -> None:
    losses = [ref.loss_of(model(ref.data())) for _ in range(2)]
    for loss in losses:
        ref.backward(model, loss)


def _two_forwards_backwards_in_reverse(model: nn.Module, number: int) -> None:
    first, second = ref.loss_of(model(ref.data())), ref.loss_of(model(ref.data()))
    ref.backward(model, second)
    ref.backward(model, first)


def _two_forwards_one_bypassed(model: nn.Module, number: int) -> None:
    losses = [ref.loss_of(model(ref.data())), ref.loss_of(ref.bare(model)(ref.data()))]
    for loss in losses:
        ref.backward(model, loss)


def _two_forwards_one_backward(model: nn.Module, number: int) -> None:
    ref.backward(model, ref.loss_of(model(ref.data())) + ref.loss_of(model(ref.data())).square())


def _one_of_two_forwards(model: nn.Module, number: int) -> None:
    """The graph of the other forward is dropped."""
    loss, _ = ref.loss_of(model(ref.data())), model(ref.data())
    ref.backward(model, loss)


def _one_forward_two_backwards(model: nn.Module, number: int) -> None:
    loss = ref.loss_of(model(ref.data()))
    ref.backward(model, loss, retain_graph=True)
    ref.backward(model, loss)


def _two_losses_over_one_output(model: nn.Module, number: int) -> None:
    output = model(ref.data())
    ref.backward(model, output.square().mean(), retain_graph=True)
    ref.backward(model, output.sum())


def _evaluation_between(model: nn.Module, number: int) -> None:
    loss = ref.loss_of(model(ref.data()))
    with torch.no_grad():
        model(ref.data())
    ref.backward(model, loss)


def _first_of_two_backwards_in_no_sync(model: ref.SlowDDP | ReducerDDP, number: int) -> None:
    first, second = ref.loss_of(model(ref.data())), ref.loss_of(model(ref.data()))
    with model.no_sync():
        ref.backward(model, first)
    ref.backward(model, second)


def changed_in_place(**options: object) -> list[str]:
    """The errors of three steps in which a hook changes the gradient of another parameter."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
    model = ReducerDDP(module, **options)

    def change(_: torch.Tensor) -> None:
        grad = module[1].weight.grad
        assert grad is not None
        grad.fill_(7.0)

    module[0].weight.register_post_accumulate_grad_hook(change)
    errors = []
    for _ in range(3):
        model.zero_grad()
        try:
            model(torch.ones(2, 4)).sum().backward()
            errors.append("")
        except RuntimeError as error:
            errors.append(str(error))
    return errors


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["", "unused"])
def test_a_gradient_that_another_hook_changes_in_the_first_step(ranks, options):
    for first, *later in ranks(2).run(changed_in_place, **options):
        assert "the gradient of parameter '1.weight' was changed in place" in first
        assert later == ["", ""]


USAGES = {
    usage.__name__.strip("_"): usage
    for usage in (
        _bypass,
        _bypass_now_and_then,
        _two_forwards_two_backwards,
        _two_forwards_backwards_in_reverse,
        _two_forwards_one_bypassed,
        _two_forwards_one_backward,
        _one_of_two_forwards,
        _one_forward_two_backwards,
        _two_losses_over_one_output,
        _evaluation_between,
        _first_of_two_backwards_in_no_sync,
    )
}


def _check_usage(usage: str, mode: str) -> None:
    ours, slow = ref.make_pair(ref.Net, mode)
    ref.check_steps(ours, slow, USAGES[usage])
    ref.check_steps(ours, slow, ref.plain_step, num_steps=1)


@ref.modes
@pytest.mark.parametrize("usage", USAGES)
def test_usage(ranks, usage, mode, world):
    ref.on_ranks(ranks, world, _check_usage, usage, mode)


# For each step: whether each of its backwards is synchronized.
ACCUMULATIONS = {
    "first in no_sync": ("-+", "-+", "+"),
    "only the first in no_sync": ("-", "+", "+"),
    "as many as one likes": ("+", "-+", "---+", "+", "--+"),
    "without no_sync": ("++", "++", "+++", "+"),
    "local at the end": ("+-", "+", "+-+", "-"),
    "every second step": ("-", "+", "-", "+"),
}


def _check_accumulation(name: str, mode: str) -> None:
    steps = ACCUMULATIONS[name]

    def step(model: ref.SlowDDP | ReducerDDP, number: int) -> None:
        for sign in steps[number]:
            model.require_backward_grad_sync = sign == "+"
            ref.plain_step(model, number)
        model.require_backward_grad_sync = True

    for zero_style in ref.ZERO_STYLES:
        ours, slow = ref.make_pair(ref.Net, mode)
        ref.check_steps(ours, slow, step, len(steps), zero_style)
        ref.check_steps(ours, slow, ref.plain_step, 2, zero_style)


@ref.modes
@pytest.mark.parametrize("name", ACCUMULATIONS)
def test_accumulation(ranks, name, mode, world):
    ref.on_ranks(ranks, world, _check_accumulation, name, mode)


class Heads(nn.Module):
    """Two outputs that share a trunk, or share nothing."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 6) if shared else nn.Identity()
        self.left = nn.Linear(6, 4)
        self.right = nn.Linear(6, 2)
        self.third = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = torch.tanh(self.trunk(x))
        return self.left(hidden), self.right(hidden), self.third(hidden)


HEADS = {"shared trunk": True, "disjoint": False}
heads = pytest.mark.parametrize("kind", HEADS)


def _backward_each(model: nn.Module, number: int) -> None:
    outputs = list(model(ref.data()))
    if number % 2:
        outputs.reverse()
    for output in outputs:
        ref.backward(model, ref.loss_of(output), retain_graph=output is not outputs[-1])


def _backward_of_two_then_one(model: nn.Module, number: int) -> None:
    left, right, third = model(ref.data())
    ref.backward(model, ref.loss_of(left) + ref.loss_of(third), retain_graph=True)
    ref.backward(model, ref.loss_of(right))


ORDERS = {"one by one": _backward_each, "two, then one": _backward_of_two_then_one}


def _check_outputs(kind: str, order: str, mode: str) -> None:
    ours, slow = ref.make_pair(lambda: Heads(HEADS[kind]), mode)
    text = ref.error_of(ref.check_steps, ours, slow, ORDERS[order])
    if "static" in mode and text:
        assert "static_graph" in text, text
        assert re.search(r"'(left|right|third)\.(weight|bias)'", text), text
        ref.assert_in_step()
    else:
        assert not text, text


@ref.modes
@pytest.mark.parametrize("order", ORDERS)
@heads
def test_several_outputs_with_a_backward_each(ranks, kind, order, mode, world):
    """A static graph may instead raise an error that names the difference."""
    ref.on_ranks(ranks, world, _check_outputs, kind, order, mode)


RIGHT = {"right.weight", "right.bias"}


def _all_outputs(model: nn.Module, number: int) -> None:
    ref.backward(model, sum(ref.loss_of(output) for output in model(ref.data())))


def _check_output_never_used(kind: str, mode: str) -> None:
    """While ``right`` may still have a backward, there is no error. The next forward raises it."""
    ours, slow = ref.make_pair(lambda: Heads(HEADS[kind]), mode)
    ref.check_steps(ours, slow, _all_outputs, 2)
    ref.zero_grads("none", ours, slow)
    outputs = {}

    def without_right(model: nn.Module, number: int) -> None:
        outputs[model] = left, _, third = model(ref.data())
        ref.backward(model, ref.loss_of(left) + ref.loss_of(third))

    ref.run_both(ours, slow, without_right, 5)
    ref.assert_same(ours, slow, RIGHT)
    if "unused" in mode:
        ref.check_steps(ours, slow, without_right)
    else:
        ref.assert_names(ref.error_of(ours, ref.data()), RIGHT, "find_unused_parameters=True")
    ref.check_steps(ours, slow, _all_outputs)


@pytest.mark.parametrize("mode", ["default", "view", "unused", "unused-view"])
@heads
def test_output_that_never_had_a_backward(ranks, kind, mode, world):
    ref.on_ranks(ranks, world, _check_output_never_used, kind, mode)


def _check_output_dropped(kind: str, mode: str) -> None:
    """``right`` can have no backward any more, so the same backward reports the missing
    parameters."""
    ours, slow = ref.make_pair(lambda: Heads(HEADS[kind]), mode)

    def without_right(model: nn.Module, number: int) -> None:
        left, right, third = model(ref.data())
        del right
        ref.backward(model, ref.loss_of(left) + ref.loss_of(third))

    for number in (0, 1):
        ref.zero_grads("none", ours, slow)
        ref.seed(number)
        without_right(slow, number)
        ref.seed(number)
        text = ref.error_of(without_right, ours, number)
        ref.assert_names(text, RIGHT, "find_unused_parameters=True")
        ref.assert_same(ours, slow, RIGHT)
        ref.check_steps(ours, slow, _all_outputs, 2)


@pytest.mark.parametrize("mode", ["default", "view"])
@heads
def test_output_that_was_dropped(ranks, kind, mode, world):
    ref.on_ranks(ranks, world, _check_output_dropped, kind, mode)


def _check_create_graph(mode: str) -> None:
    """First-order gradients are averaged.

    Each then holds a graph, unless ``grad`` is set to None.
    """
    ours, slow = ref.make_pair(ref.Net, mode)

    def step(model: nn.Module, number: int) -> None:
        ref.backward(model, ref.loss_of(model(ref.data())), create_graph=True)

    for zero_style in ("none", "zeros"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of torch about reference cycles, and of ddpx
            ref.check_steps(ours, slow, step, 2, zero_style)
        for param in [*ours.parameters(), *slow.parameters()]:
            param.grad = None if param.grad is None else param.grad.detach()
        ref.check_steps(ours, slow, ref.plain_step, 2, zero_style)


@ref.modes
def test_create_graph(ranks, mode, world):
    ref.on_ranks(ranks, world, _check_create_graph, mode)
