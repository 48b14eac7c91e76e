"""A wrapper keeps its settings beside another wrapper of the same module, and in a copy."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from slow_ddp import SMALL_CAP, Net, assert_in_step, build_same, data, loss_of, on_ranks, seed
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation

import ddpx
from ddpx import ReducerDDP


def _step(model: nn.Module, number: int = 0) -> None:
    seed(number)
    model.zero_grad()
    loss_of(model(data())).backward()


def _same_everywhere(model: nn.Module) -> bool:
    """Whether all ranks have the same gradients."""
    different = torch.zeros(1)
    for param in model.parameters():
        reference = param.grad.clone()
        dist.broadcast(reference, 0)
        different += float(not torch.equal(reference, param.grad))
    dist.all_reduce(different)
    return not different.item()


def _sevens(state, bucket):
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(torch.full_like(bucket.buffer(), 7.0))
    return future


# ---- settings: one function sets, the other checks the effect in steps ---------------------------


def _set_hook(model: ReducerDDP) -> None:
    model.register_comm_hook(None, _sevens)


def _has_hook(model: ReducerDDP) -> None:
    _step(model)
    assert all((param.grad == 7).all() for param in model.parameters())
    assert model._get_ddp_logging_data()["comm_hook"] == "_sevens"


def _set_builtin_hook(model: ReducerDDP) -> None:
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)


def _has_builtin_hook(model: ReducerDDP) -> None:
    _step(model)
    for param in model.parameters():
        assert torch.equal(param.grad, param.grad.half().double())
    assert _same_everywhere(model)


class _Counter:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, param: torch.Tensor) -> None:
        self.calls += 1


def _set_post_sync_hook(model: ReducerDDP) -> None:
    model.__dict__["counter"] = _Counter()
    model.register_post_sync_hook(model.module, model.__dict__["counter"])


def _has_post_sync_hook(model: ReducerDDP) -> None:
    before = model.__dict__["counter"].calls
    _step(model)
    assert model.__dict__["counter"].calls - before == len(list(model.parameters()))


def _set_check_finite(model: ReducerDDP) -> None:
    model.set_check_finite()


def _has_check_finite(model: ReducerDDP) -> None:
    _step(model)
    seed(0)
    with pytest.raises(RuntimeError, match="rank 1"):
        (loss_of(model(data())) * (float("inf") if dist.get_rank() == 1 else 1.0)).backward()


def _set_static_graph(model: ReducerDDP) -> None:
    model._set_static_graph()


def _has_static_graph(model: ReducerDDP) -> None:
    _step(model)
    assert model._get_ddp_logging_data()["static_graph"] == 1
    seed(0)
    with pytest.raises(RuntimeError, match="compatible with static_graph"):
        loss_of(model.module.first(data())).backward()


def _set_sample_rate(model: ReducerDDP) -> None:
    model._set_ddp_runtime_logging_sample_rate(4)


def _has_sample_rate(model: ReducerDDP) -> None:
    seen = []
    for number in range(24):
        _step(model, number)
        seen.append(model._get_ddp_logging_data()["iteration"])
    assert len(set(seen[12:])) in (3, 4), seen


def _set_local(model: ReducerDDP) -> None:
    model.require_backward_grad_sync = False


def _is_local(model: ReducerDDP) -> None:
    _step(model)
    assert not _same_everywhere(model)
    assert not model.require_backward_grad_sync


def _set_manual(model: ReducerDDP) -> None:
    model.require_manual_backward_finalization = True


def _is_manual(model: ReducerDDP) -> None:
    assert model.require_manual_backward_finalization
    _step(model)
    model.finalize_backward()
    assert _same_everywhere(model)


def _set_buffer_hook(model: ReducerDDP) -> None:
    model.module.register_buffer("buffer", torch.zeros(1))
    model._assign_modules_buffers()
    counter = model.__dict__["counter"] = _Counter()
    model._register_buffer_comm_hook(counter, _count, _BufferCommHookLocation.POST_FORWARD)


def _count(counter: _Counter, buffers: dict[str, torch.Tensor]) -> None:
    counter.calls += len(buffers)


def _has_buffer_hook(model: ReducerDDP) -> None:
    counter = model.buffer_hook.buffer_comm_hook_state
    before = counter.calls
    _step(model)
    assert counter.calls - before == 1


def _set_own_buffers(model: ReducerDDP) -> None:
    model.module.register_buffer("buffer", torch.zeros(1))
    model.forward_sync_buffers = False


def _has_own_buffers(model: ReducerDDP) -> None:
    model.module.buffer.fill_(dist.get_rank())
    _step(model)
    assert model.module.buffer.item() == dist.get_rank()
    assert not model.forward_sync_buffers


SETTINGS: dict[str, tuple[Callable[[ReducerDDP], None], Callable[[ReducerDDP], None]]] = {
    "communication hook": (_set_hook, _has_hook),
    "built-in hook": (_set_builtin_hook, _has_builtin_hook),
    "post-sync hook": (_set_post_sync_hook, _has_post_sync_hook),
    "check finite": (_set_check_finite, _has_check_finite),
    "static graph": (_set_static_graph, _has_static_graph),
    "sample rate": (_set_sample_rate, _has_sample_rate),
    "no sync": (_set_local, _is_local),
    "manual finalization": (_set_manual, _is_manual),
    "buffer hook": (_set_buffer_hook, _has_buffer_hook),
    "own buffers": (_set_own_buffers, _has_own_buffers),
}


def _wrap(module: nn.Module) -> ReducerDDP:
    return ReducerDDP(module, bucket_cap_mb=SMALL_CAP)


def _check_beside(setting: str, is_set_late: bool) -> None:
    set_it, check = SETTINGS[setting]
    module = build_same(Net)
    first = _wrap(module)
    if not is_set_late:
        set_it(first)
    second = _wrap(module)
    if is_set_late:
        set_it(first)
    for number in range(2):
        _step(second, number)
        assert _same_everywhere(second)
        assert not all((param.grad == 7).all() for param in module.parameters())
    check(first)  # the second wrapper is alive
    _step(second)
    assert _same_everywhere(second)
    second.__dict__["cycle"] = second
    del second
    if dist.get_rank() == 0:  # the second wrapper is gone on one rank only
        gc.collect()
    check(first)
    assert_in_step()


@pytest.mark.parametrize("is_set_late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_another_wrapper(ranks, setting, is_set_late):
    """The other wrapper is constructed before or after the setting."""
    on_ranks(ranks, 2, _check_beside, setting, is_set_late)


def _check_within(setting: str) -> None:
    """The other wrapper averages a larger module. Its own forward runs the first wrapper's."""
    set_it, check = SETTINGS[setting]
    inner = _wrap(build_same(Net))
    set_it(inner)
    outer = _wrap(nn.Sequential(inner, nn.Linear(3, 3).double()))
    for number in range(3):
        _step(outer, number)
        assert _same_everywhere(outer)
    check(inner)
    _step(outer)
    assert _same_everywhere(outer)
    check(inner)
    assert_in_step()


