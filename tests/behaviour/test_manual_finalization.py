"""Manual finalization: the bits of DDP in each allowed order, an error by name in each other one.

DDP has these names since torch 2.15. With an older torch, DDP without manual finalization is the
reference: it computes the same numbers at another time.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import slow_ddp as ref
import torch
import torch.distributed as dist
from ddp_arguments import skip_unless_ddp_takes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpx
from ddpx import ReducerDDP

DDP_HAS_IT = hasattr(DistributedDataParallel, "finalize_backward")
SMALL_CAP = 0.002
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static view": {"static_graph": True, "gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "unused view": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "batched": {"batched_grad_copy": True},
    "delayed": {"delays": True},
}
modes = pytest.mark.parametrize("mode", MODES)
places = pytest.mark.parametrize("place", ["after", "hook"])


class _Model(nn.Module):
    """Three layers behind a product, whose backward comes last. ``spare`` is used in odd steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 24)
        self.second = nn.Linear(24, 24)
        self.third = nn.Linear(24, 4)
        self.spare = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor, spare: bool = False) -> torch.Tensor:
        hidden = torch.tanh(self.first(x * 1.0))
        hidden = torch.tanh(self.second(hidden))
        return self.third(self.spare(hidden) if spare else hidden)


def _wrap(cls: Any, mode: str, manual: bool, **further: Any) -> Any:
    torch.manual_seed(0)
    options = dict(MODES[mode])
    module = _Model()
    if options.pop("delays", False):
        options["delay_all_reduce_named_params"] = [("third.weight", module.third.weight)]
        options["param_to_hook_all_reduce"] = module.second.weight
    if not options.get("find_unused_parameters"):
        module.spare.requires_grad_(False)
    model = cls(module, bucket_cap_mb=SMALL_CAP, **options, **further)
    if manual:
        model.require_manual_backward_finalization = True
    return model


def _backward(model: Any, x: torch.Tensor, loss: torch.Tensor, place: str) -> None:
    """A backward that a hook finalizes if it may, or the script afterwards."""
    in_hook = place == "hook" and not model.should_finalize_after_backward
    if in_hook:
        x.register_hook(lambda _: model.finalize_backward())
    loss.backward()
    if not in_hook:
        model.finalize_backward()


def _train(cls: Any, mode: str, place: str, manual: bool, zeros: bool) -> list[torch.Tensor]:
    model = _wrap(cls, mode, manual)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[torch.Tensor] = []
    for number in range(6):
        ref.seed(number)
        optimizer.zero_grad(set_to_none=not zeros)
        x = torch.randn(6, 16, requires_grad=True)
        if number == 3:
            with model.no_sync():
                model(torch.randn(6, 16)).square().mean().backward()
        spare = number % 2 == 1 and "unused" in mode
        loss = model(x, spare).square().mean()
        if manual:
            _backward(model, x, loss, place)
        else:
            loss.backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return found + [p.detach().clone() for p in model.parameters()]


