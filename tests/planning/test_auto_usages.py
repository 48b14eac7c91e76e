"""``bucket_cap_mb="auto"`` beside other features: what is refused, and what ends a search."""

from __future__ import annotations

import copy
import io
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from short_search import SHORT, short_search
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import _apply_optimizer_in_backward

import ddpx
from ddpx.ddp.arguments.bucket_sizes import CAP_VARIABLE, PLAN_VARIABLE
from ddpx.planning import search as searches
from ddpx.reducer import Reducer
from ddpx.testing import RankFailed, RankPool

STEPS = SHORT.most_steps + 1


def _module() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))


def _auto(**options: Any) -> ddpx.ReducerDDP:
    return ddpx.ReducerDDP(_module(), bucket_cap_mb="auto", **options)


def _train(model: Any, steps: int = STEPS) -> None:
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(4, 16)).square().mean().backward()


def _report(model: Any) -> ddpx.PlanReport:
    report = ddpx.plan_report(model)
    assert report is not None
    return report


# ---- one rank ------------------------------------------------------------------------------------


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_one_rank_has_nothing_to_measure(group: None) -> None:
    model = _auto()
    assert model._ddpx.search is None
    assert str(_report(model)).startswith("the default plan was kept, after 0 steps: the process")
    assert ddpx.plan_report(ddpx.ReducerDDP(_module())) is None


def test_what_excludes_the_search_is_named(group: None, tmp_path: Path) -> None:
    plan = ddpx.bucket_plan(ddpx.ReducerDDP(_module()))
    with pytest.raises(ValueError, match=r"bucket_plan= .*Leave out bucket_cap_mb"):
        _auto(bucket_plan=plan)
    with pytest.raises(ValueError, match=r"'auto' and bucket_cap_mb_list exclude.*Leave out"):
        _auto(bucket_cap_mb_list=[1, 2])
    module = _module()
    with pytest.raises(ValueError, match=r"'auto' and delay_all_reduce_named_params exclude"):
        ddpx.ReducerDDP(
            module,
            bucket_cap_mb="auto",
            delay_all_reduce_named_params=[("0.weight", module[0].weight)],
            param_to_hook_all_reduce=module[3].weight,
        )
    with pytest.raises(RuntimeError, match=r"register_comm_hook\(\) .*Leave out .*bucket_plan="):
        _auto().register_comm_hook(None, allreduce_hook)
    with pytest.raises(RuntimeError, match=r"^_register_builtin_comm_hook\(\) .*Leave out"):
        _auto()._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with pytest.raises(
        RuntimeError, match=r"'auto': .*optimizer in backward registers such a hook"
    ):
        _auto()._register_fused_optim(torch.optim.SGD, 0.1)
    with pytest.raises(ValueError, match=r"bucket_cap_mb='automatic'.*or 'auto'"):
        ddpx.ReducerDDP(_module(), bucket_cap_mb="automatic")


def test_an_optimizer_in_backward_excludes_the_search(group: None) -> None:
    _apply_optimizer_in_backward(torch.optim.SGD, (module := _module()).parameters(), {"lr": 0.1})
    model = ddpx.ReducerDDP(module, bucket_cap_mb="auto")
    with pytest.raises(
        RuntimeError, match=r"'auto': .*optimizer in backward registers such a hook"
    ):
        _train(model, 1)


