"""Two wrappers of one module: its gradients are averaged once."""

from __future__ import annotations

import copy
import gc

import pytest
import slow_ddp as ref
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

from ddpx import ReducerDDP
from ddpx.ddp.replica import ownership


def _wrap(module: nn.Module, mode: str) -> ReducerDDP:
    return ReducerDDP(module, bucket_cap_mb=ref.SMALL_CAP, **ref.MODES[mode])


def _check_nested(mode: str) -> None:
    module = ref.build_same(ref.Net)
    slow = ref.SlowDDP(copy.deepcopy(module))
    inner = _wrap(module, mode)
    ref.check_steps(inner, slow, ref.plain_step, 2)
    outer = _wrap(inner, mode)
    ref.check_steps(outer, slow, ref.plain_step, 4)


@ref.modes
def test_wrapper_in_a_wrapper(ranks, mode, world):
    ref.on_ranks(ranks, world, _check_nested, mode)


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
    module = ref.build_same(ref.Net)
    slow = ref.SlowDDP(copy.deepcopy(module))
    a = _wrap(module, mode)
    ref.check_steps(a, slow, ref.plain_step, num_before)
    wrappers = {"a": a, "b": _wrap(module, mode)}
    for number, name in enumerate(order):
        ref.check_steps(wrappers[name], slow, ref.plain_step, 1, first=number)
    del wrappers
    gc.collect()
    ref.check_steps(a, slow, ref.plain_step)


@ref.modes
@pytest.mark.parametrize("order", ORDERS)
def test_two_alive(ranks, order, mode, world):
    ref.on_ranks(ranks, world, _check_beside, *ORDERS[order], mode)


def _check_other_mode(mode: str) -> None:
    """The newer wrapper has another mode than the older one."""
    for other in ("default", "static-view", "unused"):
        module = ref.build_same(ref.Net)
        slow = ref.SlowDDP(copy.deepcopy(module))
        a = _wrap(module, mode)
        ref.check_steps(a, slow, ref.plain_step, 2, "zeros")
        b = _wrap(module, other)
        ref.check_steps(b, slow, ref.plain_step, 2, "zeros")
        ref.check_steps(a, slow, ref.plain_step, 1, "zeros")
        del b
        gc.collect()
        ref.check_steps(a, slow, ref.plain_step, 2, "zeros")


@ref.modes
def test_two_of_different_modes(ranks, mode, world):
    ref.on_ranks(ranks, world, _check_other_mode, mode)


def _check_forward_through_both(mode: str) -> None:
    """An evaluation through one wrapper, and a step through the other."""
    module = ref.build_same(ref.Net)
    slow = ref.SlowDDP(copy.deepcopy(module))
    a, b = _wrap(module, mode), _wrap(module, mode)

    def step(model: nn.Module, number: int) -> None:
        with torch.no_grad():
            model(ref.data())
        if ref.bare(model) is module:
            a(ref.data())  # the graph of this forward is dropped
        else:
            model(ref.data())
        ref.plain_step(b if ref.bare(model) is module else model, number)

    ref.check_steps(b, slow, step)


@ref.modes
def test_forward_through_both(ranks, mode, world):
    ref.on_ranks(ranks, world, _check_forward_through_both, mode)


def _check_shares_some(mode: str) -> None:
    """The construction is refused with names. The first wrapper does not change."""
    ours, slow = ref.make_pair(ref.Net, mode)
    ref.check_steps(ours, slow, ref.plain_step, 2)
    shared, extra = ours.module.second, nn.Linear(3, 3).double()
    for module in (shared, nn.Sequential(shared, extra)):
        with pytest.raises(ValueError) as refused:
            _wrap(module, mode)
        names = {id(param): name for name, param in module.named_parameters()}
        ref.assert_names(str(refused.value), [names[id(param)] for param in shared.parameters()])
    ref.check_steps(ours, slow, ref.plain_step)


@ref.modes
def test_sharing_some_params(ranks, mode, world):
    ref.on_ranks(ranks, world, _check_shares_some, mode)


def _check_within_a_larger(mode: str) -> None:
    """The newer wrapper averages the older wrapper's parameters and others, each once."""
    inner, _ = ref.make_pair(ref.Net, mode)
    module = nn.Sequential(inner.module, nn.Linear(3, 3).double())
    for number in range(2):
        slow = ref.SlowDDP(copy.deepcopy(module))
        outer = _wrap(module, mode)
        ref.check_steps(outer, slow, ref.plain_step)
        del outer
        gc.collect()
        ref.check_steps(
            inner, ref.SlowDDP(copy.deepcopy(inner.module)), ref.plain_step, first=number
        )


@ref.modes
def test_within_a_larger_module(ranks, mode, world):
    ref.on_ranks(ranks, world, _check_within_a_larger, mode)