def _check_bits(mode: str, place: str, zeros: bool) -> None:
    ours = _train(ReducerDDP, mode, place, manual=True, zeros=zeros)
    # DDP does not wait for delayed gradients.
    plain: Any = ReducerDDP if mode == "delayed" else DistributedDataParallel
    references = [_train(plain, mode, place, manual=False, zeros=zeros)]
    if DDP_HAS_IT and mode != "delayed":
        references.append(_train(DistributedDataParallel, mode, place, manual=True, zeros=zeros))
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
    slow = ref.SlowDDP(copy.deepcopy(ref.build_same(_Model)), "unused" in mode)
    ours = ReducerDDP(
        ref.build_same(_Model), bucket_cap_mb=SMALL_CAP, transport="group", **MODES[mode], **further
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


def _step(model: Any) -> None:
    model(torch.randn(6, 16)).sum().backward()


def _while_off(model: Any) -> None:
    model.require_manual_backward_finalization = False
    _step(model)
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
    _step(model)
    model.finalize_backward()
    model.finalize_backward()


def _after_no_sync(model: Any) -> None:
    with model.no_sync():
        _step(model)
        model.finalize_backward()


def _forward_while_pending(model: Any) -> None:
    _step(model)
    model(torch.randn(6, 16))


def _local_forward_while_pending(model: Any) -> None:
    _step(model)
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
    _step(model)
    model.require_manual_backward_finalization = False


def _before_the_last_gradient(model: Any) -> None:
    for _ in range(2):
        _step(model)
        model.finalize_backward()
    errors: list[str] = []
    handle = model.module.third.bias.register_hook(
        lambda _: errors.append(ref.error_of(model.finalize_backward))
    )
    _step(model)
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
        assert ref.error_of(order, _wrap(DistributedDataParallel, mode, manual=True))
    model = _wrap(ReducerDDP, mode, manual=True)
    with pytest.raises(RuntimeError, match=words) as caught:
        order(model)
    assert f"ddpx rank {dist.get_rank()}, step " in str(caught.value)
    model.reset()
    model.require_manual_backward_finalization = True
    model.zero_grad()
    plain = _wrap(ReducerDDP, mode, manual=False)
    plain.load_state_dict(model.state_dict())
    for each in (model, plain):
        ref.seed(1)
        _step(each)
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


@pytest.mark.parametrize("world", [1, 2])
def test_refused_calls_leave_the_pending_step(ranks, world: int):
    ref.on_ranks(ranks, world, _check_pending_survives)


def _check_repeated_gradient() -> None:
    """A second use of a parameter behind finalize_backward() in the same backward."""
    model = _wrap(ReducerDDP, "default", manual=True)
    for _ in range(2):
        _step(model)
        model.finalize_backward()
    x = torch.randn(6, 16, requires_grad=True)

    def finalize_and_add(_: torch.Tensor) -> None:
        model.finalize_backward()
        with torch.enable_grad():
            (model.module.first.bias.sum() * 2).backward()

    x.register_hook(finalize_and_add)
    with pytest.raises(RuntimeError, match=r"'first\.bias' got another gradient after finalize"):
        model(x).sum().backward()
    _step(model)
    model.finalize_backward()
    ref.assert_in_step()


def test_a_gradient_after_finalization_in_the_same_backward(ranks):
    ref.on_ranks(ranks, 2, _check_repeated_gradient)


# ---- beside other features -----------------------------------------------------------------------


def _check_all_delayed() -> None:
    module = ref.Net()
    named = list(module.named_parameters())
    module.scale = nn.Parameter(torch.ones(1), requires_grad=False)  # DDP needs another parameter
    for cls in (ReducerDDP, DistributedDataParallel)[: 1 + DDP_HAS_IT]:
        model: Any = cls(
            module,
            delay_all_reduce_named_params=named,
            param_to_hook_all_reduce=module.first.weight,
        )
        words = "Manual backward finalization is not supported when all DDP parameters use"
        with pytest.raises(RuntimeError, match=words):
            model.require_manual_backward_finalization = True
        with pytest.raises(RuntimeError, match=words):
            model.finalize_backward()
        model.require_manual_backward_finalization = False
        assert not model.should_finalize_after_backward
        del model


def test_all_parameters_delayed(ranks):
    ref.on_ranks(ranks, 1, _check_all_delayed)


def _check_copies() -> None:
    model = ReducerDDP(ref.Net())
    model.require_manual_backward_finalization = True
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert twin.require_manual_backward_finalization
        ref.loss_of(twin(torch.randn(3, 6))).backward()
        twin.finalize_backward()


def test_a_copy_keeps_the_mode(ranks):
    ref.on_ranks(ranks, 2, _check_copies)


def _check_hooks() -> None:
    model = _wrap(ReducerDDP, "default", manual=True)
    calls: list[bool] = []
    model.register_post_sync_hook(model.module.first.weight, lambda p: calls.append(True))
    model.register_comm_hook(None, _average)
    plain = _wrap(ReducerDDP, "default", manual=False)
    for number in range(3):
        ref.seed(number)
        model.zero_grad()
        _step(model)
        assert len(calls) == number
        model.finalize_backward()
        assert len(calls) == number + 1
        ref.seed(number)
        plain.zero_grad()
        _step(plain)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            if theirs.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad)


def _average(state, bucket):  # DDP refuses annotations as text
    buffer = bucket.buffer().div_(dist.get_world_size())
    work = dist.all_reduce(buffer, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def test_post_sync_and_communication_hooks(ranks):
    ref.on_ranks(ranks, 2, _check_hooks)


def _check_finite_report() -> None:
    model = _wrap(ReducerDDP, "default", manual=True)
    model.set_check_finite()
    x = torch.full((6, 16), float("nan") if dist.get_rank() == 1 else 1.0)
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"NaN or infinity.*rank 1"):
        model.finalize_backward()
    model.zero_grad()
    _step(model)
    model.finalize_backward()


def test_check_finite_raises_in_finalize(ranks):
    ref.on_ranks(ranks, 2, _check_finite_report)


def _check_join(cls: Any, manual: bool) -> list[torch.Tensor]:
    model = _wrap(cls, "unused", manual)
    found: list[torch.Tensor] = []
    with model.join():
        for number in range(2 + dist.get_rank()):
            ref.seed(number)
            model.zero_grad()
            model(torch.randn(6, 16), spare=number == 1).square().mean().backward()
            if manual:
                model.finalize_backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


def _check_joins() -> None:
    ours = _check_join(ReducerDDP, manual=True)
    theirs = _check_join(DistributedDataParallel, manual=DDP_HAS_IT)
    # DDP fills an unused gradient with zeros while a rank shadows.
    plain = _check_join(ReducerDDP, manual=False)
    assert len(ours) == len(plain)
    assert all(map(torch.equal, ours, plain))
    assert theirs