def test_the_environment_asks_with_less_force(group: None, tmp_path: Path) -> None:
    plan = ddpx.bucket_plan(ddpx.ReducerDDP(_module()))
    plan.save(tmp_path / "plan.json")
    with patch.dict(os.environ, {CAP_VARIABLE: "auto"}):
        assert _report(ddpx.ReducerDDP(_module(), bucket_cap_mb=5)).final
        for options in ({"bucket_plan": plan}, {"bucket_cap_mb_list": [1]}):
            with pytest.warns(UserWarning, match=f"{CAP_VARIABLE} has no effect"):
                assert ddpx.plan_report(ddpx.ReducerDDP(_module(), **options)) is None
        delayed = _module()
        with pytest.warns(UserWarning, match=f"{CAP_VARIABLE} .*delay_all_reduce_named_params"):
            model = ddpx.ReducerDDP(
                delayed,
                delay_all_reduce_named_params=[("0.weight", delayed[0].weight)],
                param_to_hook_all_reduce=delayed[3].weight,
            )
        assert ddpx.plan_report(model) is None and model.bucket_bytes_cap == 25 << 20
        model = ddpx.ReducerDDP(_module())
        with pytest.warns(UserWarning, match=f"{CAP_VARIABLE}=auto has no effect.*hook"):
            model.register_comm_hook(None, allreduce_hook)
    with patch.dict(os.environ, {CAP_VARIABLE: "0.5"}):
        assert ddpx.ReducerDDP(_module()).bucket_bytes_cap == 1 << 19
    with patch.dict(os.environ, {CAP_VARIABLE: "-1"}):
        assert ddpx.ReducerDDP(_module()).bucket_bytes_cap == 2**63 - 1
    for text in ("many", "-2", "nan", "inf"):
        wrong = pytest.raises(ValueError, match=f"{CAP_VARIABLE}='{text}' is not a bucket size")
        with patch.dict(os.environ, {CAP_VARIABLE: text}), wrong:
            ddpx.ReducerDDP(_module())
    with patch.dict(os.environ, {PLAN_VARIABLE: str(tmp_path / "plan.json")}):
        assert ddpx.plan_report(_auto()) is None  # the plan of the environment takes precedence


# ---- two ranks -----------------------------------------------------------------------------------


def _one_gradient() -> None:
    model = ddpx.ReducerDDP(nn.Linear(4, 4, bias=False), bucket_cap_mb="auto")
    assert _report(model).reason == "the model has one gradient"
    assert model._ddpx.search is None


def _same_on_all_ranks() -> None:
    options = {"bucket_cap_mb": "auto"} if dist.get_rank() == 0 else {}
    with pytest.raises(RuntimeError, match="option bucket_cap_mb='auto'"):
        ddpx.ReducerDDP(_module(), **options)


def _copies() -> None:
    with short_search():
        model = _auto()
        _train(model, SHORT.warm_up + SHORT.arrivals + 3)  # plans are screened
        assert _report(model).state == "screening plans"
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
        for each in (model, *copies):
            _train(each)
            assert _report(each).final
    again = copy.deepcopy(model)
    assert not _report(again).final  # a copy measures for itself


def _hook_by_environment() -> None:
    with patch.dict(os.environ, {CAP_VARIABLE: "auto"}), short_search():
        model = ddpx.ReducerDDP(_module())
        default = [list(bucket) for bucket in model.reducer.plan.buckets]
        _train(model, 2)
        default = model.reducer.plan.buckets
        while model.reducer.plan.buckets == default:
            _train(model, 1)
        with pytest.warns(UserWarning, match="has no effect"):
            model.register_comm_hook(None, allreduce_hook)
        assert model.reducer.plan.buckets == default
        assert "communication hook" in _report(model).reason
        _train(model, 3)


def _hook_at_any_step() -> None:
    """A search that has been given up measures no more, whatever it would have done next."""
    with patch.dict(os.environ, {CAP_VARIABLE: "auto"}), short_search():
        for steps in range(1, SHORT.warm_up + SHORT.arrivals + 3):
            model = ddpx.ReducerDDP(_module())
            _train(model, steps)
            with pytest.warns(UserWarning, match="has no effect"):
                model.register_comm_hook(None, allreduce_hook)
            _train(model, 1)


def _uneven_inputs() -> None:
    """Ranks join in turn, also without any batch. Then the search goes on."""
    with short_search():
        model = _auto()
        for epoch, steps in enumerate((3, 4, 2, 5)):
            mine = 0 if dist.get_rank() == epoch % 2 else steps
            with model.join():
                _train(model, mine)
            assert not _report(model).final
            _train(model, 3)
        _train(model)
        assert _report(model).final
        assert ddpx.bucket_plan(model).buckets


def _different_numbers_of_forwards() -> None:
    with short_search():
        model = _auto()
        for step in range(STEPS):
            for _ in range(step % 2 * dist.get_rank()):
                model(torch.randn(4, 16))  # has no backward
            if dist.get_rank() == 0 and step % 3 == 0:
                with model.no_sync():
                    model(torch.randn(4, 16)).mean().backward()
            _train(model, 1)
        assert _report(model).final, _report(model)


def _two_wrappers_and_buffers() -> None:
    with short_search():
        models = [
            ddpx.ReducerDDP(nn.Sequential(_module(), nn.BatchNorm1d(16)), bucket_cap_mb=cap)
            for cap in ("auto", "auto", None)
        ]
        for _ in range(STEPS):
            x = torch.randn(4, 16)
            for model in models:
                x = model(x)
            x.square().mean().backward()
        assert all(_report(model).final for model in models[:2])


