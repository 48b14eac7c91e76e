"""Manual finalization: the bits of DDP in each allowed order, an error by name in each other one.

DDP has these names since torch 2.15. With an older torch, DDP without manual finalization is the
reference: it computes the same numbers at another time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import slow_ddp as ref
import torch
import torch.distributed as dist
from ddp_arguments import skip_unless_ddp_takes
from manual_models import (
    DDP_HAS_IT,
    MODES,
    SMALL_CAP,
    Model,
    modes,
    places,
    run_step,
    train,
    wrap_model,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpx
from ddpx import ReducerDDP


def _check_bits(mode: str, place: str, zeros: bool) -> None:
    ours = train(ReducerDDP, mode, place, manual=True, zeros=zeros)
    # DDP does not wait for delayed gradients.
    plain: Any = ReducerDDP if mode == "delayed" else DistributedDataParallel
    references = [train(plain, mode, place, manual=False, zeros=zeros)]
    if DDP_HAS_IT and mode != "delayed":
        references.append(train(DistributedDataParallel, mode, place, manual=True, zeros=zeros))
    for theirs in references:
        assert len(theirs) == len(ours)
        assert all(map(torch.equal, ours, theirs))
    ref.assert_in_step()


@pytest.mark.parametrize("world", [1, 2, 3])
@modes
@places
def test_bits_equal_ddp(ranks, world: int, mode: str, place: str):
    skip_unless_ddp_takes(MODES[mode])
    for zeros in (False, True):
        ref.on_ranks(ranks, world, _check_bits, mode, place, zeros)


# ---- calls of the script between backward and finalize_backward() --------------------------------


def _check_users_calls(mode: str, further: dict[str, Any], check_finite: bool) -> None:
    slow = ref.SlowDDP(copy.deepcopy(ref.build_same(Model)), "unused" in mode)
    ours = ReducerDDP(
        ref.build_same(Model), bucket_cap_mb=SMALL_CAP, transport="group", **MODES[mode], **further
    )
    ours.require_manual_backward_finalization = True
    ours.set_check_finite(check_finite)
    rank, world = dist.get_rank(), dist.get_world_size()
    for number in range(6):
        for model in (slow, ours):
            ref.seed(number)
            model.zero_grad()
            x = ref.data(6, 16).requires_grad_()
            loss = ref.loss_of(model(x, spare="unused" not in mode or number == 4))
            if model is slow:
                loss.backward()
                slow.average()
                continue
            in_hook = rank == 0 and not ours.should_finalize_after_backward
            if in_hook:
                x.register_hook(lambda _: ours.finalize_backward())
            loss.backward()
            if rank == 1 and not in_hook:
                ours.finalize_backward()
            total = torch.full((3,), rank + 1.0)
            dist.all_reduce(total)
            assert total.eq(world * (world + 1) / 2).all()
            gathered: list[Any] = [None] * world
            dist.all_gather_object(gathered, (rank, number))
            assert gathered == [(other, number) for other in range(world)]
            if rank != 1 and not in_hook:
                ours.finalize_backward()
        ref.assert_same(ours, slow)
    ref.assert_in_step()


@pytest.mark.parametrize("check_finite", [False, True])
@pytest.mark.parametrize("mode", ["default", "unused", "unused view", "static"])
def test_ranks_finalize_at_different_places_between_calls_of_the_script(
    ranks, mode: str, check_finite: bool
):
    ref.on_ranks(ranks, 3, _check_users_calls, mode, {}, check_finite)


def test_skipped_buckets_between_calls_of_the_script(ranks):
    further = {"skip_all_reduce_unused_params": True}
    ref.on_ranks(ranks, 3, _check_users_calls, "unused", further, False)


# ---- forbidden orders ----------------------------------------------------------------------------


def _while_off(model: Any) -> None:
    model.require_manual_backward_finalization = False
    run_step(model)
    model.finalize_backward()


def _before_any_step(model: Any) -> None:
    model.finalize_backward()


def _between_forward_and_backward(model: Any) -> None:
    loss = model(torch.randn(6, 16)).sum()
    try:
        model.finalize_backward()
    finally:
        loss.backward()


def _twice(model: Any) -> None:
    run_step(model)
    model.finalize_backward()
    model.finalize_backward()


def _after_no_sync(model: Any) -> None:
    with model.no_sync():
        run_step(model)
        model.finalize_backward()


def _forward_while_pending(model: Any) -> None:
    run_step(model)
    model(torch.randn(6, 16))


def _local_forward_while_pending(model: Any) -> None:
    run_step(model)
    with model.no_sync():
        model(torch.randn(6, 16))


def _backward_while_pending(model: Any) -> None:
    loss = model(torch.randn(6, 16)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def _local_backward_while_pending(model: Any) -> None:
    loss = model(torch.randn(6, 16)).sum()
    loss.backward(retain_graph=True)
    with model.no_sync():
        loss.backward()


def _changed_after_forward(model: Any) -> None:
    loss = model(torch.randn(6, 16)).sum()
    try:
        model.require_manual_backward_finalization = False
    finally:
        del loss


def _changed_while_pending(model: Any) -> None:
    run_step(model)
    model.require_manual_backward_finalization = False


def _before_the_last_gradient(model: Any) -> None:
    for _ in range(2):
        run_step(model)
        model.finalize_backward()
    errors: list[str] = []
    handle = model.module.third.bias.register_hook(
        lambda _: errors.append(ref.error_of(model.finalize_backward))
    )
    run_step(model)
    handle.remove()
    model.finalize_backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    if errors[0]:
        raise RuntimeError(errors[0])


def _after_a_failed_backward(model: Any) -> None:
    loss = model(torch.randn(6, 16)).sum()
    handle = model.module.third.bias.register_hook(_raise)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()
    model.finalize_backward()


def _raise(_: torch.Tensor) -> None:
    raise ZeroDivisionError


# Each order, with words of its error.
FORBIDDEN: dict[Callable[[Any], None], str] = {
    _while_off: "is not required",
    _before_any_step: "no gradient reduction requires finalization",
    _between_forward_and_backward: "no gradient reduction requires finalization",
    _twice: "no gradient reduction requires finalization",
    _after_no_sync: "no gradient reduction requires finalization",
    _forward_while_pending: "Expected to have finalized the prior backward pass",
    _local_forward_while_pending: "Expected to have finalized the prior backward pass",
    _backward_while_pending: "Expected to have finalized the prior backward pass",
    _local_backward_while_pending: "Expected to have finalized the prior backward pass",
    _changed_after_forward: "after forward while a backward pass is expected",
    _changed_while_pending: "Expected to have finalized the prior backward pass",
    _before_the_last_gradient: "called before all DDP buckets were ready",
    _after_a_failed_backward: "no gradient reduction requires finalization",
}


def _check_forbidden(order: Callable[[Any], None], words: str, views: bool) -> None:
    mode = "view" if views else "default"
    if DDP_HAS_IT:
        assert ref.error_of(order, wrap_model(DistributedDataParallel, mode, manual=True))
    model = wrap_model(ReducerDDP, mode, manual=True)
    with pytest.raises(RuntimeError, match=words) as caught:
        order(model)
    assert f"ddpx rank {dist.get_rank()}, step " in str(caught.value)
    model.reset()
    model.require_manual_backward_finalization = True
    model.zero_grad()
    plain = wrap_model(ReducerDDP, mode, manual=False)
    plain.load_state_dict(model.state_dict())
    for each in (model, plain):
        ref.seed(1)
        run_step(each)
    model.finalize_backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("order", FORBIDDEN)
def test_forbidden_orders(ranks, world: int, order: Callable[[Any], None], views: bool):
    ref.on_ranks(ranks, world, _check_forbidden, order, FORBIDDEN[order], views)


def _check_pending_survives() -> None:
    """A refused call does not change the pending step."""
    model, slow = (
        ReducerDDP(ref.build_same(ref.Net), bucket_cap_mb=0.0005),
        ref.SlowDDP(ref.build_same(ref.Net)),
    )
    model.require_manual_backward_finalization = True
    for number in range(3):
        ref.seed(number)
        model.zero_grad()
        ref.loss_of(model(ref.data())).backward()
        model.require_manual_backward_finalization = True  # no change
        assert ref.error_of(model, ref.data())
        with torch.no_grad():
            model(ref.data())  # evaluation is allowed
        assert ref.error_of(model.reducer.prepare_for_backward)
        assert ref.error_of(model._update_process_group, dist.group.WORLD)
        assert ref.error_of(model.register_comm_hook, None, lambda state, bucket: None)
        model.finalize_backward()
        ref.seed(number)
        slow.zero_grad()
        ref.loss_of(slow(ref.data())).backward()
        slow.average()
        ref.assert_same(model, slow)
    ref.assert_in_step()


def _check_reducer_is_finalized(cls: Any, mode: str) -> None:
    """DDP's check, for scripts: whether the last step has ended."""
    model = wrap_model(cls, mode, manual=True)
    for step in range(3):
        run_step(model)
        where = f"step {step}, phase end of backward, " if cls is ReducerDDP else ""
        words = rf"(?s){where}.*Expected to have fin.*finalize_backward\(\)"
        for owner in (model, model.reducer):
            with pytest.raises(RuntimeError, match=words):
                owner._check_reducer_finalized()
        model.finalize_backward()
        model._check_reducer_finalized()
    with model.no_sync():
        run_step(model)
    model._check_reducer_finalized()
    if cls is ReducerDDP:  # torch's class raises within a backward
        param = next(model.parameters())
        param.register_post_accumulate_grad_hook(lambda _: model._check_reducer_finalized())
        run_step(model)
        model.finalize_backward()


