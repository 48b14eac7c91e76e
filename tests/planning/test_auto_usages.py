"""``bucket_cap_mb="auto"`` beside other features: what continues and what ends a search."""

from __future__ import annotations

import copy
import gc
import io
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from short_search import SHORT, STEPS, report_of, searched, short_search, small_module, train
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import ddpx
from ddpx.ddp.arguments.bucket_sizes import CAP_VARIABLE
from ddpx.planning import search as searches
from ddpx.reducer import Reducer
from ddpx.testing import RankFailed, RankPool


def _one_gradient() -> None:
    model = ddpx.ReducerDDP(nn.Linear(4, 4, bias=False), bucket_cap_mb="auto")
    assert report_of(model).reason == "the model has one gradient"
    assert model._ddpx.search is None


def _same_on_all_ranks() -> None:
    options = {"bucket_cap_mb": "auto"} if dist.get_rank() == 0 else {}
    with pytest.raises(RuntimeError, match="option bucket_cap_mb='auto'"):
        ddpx.ReducerDDP(small_module(), **options)


def _copies() -> None:
    with short_search():
        model = searched()
        train(model, SHORT.warm_up + SHORT.arrivals + 3)  # plans are screened
        assert report_of(model).state == "screening plans"
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
        for each in (model, *copies):
            train(each)
            assert report_of(each).final
    again = copy.deepcopy(model)
    assert not report_of(again).final  # a copy measures for itself


def _hook_by_environment() -> None:
    with patch.dict(os.environ, {CAP_VARIABLE: "auto"}), short_search():
        model = ddpx.ReducerDDP(small_module())
        default = [list(bucket) for bucket in model.reducer.plan.buckets]
        train(model, 2)
        default = model.reducer.plan.buckets
        while model.reducer.plan.buckets == default:
            train(model, 1)
        with pytest.warns(UserWarning, match="has no effect"):
            model.register_comm_hook(None, allreduce_hook)
        assert model.reducer.plan.buckets == default
        assert "communication hook" in report_of(model).reason
        train(model, 3)


def _hook_at_any_step() -> None:
    """A search that has been given up measures no more, whatever it would have done next."""
    with patch.dict(os.environ, {CAP_VARIABLE: "auto"}), short_search():
        for steps in range(1, SHORT.warm_up + SHORT.arrivals + 3):
            model = ddpx.ReducerDDP(small_module())
            train(model, steps)
            with pytest.warns(UserWarning, match="has no effect"):
                model.register_comm_hook(None, allreduce_hook)
            train(model, 1)


def _uneven_inputs() -> None:
    """Ranks join in turn, also without any batch. Then the search goes on."""
    with short_search():
        model = searched()
        for epoch, steps in enumerate((3, 4, 2, 5)):
            mine = 0 if dist.get_rank() == epoch % 2 else steps
            with model.join():
                train(model, mine)
            assert not report_of(model).final
            train(model, 3)
        train(model)
        assert report_of(model).final
        assert ddpx.bucket_plan(model).buckets


def _different_numbers_of_forwards() -> None:
    with short_search():
        model = searched()
        for step in range(STEPS):
            for _ in range(step % 2 * dist.get_rank()):
                model(torch.randn(4, 16))  # has no backward
            if dist.get_rank() == 0 and step % 3 == 0:
                with model.no_sync():
                    model(torch.randn(4, 16)).mean().backward()
            train(model, 1)
        assert report_of(model).final, report_of(model)


def _two_wrappers_and_buffers() -> None:
    with short_search():
        models = [
            ddpx.ReducerDDP(nn.Sequential(small_module(), nn.BatchNorm1d(16)), bucket_cap_mb=cap)
            for cap in ("auto", "auto", None)
        ]
        for _ in range(STEPS):
            x = torch.randn(4, 16)
            for model in models:
                x = model(x)
            x.square().mean().backward()
        assert all(report_of(model).final for model in models[:2])


def _captured() -> None:
    with short_search():
        model = searched()
        train(model, 2)
        captured = patch.object(Reducer, "is_captured", True)
        refused = pytest.raises(RuntimeError, match=r"CUDA graph, .*plan_report\(model\)\.final")
        with captured, refused:
            train(model, 1)
        ddpx.reset(model)
        train(model)
        with captured:
            train(model, 1)  # the plan is final


def _compiled() -> None:
    with short_search():
        model = searched()
        compiled = torch.compile(model, backend="eager")
        for _ in range(STEPS):
            compiled(torch.randn(4, 16)).square().mean().backward()
        assert report_of(model).final