def _captured() -> None:
    with short_search():
        model = _auto()
        _train(model, 2)
        captured = patch.object(Reducer, "is_captured", True)
        refused = pytest.raises(RuntimeError, match=r"CUDA graph, .*plan_report\(model\)\.final")
        with captured, refused:
            _train(model, 1)
        ddpx.reset(model)
        _train(model)
        with captured:
            _train(model, 1)  # the plan is final


def _compiled() -> None:
    with short_search():
        model = _auto()
        compiled = torch.compile(model, backend="eager")
        for _ in range(STEPS):
            compiled(torch.randn(4, 16)).square().mean().backward()
        assert _report(model).final


def _other_group() -> None:
    """As ddpx.shrink() does, in the middle of a search and after it."""
    with short_search():
        model = _auto()
        for steps in (STEPS, SHORT.warm_up + 5):
            _train(model, steps)
            model._update_process_group(dist.new_group())
            assert not _report(model).final
            assert not model.reducer.recorded
            _train(model, steps)
            model._ddpx.move_to(dist.new_group(), num_steps=7)
            assert not _report(model).final and not model.reducer.recorded
        _train(model)
        assert _report(model).final and not model.reducer.recorded


def _steps_without_a_forward() -> None:
    """Rank 1 has two backwards of one forward where rank 0 has two forwards."""
    with short_search():
        model = _auto()
        _train(model, 2)  # as under DDP, the first forwards rebuild buckets together
        for _ in range(STEPS // 2 + 1):
            if dist.get_rank() == 0:
                _train(model, 2)
            else:
                loss = model(torch.randn(4, 16)).square().mean()
                loss.backward(retain_graph=True)
                loss.backward()
        assert _report(model).final
        _have_one_plan(model)


def _calls_of_the_script_between() -> None:
    """Rank 0 has a further forward before each call of the script. DDP allows this."""
    with short_search():
        model = _auto()
        _train(model, 2)  # as under DDP, the first forwards rebuild buckets together
        for _ in range(STEPS):
            if dist.get_rank() == 0:
                model(torch.randn(4, 16))
            metric = torch.ones(8, dtype=torch.float64)
            dist.all_reduce(metric)
            assert metric.tolist() == [2.0] * 8
            _train(model, 1)
        assert _report(model).final
        _have_one_plan(model)


def _errors_after_steps_of_one_rank() -> None:
    """The step has ended, but the error comes before the search. The next forward continues it."""
    with short_search():
        model = _auto()

        def fail(param: torch.Tensor) -> None:
            if dist.get_rank() == 0:
                raise ArithmeticError("on purpose")

        ddpx.register_post_sync_hook(model, model.module[0].bias, fail)
        for _ in range(STEPS):
            with suppress(ArithmeticError):
                _train(model, 1)
        model(torch.randn(4, 16))
        assert _report(model).final
        _have_one_plan(model)


def _an_exception_ends_a_join_context() -> None:
    """One rank keeps the exception, whose traceback keeps the context alive."""
    with short_search():
        model = _auto()
        _train(model, 5)
        kept = []
        try:
            with model.join(throw_on_early_termination=True):
                _train(model, 2 + dist.get_rank())
        except RuntimeError as error:
            if dist.get_rank() == 0:
                kept.append(error)
        assert ddpx.bucket_plan(model).buckets == _default_plan()
        _train(model, searches.MOST_STEPS)
        assert _report(model).final and "did not suffice" in _report(model).reason
        _have_one_plan(model)


def _default_plan() -> Any:
    model = ddpx.ReducerDDP(_module())
    _train(model, 3)
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
        model = _auto()
        if dist.get_rank() == 1:
            model._ddpx.search._search._training.highest = _die
        _train(model)


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
        model = _auto()
        _train(model)
    plain = ddpx.ReducerDDP(_module())
    _train(plain, 3)
    assert _calls(model) == _calls(plain)


def _calls(model: Any) -> list[str]:
    calls: list[str] = []

    def record(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            calls.append(frame.f_code.co_qualname)

    sys.setprofile(record)
    try:
        _train(model, 1)
    finally:
        sys.setprofile(None)
    return calls