@pytest.mark.parametrize("setting", SETTINGS)
def test_within_a_larger_wrapper(ranks, setting):
    on_ranks(ranks, 2, _check_within, setting)


def _check_both_in_one_backward(order: str) -> None:
    """A loss of the outputs of a wrapper and of the wrapper inside it: each gradient is averaged
    once."""
    inner = _wrap(build_same(Net))
    outer = _wrap(nn.Sequential(inner, nn.Linear(3, 3).double()))
    for number in range(4):
        seed(number)
        x, y = data(), data()
        twin = copy.deepcopy(outer.module[0].module), copy.deepcopy(outer.module[1])
        for part in twin:
            part.zero_grad()
        (loss_of(twin[1](twin[0](x))) + loss_of(twin[0](y))).backward()
        outer.zero_grad()
        losses = {}
        for name in order:
            losses[name] = loss_of(outer(x)) if name == "o" else loss_of(inner(y))
        sum(losses.values()).backward()
        expected = [param.grad for part in twin for param in part.parameters()]
        for param, local in zip(outer.parameters(), expected, strict=True):
            dist.all_reduce(local)
            torch.testing.assert_close(param.grad, local / dist.get_world_size())
        _step(inner, number)
        assert _same_everywhere(inner)
    assert_in_step()


@pytest.mark.parametrize("order", ["oi", "io"])
def test_both_in_one_backward(ranks, order):
    on_ranks(ranks, 2, _check_both_in_one_backward, order)


class _TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) + self.right(x)


def _check_only_some_params_in_common() -> None:
    """The older wrapper has a parameter that the newer one lacks. Its backward comes too late."""
    module = build_same(_TwoParts)
    first = _wrap(module)
    loss = loss_of(first(data()))
    module.right = nn.Linear(6, 3).double()
    second = _wrap(nn.Sequential(module, nn.Linear(3, 3).double()))
    with pytest.raises(RuntimeError, match=r"right\.weight.*would not be averaged"):
        loss.backward()
    for number in range(3):
        _step(second, number)
        assert _same_everywhere(second)
    assert_in_step()


def test_only_some_params_in_common(ranks):
    on_ranks(ranks, 2, _check_only_some_params_in_common)


def _check_against_ddp(order: str) -> None:
    """Each step has the hook of the wrapper whose forward ran."""
    results = []
    for cls in (DistributedDataParallel, ReducerDDP):
        torch.manual_seed(0)
        module = nn.Linear(4, 1, bias=False)
        wrappers = {"a": cls(module)}
        wrappers["a"].register_comm_hook(None, _sevens)
        wrappers["b"] = cls(module)
        found = []
        for name in order:
            wrappers[name].zero_grad()
            wrappers[name](torch.ones(2, 4) * (dist.get_rank() + 1)).sum().backward()
            found.append(module.weight.grad.clone())
        results.append(torch.stack(found))
    assert torch.equal(*results)


@pytest.mark.parametrize("order", ["abab", "aabb", "bbaa", "ba"])
def test_two_wrappers_take_turns_as_with_ddp(ranks, order):
    on_ranks(ranks, 2, _check_against_ddp, order)


def _check_recording() -> None:
    module = build_same(Net)
    first = _wrap(module)
    with ddpx.record(first) as timeline:
        for number in range(6):
            second = _wrap(module)
            _step(second, number)
            del second
            _step(first, number)
    assert len(timeline.steps) == 6


def test_recording(ranks):
    on_ranks(ranks, 2, _check_recording)


def _check_bypass() -> None:
    """Without a forward of a wrapper, the wrapper that averaged last does."""
    module = build_same(Net)
    first, second = _wrap(module), _wrap(module)
    first.register_comm_hook(None, _sevens)
    seed(0)
    loss_of(module(data())).backward()
    assert _same_everywhere(module)
    assert not any((param.grad == 7).all() for param in module.parameters())
    assert_in_step()
    del second


def test_bypass(ranks):
    on_ranks(ranks, 2, _check_bypass)


# ---- copies --------------------------------------------------------------------------------------


def _check_copies(setting: str) -> None:
    set_it, check = SETTINGS[setting]
    model = _wrap(build_same(Net))
    set_it(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        check(twin)
    check(model)
    assert_in_step()


@pytest.mark.parametrize("setting", SETTINGS)
def test_copies(ranks, setting):
    on_ranks(ranks, 2, _check_copies, setting)


def _check_sparse_rows(make_other: str) -> None:
    module = nn.Embedding(10, 2, sparse=True)
    model = ReducerDDP(module)
    model._set_sparse_metadata({"weight": torch.tensor([1, 3])})
    if make_other == "copy":
        model = copy.deepcopy(model)
    else:
        ReducerDDP(module)
    with pytest.raises(RuntimeError, match="row 5"):
        model(torch.tensor([1, 5])).sum().backward()
    assert_in_step()


@pytest.mark.parametrize("make_other", ["wrapper", "copy"])
def test_sparse_rows(ranks, make_other):
    on_ranks(ranks, 2, _check_sparse_rows, make_other)


def _check_other_group() -> dict[str, Any]:
    model = _wrap(build_same(Net))
    _set_hook(model)
    _set_post_sync_hook(model)
    _set_check_finite(model)
    model._update_process_group(dist.group.WORLD)
    _has_hook(model)
    _has_post_sync_hook(model)
    model.reset()
    _has_hook(model)
    _has_post_sync_hook(model)
    return model._get_ddp_logging_data()


def test_another_group(ranks):
    on_ranks(ranks, 2, _check_other_group)