def _other_group() -> None:
    """As ddpx.shrink() does, in the middle of a search and after it."""
    with short_search():
        model = searched()
        for steps in (STEPS, SHORT.warm_up + 5):
            train(model, steps)
            model._update_process_group(dist.new_group())
            assert not report_of(model).final
            assert not model.reducer.recorded
            train(model, steps)
            model._ddpx.move_to(dist.new_group(), num_steps=7)
            assert not report_of(model).final and not model.reducer.recorded
        train(model)
        assert report_of(model).final and not model.reducer.recorded


def _steps_without_a_forward() -> None:
    """Rank 1 has two backwards of one forward where rank 0 has two forwards."""
    with short_search():
        model = searched()
        train(model, 2)  # as under DDP, the first forwards rebuild buckets together
        for _ in range(STEPS // 2 + 1):
            if dist.get_rank() == 0:
                train(model, 2)
            else:
                loss = model(torch.randn(4, 16)).square().mean()
                loss.backward(retain_graph=True)
                loss.backward()
        assert report_of(model).final
        _have_one_plan(model)


def _calls_of_the_script_between() -> None:
    """Rank 0 has a further forward before each call of the script. DDP allows this."""
    with short_search():
        model = searched()
        train(model, 2)  # as under DDP, the first forwards rebuild buckets together
        for _ in range(STEPS):
            if dist.get_rank() == 0:
                model(torch.randn(4, 16))
            metric = torch.ones(8, dtype=torch.float64)
            dist.all_reduce(metric)
            assert metric.tolist() == [2.0] * 8
            train(model, 1)
        assert report_of(model).final
        _have_one_plan(model)


def _errors_after_steps_of_one_rank() -> None:
    """The step has ended, but the error comes before the search. The next forward continues it."""
    with short_search():
        model = searched()

        def fail(param: torch.Tensor) -> None:
            if dist.get_rank() == 0:
                raise ArithmeticError("on purpose")

        ddpx.register_post_sync_hook(model, model.module[0].bias, fail)
        for _ in range(STEPS):
            with suppress(ArithmeticError):
                train(model, 1)
        model(torch.randn(4, 16))
        assert report_of(model).final
        _have_one_plan(model)


def _an_exception_ends_a_join_context() -> None:
    """One rank keeps the exception, whose traceback keeps the context alive."""
    with short_search():
        model = searched()
        train(model, 5)
        kept = []
        try:
            with model.join(throw_on_early_termination=True):
                train(model, 2 + dist.get_rank())
        except RuntimeError as error:
            if dist.get_rank() == 0:
                kept.append(error)
        assert ddpx.bucket_plan(model).buckets == _default_plan()
        train(model, searches.MOST_STEPS)
        assert report_of(model).final and "did not suffice" in report_of(model).reason
        _have_one_plan(model)


def _default_plan() -> Any:
    model = ddpx.ReducerDDP(small_module())
    train(model, 3)
    return ddpx.bucket_plan(model).buckets


def _have_one_plan(model: Any) -> None:
    plans: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(plans, ddpx.bucket_plan(model).buckets)
    assert len(set(plans)) == 1, plans


USAGES: dict[str, Callable[[], None]] = {
    function.__name__.strip("_"): function
    for function in (
        _one_gradient,
        _same_on_all_ranks,
        _copies,
        _hook_by_environment,
        _hook_at_any_step,
        _uneven_inputs,
        _different_numbers_of_forwards,
        _two_wrappers_and_buffers,
        _captured,
        _compiled,
        _other_group,
        _steps_without_a_forward,
        _calls_of_the_script_between,
        _errors_after_steps_of_one_rank,
        _an_exception_ends_a_join_context,
    )
}


@pytest.mark.parametrize("usage", USAGES)
def test_usages(ranks, usage):
    ranks(2).run(USAGES[usage])


def _die(values: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _lost_in_an_exchange() -> None:
    with short_search():
        model = searched()
        if dist.get_rank() == 1:
            model._ddpx.search._search._training.highest = _die
        train(model)


def test_a_rank_that_is_lost_in_an_exchange_is_named():
    with RankPool(2) as pool, pytest.raises(RankFailed) as failed:
        pool.run(_lost_in_an_exchange)
    text = str(failed.value)
    assert "RankFailure: " in text and "rank 1" in text and "was killed by SIGKILL" in text


def test_nothing_remains_of_a_search(ranks) -> None:
    ranks(2).run(_nothing_remains)


def _nothing_remains() -> None:
    """After the search, a step makes the same Python calls as without one."""
    with short_search():
        model = searched()
        train(model)
    plain = ddpx.ReducerDDP(small_module())
    train(plain, 3)
    found, expected = _calls(model), _calls(plain)
    assert found == expected, set(found) ^ set(expected)


def _calls(model: Any) -> list[str]:
    calls: list[str] = []

    def record(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            calls.append(frame.f_code.co_qualname)

    gc.collect()
    gc.disable()  # a collection calls the finalizers of other objects
    sys.setprofile(record)
    try:
        train(model, 1)
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls
