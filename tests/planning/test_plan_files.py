"""A plan of buckets: its file, its use by ReducerDDP, and plans that do not fit."""

from __future__ import annotations

import itertools
import json
import math
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from modes import MODES
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpx
from ddpx.ddp.arguments.bucket_sizes import PLAN_VARIABLE

STEPS = 4


def _module() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)
    )


def _train(model: nn.Module, module: nn.Module) -> list[torch.Tensor]:
    """The gradients of all steps."""
    grads = []
    for step in range(STEPS):
        torch.manual_seed(100 * step + dist.get_rank())
        model(torch.randn(6, 16)).square().mean().backward()
        grads += [param.grad.clone() for param in module.parameters()]
        model.zero_grad()
    return grads


def _equal(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def _save_and_use(folder: str, mode: str) -> None:
    """A run with the plan of another run has its buckets from the first step on, and its bits."""
    options = {**MODES[mode], "transport": "group"}
    module = _module()
    model = ddpx.ReducerDDP(module, bucket_cap_mb=0.0005, **options)
    first = _train(model, module)
    plan = ddpx.bucket_plan(model)
    assert len(plan.buckets) > 2 and sum(map(len, plan.buckets)) == 6
    assert sum(plan.num_bytes) == sum(param.nbytes for param in module.parameters())
    path = Path(folder, f"{dist.get_rank()}.json")
    plan.save(path)
    again = _module()
    model = ddpx.ReducerDDP(again, bucket_plan=path, **options)
    assert ddpx.bucket_plan(model) == model.bucket_plan() == plan  # before the first step
    grads = _train(model, again)
    assert ddpx.bucket_plan(model) == plan
    # The other run rebuilt its buckets before its second step, or its third if the graph is static.
    assert _equal(first[len(first) // 2 :], grads[len(grads) // 2 :])
    for _ in range(2):
        module = _module()
        assert _equal(_train(ddpx.ReducerDDP(module, bucket_plan=plan, **options), module), grads)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [2, 3])
def test_a_run_can_be_repeated(ranks, mode, size, tmp_path):
    ranks(size).run(_save_and_use, str(tmp_path), mode)


def _as_list_of_ddp() -> None:
    module = _module()
    model = ddpx.ReducerDDP(module, bucket_cap_mb=0.0005)
    _train(model, module)
    plan = ddpx.bucket_plan(model)
    theirs = _module()
    ddp = DistributedDataParallel(theirs, bucket_cap_mb_list=plan.cap_mb_list)
    expected = _train(ddp, theirs)
    ours = _module()
    grads = _train(ddpx.ReducerDDP(ours, bucket_plan=plan, transport="group"), ours)
    assert _equal(grads[len(grads) // STEPS :], expected[len(grads) // STEPS :])
    sizes = ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    assert [int(size) for size in sizes.split(", ")] == list(plan.num_bytes)


def test_ddp_makes_the_same_buckets_from_the_list(ranks):
    ranks(3).run(_as_list_of_ddp)


def _with_environment(path: str) -> None:
    module = _module()
    model = ddpx.ReducerDDP(module, bucket_cap_mb=25)  # as an unchanged script
    assert ddpx.bucket_plan(model) == ddpx.BucketPlan.load(path)
    _train(model, module)
    frozen = _module()
    frozen[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"does not average '0.weight'"):
        ddpx.ReducerDDP(frozen)


def test_the_environment_gives_an_unchanged_script_its_plan(ranks, tmp_path):
    names = [name for name, _ in _module().named_parameters()]
    sizes = [param.nbytes for param in _module().parameters()]
    plan = ddpx.BucketPlan(tuple((name,) for name in names), tuple(sizes))
    path = tmp_path / "plan.json"
    plan.save(path)
    ranks(2).run(_run_with_variable, str(path))


def _run_with_variable(path: str) -> None:
    os.environ[PLAN_VARIABLE] = path
    try:
        _with_environment(path)
    finally:
        del os.environ[PLAN_VARIABLE]


def _plans_differ() -> str:
    module = _module()
    names = [name for name, _ in module.named_parameters()]
    cut = 2 + dist.get_rank()
    plan = ddpx.BucketPlan((tuple(names[:cut]), tuple(names[cut:])), (0, 0))
    with pytest.raises((RuntimeError, ValueError)) as caught:
        ddpx.ReducerDDP(module, bucket_plan=plan)
    return str(caught.value)


def test_ranks_with_different_plans_raise(ranks):
    for text in ranks(2).run(_plans_differ):
        assert "bucket_plan" in text


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


NAMES = [f"{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias")]
MISFITS = {
    "does not average 'nobody'": [NAMES, ["nobody"]],
    "lacks '4.bias'": [NAMES[:-1]],
    "several buckets have '0.weight'": [NAMES, NAMES[:1]],
    "bucket 1 is empty": [NAMES, []],
}


@pytest.mark.parametrize("said", MISFITS)
def test_a_plan_that_does_not_fit(group, said):
    buckets = tuple(tuple(bucket) for bucket in MISFITS[said])
    plan = ddpx.BucketPlan(buckets, tuple(0 for _ in buckets))
    with pytest.raises(ValueError, match=f"does not fit this model: .*{said}"):
        ddpx.ReducerDDP(_module(), bucket_plan=plan)


def test_a_bucket_has_one_dtype(group):
    module = _module()
    module[0].double()
    plan = ddpx.BucketPlan((tuple(NAMES),), (0,))
    with pytest.raises(ValueError, match=r"bucket 0 has .*float32 on cpu and torch\.float64"):
        ddpx.ReducerDDP(module, bucket_plan=plan)


def test_a_sparse_gradient_has_a_bucket_of_its_own(group):
    module = nn.Sequential(nn.Embedding(4, 4, sparse=True), nn.Linear(4, 4))
    plan = ddpx.BucketPlan((("0.weight", "1.weight"), ("1.bias",)), (0, 0))
    with pytest.raises(ValueError, match=r"bucket 0 has '0.weight', whose sparse gradient"):
        ddpx.ReducerDDP(module, bucket_plan=plan)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"bucket_cap_mb": 1}, "Leave out bucket_cap_mb"),
        ({"bucket_cap_mb_list": [1.0]}, "Leave out bucket_cap_mb"),
        ({"bucket_plan": 25}, "path of its file, but got 25"),
    ],
)
def test_arguments_that_contradict_each_other(group, options, said):
    plan = ddpx.BucketPlan((tuple(NAMES),), (0,))
    with pytest.raises((ValueError, TypeError), match=said):
        ddpx.ReducerDDP(_module(), **{"bucket_plan": plan, **options})


def test_delayed_parameters_have_no_plan(group, tmp_path, monkeypatch):
    plan = ddpx.BucketPlan((tuple(NAMES),), (0,))
    module = _module()
    delayed = {
        "delay_all_reduce_named_params": [("0.weight", module[0].weight)],
        "param_to_hook_all_reduce": module[4].weight,
    }
    with pytest.raises(ValueError, match="exclude each other"):
        ddpx.ReducerDDP(module, bucket_plan=plan, **delayed)
    plan.save(tmp_path / "plan.json")
    monkeypatch.setenv(PLAN_VARIABLE, str(tmp_path / "plan.json"))
    with pytest.warns(UserWarning, match=f"{PLAN_VARIABLE} has no effect"):
        ddpx.ReducerDDP(module, **delayed)


def test_files_that_have_no_plan(tmp_path):
    infinite = {"format": "ddpx bucket plan 1", "buckets": [{"bytes": math.inf, "params": ["a"]}]}
    texts = ["", "[]", "{}", '{"format": "another", "buckets": []}', json.dumps(infinite)]
    for number, text in enumerate(texts):
        path = tmp_path / f"{number}.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=f"{number}.json is no bucket plan"):
            ddpx.BucketPlan.load(path)
    with pytest.raises(OSError):
        ddpx.BucketPlan.load(tmp_path / "nothing.json")


def test_the_file_is_readable(tmp_path):
    plan = ddpx.BucketPlan((("a", "b"), ("c",)), (8, 4))
    plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    assert list(itertools.chain(*(bucket["params"] for bucket in data["buckets"]))) == [
        "a",
        "b",
        "c",
    ]
    assert ddpx.BucketPlan.load(tmp_path / "plan.json") == plan
