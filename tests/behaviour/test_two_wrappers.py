"""Two wrappers of one module: its gradients are averaged once."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from slow_ddp import (
    MODES,
    SMALL_CAP,
    Net,
    SlowDDP,
    assert_names,
    bare,
    build_same,
    check_steps,
    data,
    error_of,
    make_pair,
    modes,
    on_ranks,
    plain_step,
)
from torch import nn

from ddpx import ReducerDDP


def _wrap(module: nn.Module, mode: str) -> ReducerDDP:
    return ReducerDDP(module, bucket_cap_mb=SMALL_CAP, **MODES[mode])


def _check_nested(mode: str) -> None:
    module = build_same(Net)
    slow = SlowDDP(copy.deepcopy(module))
    inner = _wrap(module, mode)
    check_steps(inner, slow, plain_step, 2)
    outer = _wrap(inner, mode)
    check_steps(outer, slow, plain_step, 4)


@modes
def test_wrapper_in_a_wrapper(ranks, mode, world):
    on_ranks(ranks, world, _check_nested, mode)


# The wrapper of each step, and the number of steps before the second wrapper exists.
ORDERS = {
    "older": ("aaa", 0),
    "newer": ("bbb", 2),
    "alternating": ("abab", 0),
    "alternating after steps": ("baba", 2),
    "older first": ("aabb", 2),
    "newer first": ("bbaa", 0),
}


def _check_beside(order: str, num_before: int, mode: str) -> None:
    """Both wrappers exist. Then the newer one is dropped, and the older one still works."""
    module = build_same(Net)
    slow = SlowDDP(copy.deepcopy(module))
    a = _wrap(module, mode)
    check_steps(a, slow, plain_step, num_before)
    wrappers = {"a": a, "b": _wrap(module, mode)}
    for number, name in enumerate(order):
        check_steps(wrappers[name], slow, plain_step, 1, first=number)
    del wrappers
    gc.collect()
    check_steps(a, slow, plain_step)


@modes
@pytest.mark.parametrize("order", ORDERS)
def test_two_alive(ranks, order, mode, world):
    on_ranks(ranks, world, _check_beside, *ORDERS[order], mode)


def _check_other_mode(mode: str) -> None:
    """The newer wrapper has another mode than the older one."""
    for other in ("default", "static-view", "unused"):
        module = build_same(Net)
        slow = SlowDDP(copy.deepcopy(module))
        a = _wrap(module, mode)
        check_steps(a, slow, plain_step, 2, "zeros")
        b = _wrap(module, other)
        check_steps(b, slow, plain_step, 2, "zeros")
        check_steps(a, slow, plain_step, 1, "zeros")
        del b
        gc.collect()
        check_steps(a, slow, plain_step, 2, "zeros")


@modes
def test_two_of_different_modes(ranks, mode, world):
    on_ranks(ranks, world, _check_other_mode, mode)


def _check_forward_through_both(mode: str) -> None:
    """An evaluation through one wrapper, and a step through the other."""
    module = build_same(Net)
    slow = SlowDDP(copy.deepcopy(module))
    a, b = _wrap(module, mode), _wrap(module, mode)

    def step(model: nn.Module, number: int) -> None:
        with torch.no_grad():
            model(data())
        if bare(model) is module:
            a(data())  # the graph of this forward is dropped
        else:
            model(data())
        plain_step(b if bare(model) is module else model, number)

    check_steps(b, slow, step)


@modes
def test_forward_through_both(ranks, mode, world):
    on_ranks(ranks, world, _check_forward_through_both, mode)


def _check_shares_some(mode: str) -> None:
    """The construction is refused with names. The first wrapper does not change."""
    ours, slow = make_pair(Net, mode)
    check_steps(ours, slow, plain_step, 2)
    shared, extra = ours.module.second, nn.Linear(3, 3).double()
    for module in (shared, nn.Sequential(shared, extra)):
        with pytest.raises(ValueError) as refused:
            _wrap(module, mode)
        names = {id(param): name for name, param in module.named_parameters()}
        assert_names(str(refused.value), [names[id(param)] for param in shared.parameters()])
    check_steps(ours, slow, plain_step)


@modes
def test_sharing_some_params(ranks, mode, world):
    on_ranks(ranks, world, _check_shares_some, mode)


def _check_within_a_larger(mode: str) -> None:
    """The newer wrapper averages the older wrapper's parameters and others, each once."""
    inner, _ = make_pair(Net, mode)
    module = nn.Sequential(inner.module, nn.Linear(3, 3).double())
    for number in range(2):
        slow = SlowDDP(copy.deepcopy(module))
        outer = _wrap(module, mode)
        check_steps(outer, slow, plain_step)
        del outer
        gc.collect()
        check_steps(inner, SlowDDP(copy.deepcopy(inner.module)), plain_step, first=number)


@modes
def test_within_a_larger_module(ranks, mode, world):
    on_ranks(ranks, world, _check_within_a_larger, mode)


def _check_bypassed_after_a_deletion(mode: str) -> None:
    """Ranks may delete the newer wrapper at different times. So the older wrapper averages only
    after its own forward."""
    older, slow = make_pair(Net, mode)
    newer = _wrap(older.module, mode)
    check_steps(newer, slow, plain_step, 1)
    del newer
    gc.collect()
    for _ in range(2):
        text = error_of(lambda: older.module(data()).sum().backward())
        assert "the wrapper that averaged these parameters last no longer exists" in text
        assert "Call this wrapper instead of its module" in text
    with older.no_sync():
        older.module(data()).sum().backward()
    check_steps(older, SlowDDP(copy.deepcopy(older.module)), plain_step, first=1)


@modes
def test_bypassed_after_a_deletion(ranks, mode, world):
    on_ranks(ranks, world, _check_bypassed_after_a_deletion, mode)