@pytest.mark.parametrize("mode", ["default", "view", "static"])
def test_check_reducer_finalized(ranks, mode: str):
    for cls in (DistributedDataParallel, ReducerDDP) if DDP_HAS_IT else (ReducerDDP,):
        ref.on_ranks(ranks, 2, _check_reducer_is_finalized, cls, mode)


@pytest.mark.parametrize("world", [1, 2])
def test_refused_calls_leave_the_pending_step(ranks, world: int):
    ref.on_ranks(ranks, world, _check_pending_survives)


def _check_repeated_gradient() -> None:
    """A second use of a parameter behind finalize_backward() in the same backward."""
    model = wrap_model(ReducerDDP, "default", manual=True)
    for _ in range(2):
        run_step(model)
        model.finalize_backward()
    x = torch.randn(6, 16, requires_grad=True)

    def finalize_and_add(_: torch.Tensor) -> None:
        model.finalize_backward()
        with torch.enable_grad():
            (model.module.first.bias.sum() * 2).backward()

    x.register_hook(finalize_and_add)
    with pytest.raises(RuntimeError, match=r"'first\.bias' got another gradient after finalize"):
        model(x).sum().backward()
    run_step(model)
    model.finalize_backward()
    ref.assert_in_step()


def test_a_gradient_after_finalization_in_the_same_backward(ranks):
    ref.on_ranks(ranks, 2, _check_repeated_gradient)


