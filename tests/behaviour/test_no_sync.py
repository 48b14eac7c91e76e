"""Which backwards average: the rule of docs/gradient_accumulation.md, for forwards and
backwards."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import slow_ddp as ref
import torch
import torch.distributed as dist
from raising import TEXT, Raises
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP

Model = ref.SlowDDP | ReducerDDP | DistributedDataParallel


def _local(model: Model, loss: torch.Tensor) -> None:
    """The rule for ReducerDDP, written out for the reference."""
    if isinstance(model, ref.SlowDDP):
        with model.no_sync():
            ref.backward(model, loss)
    else:
        ref.backward(model, loss)


def _prepare(model: Model) -> None:
    if not isinstance(model, ref.SlowDDP):
        model.reducer.prepare_for_backward([])


def _forward_inside(model: Model, forward: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    with model.no_sync():
        return ref.loss_of(forward(ref.data()))


def _both_inside(model: Model) -> None:
    """The end of an inner context has no effect."""
    with model.no_sync():
        with model.no_sync():
            pass
        ref.backward(model, ref.loss_of(model(ref.data())))


def _backward_inside(model: Model) -> None:
    loss = ref.loss_of(model(ref.data()))
    with model.no_sync():
        ref.backward(model, loss)


def _forward_inside_alone(model: Model) -> None:
    _local(model, _forward_inside(model, model))


def _two_forwards_inside(model: Model) -> None:
    _local(model, _forward_inside(model, model) + _forward_inside(model, model).square())


def _prepared_backward_inside(model: Model) -> None:
    """prepare_for_backward() announces a later backward."""
    _prepare(model)
    _both_inside(model)
    ref.backward(model, _forward_inside(model, model))


def _prepared_before_a_penalty(model: Model) -> None:
    """autograd.grad() for inputs is not the announced backward."""
    loss = _forward_inside(model, model)
    _prepare(model)
    x = ref.data().requires_grad_()
    with model.no_sync():
        output = model(x).sum()
    (grad,) = torch.autograd.grad(output, x, create_graph=True)
    ref.backward(model, loss + grad.square().mean())


def _both_outside(model: Model) -> None:
    ref.backward(model, ref.loss_of(model(ref.data())))


def _prepared(model: Model) -> None:
    loss = _forward_inside(model, model)
    _prepare(model)
    ref.backward(model, loss)


def _prepared_once(model: Model) -> None:
    _prepared(model)
    _forward_inside_alone(model)


def _bypass_inside(model: Model) -> None:
    ref.backward(model, _forward_inside(model, model.module))


def _bypass_outside(model: Model) -> None:
    ref.backward(model, ref.loss_of(model.module(ref.data())))


def _bypass_after_outside(model: Model) -> None:
    """The output of the forward outside no_sync has no backward."""
    model(ref.data())
    _bypass_outside(model)


def _inside_after_outside(model: Model) -> None:
    """The output of the forward outside no_sync has no backward."""
    model(ref.data())
    _forward_inside_alone(model)


def _inside_then_outside(model: Model) -> None:
    """Backward goes through the later forward first, so the first forward's gradients come late."""
    ref.backward(model, _forward_inside(model, model) + ref.loss_of(model(ref.data())))


def _outside_then_inside(model: Model) -> None:
    loss = ref.loss_of(model(ref.data()))
    ref.backward(model, loss + _forward_inside(model, model))


LOCAL = (
    _both_inside,
    _backward_inside,
    _forward_inside_alone,
    _two_forwards_inside,
    _inside_after_outside,
)
AVERAGED = (
    _both_outside,
    _prepared,
    _prepared_before_a_penalty,
    _bypass_inside,
    _bypass_outside,
    _bypass_after_outside,
    _inside_then_outside,
    _outside_then_inside,
)
MIXED = (_prepared_once, _prepared_backward_inside)


def _check(usage: Callable[[Model], None], mode: str) -> None:
    ours, slow = ref.make_pair(ref.Net, mode)

    def step(model: Model, number: int) -> None:
        usage(model)

    def accumulated(model: Model, number: int) -> None:
        usage(model)
        ref.plain_step(model, number)

    ref.check_steps(ours, slow, step, num_steps=4)
    ref.check_steps(ours, slow, accumulated, num_steps=2)


