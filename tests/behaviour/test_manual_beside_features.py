"""Manual finalization beside other features: copies, hooks, join(), recordings, mixed precision."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import slow_ddp as ref
import torch
import torch.distributed as dist
from manual_models import (
    DDP_HAS_IT,
    modes,
    places,
    run_backward,
    run_step,
    wrap_model,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import ddpx
from ddpx import ReducerDDP


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
    model = wrap_model(ReducerDDP, "default", manual=True)
    calls: list[bool] = []
    model.register_post_sync_hook(model.module.first.weight, lambda p: calls.append(True))
    model.register_comm_hook(None, allreduce_hook)
    plain = wrap_model(ReducerDDP, "default", manual=False)
    for number in range(3):
        ref.seed(number)
        model.zero_grad()
        run_step(model)
        assert len(calls) == number
        model.finalize_backward()
        assert len(calls) == number + 1
        ref.seed(number)
        plain.zero_grad()
        run_step(plain)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            if theirs.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad)


def test_post_sync_and_communication_hooks(ranks):
    ref.on_ranks(ranks, 2, _check_hooks)


def _train_with_optimizer(mode: str, cls: Any, manual: bool) -> list[torch.Tensor]:
    """With manual finalization, a hook runs the optimizer while backward goes on."""
    model = wrap_model(cls, mode, manual)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def update(_: object = None) -> None:
        if manual:
            model.finalize_backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(5):
        ref.seed(number)
        x = torch.randn(6, 16, requires_grad=True)
        loss = model(x).square().mean()
        # DDP may finalize in a hook of the first step with unused parameters, ddpx may not.
        in_hook = manual and number > 0 and not model.should_finalize_after_backward
        if in_hook:
            x.register_hook(update)
        loss.backward()
        if not in_hook:
            update()
    assert not manual or in_hook
    return [p.detach().clone() for p in model.parameters()]


def _check_optimizer_in_hook(mode: str) -> None:
    expected = _train_with_optimizer(mode, ReducerDDP, manual=False)
    for cls in (ReducerDDP, DistributedDataParallel)[: 1 + DDP_HAS_IT]:
        for ours, theirs in zip(
            _train_with_optimizer(mode, cls, manual=True), expected, strict=True
        ):
            assert torch.equal(ours, theirs)
    ref.assert_in_step()


@modes
def test_an_optimizer_in_the_hook_that_finalizes(ranks, mode: str):
    ref.on_ranks(ranks, 2, _check_optimizer_in_hook, mode)


def _check_finite_report() -> None:
    model = wrap_model(ReducerDDP, "default", manual=True)
    model.set_check_finite()
    x = torch.full((6, 16), float("nan") if dist.get_rank() == 1 else 1.0)
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"NaN or infinity.*rank 1"):
        model.finalize_backward()
    model.zero_grad()
    run_step(model)
    model.finalize_backward()


def test_check_finite_raises_in_finalize(ranks):
    ref.on_ranks(ranks, 2, _check_finite_report)


def _check_join(cls: Any, manual: bool) -> list[torch.Tensor]:
    model = wrap_model(cls, "unused", manual)
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
        model = wrap_model(ReducerDDP, "default", manual=True)
        plain = wrap_model(ReducerDDP, "default", manual=False)
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
                    run_backward(model, inputs[2], losses[2], place)
                else:
                    losses[2].backward()
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert theirs.grad is None or torch.equal(ours.grad, theirs.grad)
    ref.assert_in_step()


def test_prepare_for_backward(ranks):
    ref.on_ranks(ranks, 2, _check_pipeline)


def _check_recording(place: str) -> None:
    model = wrap_model(ReducerDDP, "default", manual=True)
    with ddpx.record(model) as timeline:
        for _ in range(4):
            x = torch.randn(6, 16, requires_grad=True)
            run_backward(model, x, model(x).sum(), place)
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
    model = wrap_model(ReducerDDP, "default", manual=True, mixed_precision=config)
    plain = wrap_model(ReducerDDP, "default", manual=False, mixed_precision=config)
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