def _check_construction_within_a_step(replicated: bool) -> None:
    rank = dist.get_rank()
    module = nn.Linear(1, 1, bias=False)
    wrap = ddpx.replicate if replicated else ReducerDDP
    model = wrap(module)
    ddpx.set_manual_finalization(model, True)
    for _ in range(2):
        module.zero_grad()
        model(torch.full((1, 1), 1.0 + rank)).backward()
        with pytest.raises(RuntimeError, match=r"Call finalize_backward\(\)"):
            wrap(module)
        ddpx.finalize_backward(model)
        assert module.weight.grad.item() == 1.5


@pytest.mark.parametrize("replicated", [False, True], ids=["wrapper", "replicate"])
def test_construction_within_a_step(ranks, replicated: bool):
    """The construction raises an error, and the step is as if it had not begun."""
    ranks(2).run(_check_construction_within_a_step, replicated)


def _check_construction_within_a_backward() -> None:
    module = nn.Linear(2, 2)
    model = ReducerDDP(module)
    errors = []

    def construct(_: torch.Tensor) -> None:
        errors.append(ref.error_of(ReducerDDP, module))

    output = model(torch.ones(1, 2))
    output.register_hook(construct)
    output.sum().backward()  # a parameter that was written would be an error here
    assert "while a backward runs" in str(errors)


def test_construction_within_a_backward(ranks):
    ranks(2).run(_check_construction_within_a_backward)


def _check_construction_after_the_group(options: dict[str, bool]) -> None:
    module = nn.Linear(1, 1, bias=False)
    group = dist.new_group()
    older = ReducerDDP(module, process_group=group, **options)
    ddpx.set_manual_finalization(older, True)
    older(torch.ones(1, 1)).backward()
    dist.destroy_process_group(group)
    newer = ReducerDDP(module)
    module.zero_grad()
    newer(torch.full((1, 1), 1.0 + dist.get_rank())).backward()
    assert module.weight.grad.item() == 1.5


@pytest.mark.parametrize("view", [False, True], ids=["default", "views"])
def test_a_step_that_will_have_no_end_is_in_no_way(ranks, view: bool):
    """The group of the older wrapper was destroyed before finalize_backward()."""
    ranks(2).run(_check_construction_after_the_group, {"gradient_as_bucket_view": view})