@ref.modes
@pytest.mark.parametrize("usage", LOCAL + AVERAGED + MIXED, ids=lambda usage: usage.__name__)
def test_gradients(ranks, usage, mode, world):
    ref.on_ranks(ranks, world, _check, usage, mode)


def _check_communication(usage: Callable[[Model], None], mode: str, num_steps: int) -> None:
    ours, _ = ref.make_pair(ref.Net, mode)
    for number in range(3):  # buckets are rebuilt after the first or second step
        ref.plain_step(ours, number)
    before = ours.reducer.num_steps
    with torch.profiler.profile() as profile:
        usage(ours)
    assert ours.reducer.num_steps - before == num_steps
    marks = ("gloo:", "shm:", "c10d")
    sends = any(mark in event.name for event in profile.events() for mark in marks)
    assert sends == (num_steps > 0)


@ref.modes
@pytest.mark.parametrize("usage", LOCAL, ids=lambda usage: usage.__name__)
def test_a_local_micro_step_communicates_nothing(ranks, usage, mode):
    ref.on_ranks(ranks, 2, _check_communication, usage, mode, 0)


@ref.modes
@pytest.mark.parametrize("usage", AVERAGED, ids=lambda usage: usage.__name__)
def test_an_averaged_one_is_one_step(ranks, usage, mode):
    ref.on_ranks(ranks, 2, _check_communication, usage, mode, 1)


class Hidden:
    """An output type in which no tensor can be found."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Hides(ref.Net):
    def forward(self, x: torch.Tensor) -> Hidden:
        return Hidden(super().forward(x))


def _hidden_inside(model: Model) -> None:
    with model.no_sync():
        output = model(ref.data())
    ref.backward(model, ref.loss_of(output.tensor))


def _check_hidden(mode: str) -> None:
    ours, slow = ref.make_pair(Hides, mode)
    ref.check_steps(ours, slow, lambda model, number: _hidden_inside(model))


@ref.modes
def test_an_output_that_cannot_be_watched_counts_as_outside(ranks, mode):
    ref.on_ranks(ranks, 2, _check_hidden, mode)


def _check_failed_backward(mode: str) -> None:
    """A failed backward has no effect on the rule. The next backward follows its own forward."""
    ours, slow = ref.make_pair(ref.Net, mode)

    def fail(grad: torch.Tensor) -> None:
        raise RuntimeError("on purpose")

    for prepared in (False, True):
        loss = _forward_inside(ours, ours)
        handle = ours.module.first.weight.register_hook(fail)
        if prepared:
            _prepare(ours)
        assert "on purpose" in ref.error_of(loss.backward)
        handle.remove()
        ours.zero_grad()
        slow.zero_grad()
        for model in (slow, ours):
            ref.seed(3)
            _forward_inside_alone(model)
        ref.assert_same(ours, slow)
    ref.check_steps(ours, slow, ref.plain_step)


def _check_failed_above(mode: str) -> None:
    """reset() discards an announcement whose backward failed before it reached the wrapper."""
    ours, slow = ref.make_pair(ref.Net, mode)
    loss = Raises.apply(_forward_inside(ours, ours))
    _prepare(ours)
    assert TEXT in ref.error_of(loss.backward)
    ours.reset()
    for model in (slow, ours):
        ref.seed(3)
        _forward_inside_alone(model)
    ref.assert_same(ours, slow)
    assert ours.reducer.num_steps == 0
    ref.check_steps(ours, slow, ref.plain_step)


@ref.modes
def test_after_a_backward_that_raised_above_the_wrapper(ranks, mode):
    ref.on_ranks(ranks, 2, _check_failed_above, mode)


@ref.modes
def test_after_a_backward_that_raised(ranks, mode):
    ref.on_ranks(ranks, 2, _check_failed_backward, mode)


def _check_refused_gradients() -> None:
    """A refused autograd.grad() has no effect on later backwards.

    With an announced backward, autograd.grad() is refused, even if forward bypasses the wrapper.
    """
    ours, slow = ref.make_pair(ref.Net, "default")
    params = list(ours.parameters())
    for bypass in (False, True):
        loss = ref.loss_of((ours.module if bypass else ours)(ref.data()))
        params[0].register_hook(lambda grad: None)  # the first Python hook drops C++ hooks
        _prepare(ours)
        text = ref.error_of(lambda loss=loss: torch.autograd.grad(loss, params))
        assert "prepare_for_backward()" in text, text
        for model in (slow, ours):
            ref.seed(3)
            model.zero_grad()
            _forward_inside_alone(model)
        ref.assert_same(ours, slow)
    ref.check_steps(ours, slow, ref.plain_step)


def test_after_gradients_that_were_refused(ranks):
    ref.on_ranks(ranks, 2, _check_refused_gradients)


def _check_inside_backward() -> None:
    ours, _ = ref.make_pair(ref.Net, "default")
    output = ours(ref.data())
    output.register_hook(lambda grad: _prepare(ours))
    assert "prepare_for_backward()" in ref.error_of(ref.loss_of(output).backward)


def test_prepare_within_a_backward_is_an_error(ranks):
    ref.on_ranks(ranks, 2, _check_inside_backward)


def _check_refused_without_pre_hooks() -> None:
    """The first Python hook of a param drops C++ hooks. The output of the forward is left."""
    ours, _ = ref.make_pair(ref.Net, "default")
    loss = _forward_inside(ours, ours)
    _prepare(ours)
    params = list(ours.parameters())[:1]
    params[0].register_hook(lambda grad: None)
    assert "prepare_for_backward()" in ref.error_of(lambda: torch.autograd.grad(loss, params))


def test_gradients_of_a_local_forward_that_are_refused(ranks):
    ref.on_ranks(ranks, 2, _check_refused_without_pre_hooks)


# The column DDP of the table in docs/gradient_accumulation.md: whether DDP averages.
OF_DDP: dict[Callable[[Model], None], bool] = {
    _both_outside: True,
    _backward_inside: True,
    _forward_inside_alone: False,
    _both_inside: False,
    _prepared: True,
    _inside_then_outside: True,
    _outside_then_inside: True,
    _bypass_inside: False,
    _bypass_outside: False,
    _bypass_after_outside: True,
    _inside_after_outside: True,
    _hidden_inside: False,
}


def _check_ddp(usage: Callable[[Model], None], averages: bool) -> None:
    """Compares DDP's gradients with those of a module that is never averaged."""
    module = ref.build_same(Hides if usage is _hidden_inside else ref.Net)
    local = ref.SlowDDP(copy.deepcopy(module))
    local.require_backward_grad_sync = False
    ddp = DistributedDataParallel(module)
    for number in range(4):
        for model in (local, ddp):
            model.zero_grad()
            ref.seed(number)
            usage(model)
        for param, expected in zip(ddp.parameters(), local.parameters(), strict=True):
            grad = expected.grad
            if averages:
                dist.all_reduce(grad)
                grad /= dist.get_world_size()
            torch.testing.assert_close(param.grad, grad)