def _check_garbage() -> None:
    """The wrapper of the larger module is only a part of a reference cycle."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    gc.disable()
    try:
        larger = ReducerDDP(module)
        larger.cycle = [larger]
        with pytest.raises(ValueError, match="another ReducerDDP of Sequential already averages"):
            ReducerDDP(module[0])
        del larger
        model = ReducerDDP(module[0])
        other = ReducerDDP(nn.Linear(2, 2))
        other.cycle = [other]
        assert ownership.others_than(model._ddpx)
        del other
        assert not ownership.others_than(model._ddpx)  # shrink() needs a single wrapper
    finally:
        gc.enable()
    model(torch.ones(1, 4) * dist.get_rank()).sum().backward()
    assert torch.equal(module[0].weight.grad, torch.full((4, 4), 0.5))


def test_a_wrapper_that_is_garbage_does_not_count(ranks):
    ranks(2).run(_check_garbage)


def _check_backward_of_the_larger() -> None:
    """The wrapper of a part trains between a forward and a backward of the larger wrapper."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    part = ReducerDDP(module[0])
    whole = ReducerDDP(module)
    x = torch.ones(1, 4) * dist.get_rank()
    for _ in range(3):
        loss = whole(x).sum()
        for _ in range(2):
            part.zero_grad()
            part(x).sum().backward()
            assert torch.equal(module[0].weight.grad, torch.full((4, 4), 0.5))
        module.zero_grad()
        loss.backward()
        assert torch.equal(module[1].bias.grad, torch.ones(4))
        part.zero_grad()
        part(x).sum().backward()
        assert torch.equal(module[0].weight.grad, torch.full((4, 4), 0.5))


def test_backward_of_the_larger_module(ranks):
    ranks(2).run(_check_backward_of_the_larger)


def _check_bypassed_after_a_deletion(mode: str) -> None:
    """Ranks may delete the newer wrapper at different times. So the older wrapper averages only
    after its own forward."""
    older, slow = ref.make_pair(ref.Net, mode)
    newer = _wrap(older.module, mode)
    ref.check_steps(newer, slow, ref.plain_step, 1)
    del newer
    gc.collect()
    for _ in range(2):
        text = ref.error_of(lambda: older.module(ref.data()).sum().backward())
        assert "the newer wrapper of these parameters no longer exists" in text
        assert "Call this wrapper instead of its module" in text
    with older.no_sync():
        older.module(ref.data()).sum().backward()
    ref.check_steps(older, ref.SlowDDP(copy.deepcopy(older.module)), ref.plain_step, first=1)


@ref.modes
def test_bypassed_after_a_deletion(ranks, mode, world):
    ref.on_ranks(ranks, world, _check_bypassed_after_a_deletion, mode)


def _check_evaluation_of_the_other() -> None:
    """A backward through the module belongs to the wrapper that trained last."""
    module = nn.Linear(4, 4)
    evaluated, trained = ReducerDDP(module), ReducerDDP(module)
    for number in range(1, 3):
        trained(torch.ones(2, 4)).sum().backward()
        with torch.no_grad():
            evaluated(torch.ones(2, 4))
        module(torch.ones(2, 4)).sum().backward()
        assert [evaluated.reducer.num_steps, trained.reducer.num_steps] == [0, 2 * number]


def test_evaluation_of_the_other(ranks):
    ranks(2).run(_check_evaluation_of_the_other)


def _check_grad_dtype() -> None:
    """Gradients have the dtype of the wrapper that averages them."""
    module = nn.Linear(4, 4, dtype=torch.bfloat16)
    wide = ReducerDDP(module, grad_dtype=torch.float32)
    narrow = ReducerDDP(module)
    for model, dtype in [(narrow, torch.bfloat16), (wide, torch.float32)] * 2:
        module.zero_grad()
        model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
        assert module.weight.grad.dtype == dtype
        module.weight.grad = module.weight.grad.clone()  # torch checks the dtype


def test_each_wrapper_has_its_grad_dtype(ranks):
    ranks(2).run(_check_grad_dtype)


def _check_frozen_since() -> None:
    """The module of the older wrapper has a parameter that the newer wrapper does not average."""
    older = ReducerDDP(nn.Linear(4, 4))
    older.module.bias.requires_grad_(False)
    newer = ReducerDDP(nn.Sequential(older.module, nn.Linear(4, 2)))
    newer(torch.full((2, 4), dist.get_rank() + 1.0)).sum().backward()
    grad = older.module.weight.grad
    mean = grad.clone()
    dist.all_reduce(mean)
    torch.testing.assert_close(grad, mean / dist.get_world_size())


def test_a_layer_that_was_frozen_since(ranks):
    ranks(2).run(_check_frozen_since)


def _check_casts() -> None:
    """The inner wrapper casts only in its own forwards."""
    inner = ReducerDDP(nn.Linear(4, 4), mixed_precision=_MixedPrecision(torch.bfloat16))
    outer = ReducerDDP(nn.Sequential(inner))
    seen: list[torch.dtype] = []
    inner.module.register_forward_pre_hook(lambda layer, _: seen.append(layer.weight.dtype))
    for model in (outer, inner, outer):
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
    assert seen == [torch.float32, torch.bfloat16, torch.float32]


def test_a_wrapper_in_a_wrapper_does_not_cast(ranks):
    ranks(2).run(_check_casts)