def test_uneven_inputs(ranks):
    ref.on_ranks(ranks, 3, _check_joins)


def _check_pipeline() -> None:
    """Micro-batches in no_sync(), and prepare_for_backward() before the last backward."""
    for place in ("after", "hook"):
        model = _wrap(ReducerDDP, "default", manual=True)
        plain = _wrap(ReducerDDP, "default", manual=False)
        for number in range(4):
            for each in (model, plain):
                ref.seed(number)
                each.zero_grad()
                inputs = [torch.randn(6, 16, requires_grad=True) for _ in range(3)]
                with each.no_sync():
                    losses = [each(x).square().mean() for x in inputs]
                    losses[0].backward()
                    losses[1].backward()
                each.reducer.prepare_for_backward()
                if each is model:
                    _backward(model, inputs[2], losses[2], place)
                else:
                    losses[2].backward()
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert theirs.grad is None or torch.equal(ours.grad, theirs.grad)
    ref.assert_in_step()


def test_prepare_for_backward(ranks):
    ref.on_ranks(ranks, 2, _check_pipeline)


def _check_recording(place: str) -> None:
    model = _wrap(ReducerDDP, "default", manual=True)
    with ddpx.record(model) as timeline:
        for _ in range(4):
            x = torch.randn(6, 16, requires_grad=True)
            _backward(model, x, model(x).sum(), place)
    steps = timeline.steps
    assert [step.number for step in steps] == [0, 1, 2, 3]
    for step in steps:
        for rank_step in step.ranks.values():
            assert all(bucket is not None for bucket in rank_step.buckets)
            for bucket in rank_step.buckets:
                assert rank_step.backward.end <= bucket.wait.begin <= bucket.written_back
                assert bucket.written_back <= rank_step.end
    names = [span.phase for step in steps for span in step.ranks[0].phases]
    assert ("finalized" if place == "hook" else "ready") in names


@places
def test_recordings(ranks, place: str):
    ref.on_ranks(ranks, 2, _check_recording, place)


def _check_mixed_precision(place: str) -> None:
    from torch.nn.parallel.distributed import _MixedPrecision

    config = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = _wrap(ReducerDDP, "default", manual=True, mixed_precision=config)
    plain = _wrap(ReducerDDP, "default", manual=False, mixed_precision=config)
    refused: list[str] = []

    def finalize(_: torch.Tensor) -> None:
        try:
            model.finalize_backward()
        except RuntimeError as error:
            refused.append(str(error))

    for number in range(3):
        refused.clear()
        for each in (model, plain):
            ref.seed(number)
            each.zero_grad()
            x = torch.randn(6, 16, requires_grad=True)
            loss = each(x).sum()
            if each is model:
                assert model.should_finalize_after_backward
                if place == "hook":
                    x.register_hook(finalize)
            loss.backward()
        if place == "after" or refused:
            assert all("before all DDP buckets were ready" in error for error in refused), refused
            model.finalize_backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert theirs.grad is None or torch.equal(ours.grad, theirs.grad)


@places
def test_mixed_precision(ranks, place: str):
    """A hook is too early: a gradient of the full-precision parameter may come after it."""
    ref.on_ranks(ranks, 2, _check_mixed_precision, place)


def _check_two_wrappers() -> None:
    """One backward through two wrappers, of which one is finalized by hand."""
    first, second = ReducerDDP(nn.Linear(4, 4)), ReducerDDP(nn.Linear(4, 4))
    second.require_manual_backward_finalization = True
    for _ in range(3):
        first.zero_grad()
        second.zero_grad()
        x = torch.full((2, 4), dist.get_rank() + 1.0)
        second(first(x)).sum().backward()
        second.finalize_backward()
        for model in (first, second):
            for param in model.parameters():
                reference = param.grad.clone()
                dist.broadcast(reference, 0)
                torch.testing.assert_close(param.grad, reference)


def test_two_wrappers_in_one_backward(ranks):
    ref.on_ranks(ranks, 2, _check_two_wrappers)


def _check_slow(mode: str) -> None:
    from slow_ddp import MODES as SLOW_MODES

    ours = ReducerDDP(ref.build_same(ref.Net), bucket_cap_mb=0.0005, **SLOW_MODES[mode])
    slow = ref.SlowDDP(ref.build_same(ref.Net), "unused" in mode)
    ours.require_manual_backward_finalization = True
    for number in range(4):
        for model in (slow, ours):
            ref.seed(number)
            model.zero_grad()
            ref.loss_of(model(ref.data())).backward()
        slow.average()
        ours.zero_grad(set_to_none=False)  # before the averages are written
        ours.finalize_backward()
        ref.assert_same(ours, slow)
    ref.assert_in_step()


@pytest.mark.parametrize("mode", ["default", "static", "unused"])
def test_zeroed_between(ranks, mode: str):
    """Without views, the averages replace what the script does with ``param.grad`` meanwhile."""
    ref.on_ranks(ranks, 2, _check_slow, mode)