@pytest.mark.parametrize("usage", OF_DDP, ids=lambda usage: usage.__name__)
def test_what_the_page_says_of_ddp(ranks, usage):
    ref.on_ranks(ranks, 2, _check_ddp, usage, OF_DDP[usage])


class Normed(ref.Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


def _num_broadcasts(model: Model, usage: Callable[[Model], None]) -> int:
    with torch.profiler.profile() as profile:
        usage(model)
    return sum(event.name == "gloo:broadcast" for event in profile.events())


def _check_buffers() -> None:
    """Buffers are broadcast at the same forwards as in DDP."""
    module = ref.build_same(Normed)
    ours = ReducerDDP(copy.deepcopy(module))
    silent = ReducerDDP(copy.deepcopy(module), forward_sync_buffers=False)
    ddp = DistributedDataParallel(copy.deepcopy(module))
    for usage in (_both_outside, _forward_inside_alone, _both_inside, _backward_inside):
        for model in (ours, silent, ddp):
            for _ in range(3):
                ref.plain_step(model, 0)
        counts = [[_num_broadcasts(m, usage) for _ in range(3)] for m in (ours, silent, ddp)]
        assert counts[0] == counts[2] and not any(counts[1]), (usage.__name__, counts)
        # One broadcast of floats, and one of integers.
        after_the_first = 0 if usage in (_forward_inside_alone, _both_inside) else 2
        assert counts[0] == [2, after_the_first, after_the_first], (usage.__name__, counts)


def test_buffers_follow_ddp(ranks):
    ref.on_ranks(ranks, 2, _check_buffers)
