"""What ``bucket_cap_mb="auto"`` excludes, and what excludes a search."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from short_search import report_of, searched, small_module, train
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import _apply_optimizer_in_backward

import ddpx
from ddpx.ddp.arguments.bucket_sizes import CAP_VARIABLE, PLAN_VARIABLE


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_one_rank_has_nothing_to_measure(group: None) -> None:
    model = searched()
    assert model._ddpx.search is None
    assert str(report_of(model)).startswith("the default plan was kept, after 0 steps: the process")
    assert ddpx.plan_report(ddpx.ReducerDDP(small_module())) is None


def test_what_excludes_the_search_is_named(group: None, tmp_path: Path) -> None:
    plan = ddpx.bucket_plan(ddpx.ReducerDDP(small_module()))
    with pytest.raises(ValueError, match=r"bucket_plan= .*Leave out bucket_cap_mb"):
        searched(bucket_plan=plan)
    with pytest.raises(ValueError, match=r"'auto' and bucket_cap_mb_list exclude.*Leave out"):
        searched(bucket_cap_mb_list=[1, 2])
    module = small_module()
    with pytest.raises(ValueError, match=r"'auto' and delay_all_reduce_named_params exclude"):
        ddpx.ReducerDDP(
            module,
            bucket_cap_mb="auto",
            delay_all_reduce_named_params=[("0.weight", module[0].weight)],
            param_to_hook_all_reduce=module[3].weight,
        )
    with pytest.raises(RuntimeError, match=r"register_comm_hook\(\) .*Leave out .*bucket_plan="):
        searched().register_comm_hook(None, allreduce_hook)
    with pytest.raises(RuntimeError, match=r"^_register_builtin_comm_hook\(\) .*Leave out"):
        searched()._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with pytest.raises(
        RuntimeError, match=r"'auto': .*optimizer in backward registers such a hook"
    ):
        searched()._register_fused_optim(torch.optim.SGD, 0.1)
    with pytest.raises(ValueError, match=r"bucket_cap_mb='automatic'.*or 'auto'"):
        ddpx.ReducerDDP(small_module(), bucket_cap_mb="automatic")


def test_an_optimizer_in_backward_excludes_the_search(group: None) -> None:
    _apply_optimizer_in_backward(
        torch.optim.SGD, (module := small_module()).parameters(), {"lr": 0.1}
    )
    model = ddpx.ReducerDDP(module, bucket_cap_mb="auto")
    with pytest.raises(
        RuntimeError, match=r"'auto': .*optimizer in backward registers such a hook"
    ):
        train(model, 1)


def test_the_environment_asks_with_less_force(group: None, tmp_path: Path) -> None:
    plan = ddpx.bucket_plan(ddpx.ReducerDDP(small_module()))
    plan.save(tmp_path / "plan.json")
    with patch.dict(os.environ, {CAP_VARIABLE: "auto"}):
        assert report_of(ddpx.ReducerDDP(small_module(), bucket_cap_mb=5)).final
        for options in ({"bucket_plan": plan}, {"bucket_cap_mb_list": [1]}):
            with pytest.warns(UserWarning, match=f"{CAP_VARIABLE} has no effect"):
                assert ddpx.plan_report(ddpx.ReducerDDP(small_module(), **options)) is None
        delayed = small_module()
        with pytest.warns(UserWarning, match=f"{CAP_VARIABLE} .*delay_all_reduce_named_params"):
            model = ddpx.ReducerDDP(
                delayed,
                delay_all_reduce_named_params=[("0.weight", delayed[0].weight)],
                param_to_hook_all_reduce=delayed[3].weight,
            )
        assert ddpx.plan_report(model) is None and model.bucket_bytes_cap == 25 << 20
        model = ddpx.ReducerDDP(small_module())
        with pytest.warns(UserWarning, match=f"{CAP_VARIABLE}=auto has no effect.*hook"):
            model.register_comm_hook(None, allreduce_hook)
    with patch.dict(os.environ, {CAP_VARIABLE: "0.5"}):
        assert ddpx.ReducerDDP(small_module()).bucket_bytes_cap == 1 << 19
    with patch.dict(os.environ, {CAP_VARIABLE: "-1"}):
        assert ddpx.ReducerDDP(small_module()).bucket_bytes_cap == 2**63 - 1
    for text in ("many", "-2", "nan", "inf"):
        wrong = pytest.raises(ValueError, match=f"{CAP_VARIABLE}='{text}' is not a bucket size")
        with patch.dict(os.environ, {CAP_VARIABLE: text}), wrong:
            ddpx.ReducerDDP(small_module())
    with patch.dict(os.environ, {PLAN_VARIABLE: str(tmp_path / "plan.json")}):
        assert ddpx.plan_report(searched()) is None  # the plan of the environment takes precedence
