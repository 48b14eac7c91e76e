"""``average=``: sums, and averages by weight, compared with one process over all data."""

from __future__ import annotations

import copy
from typing import Any

import averages
import pytest
import torch
import torch.distributed as dist
from modes import MODES_OF_DDPX
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import _MixedPrecision

import ddpx
from ddpx import ReducerDDP

AVERAGES = ("mean", "sum", "weights")


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("mode", MODES_OF_DDPX)
@pytest.mark.parametrize("transport", ["group", "shm"])
def test_as_one_process(ranks, world, transport, mode, average):
    options = {**MODES_OF_DDPX[mode], "transport": transport, "average": average}
    for num_micro_steps in (1, 3):
        ranks(world).run(averages.compare_steps, num_micro_steps, **options)


@pytest.mark.parametrize("average", AVERAGES)
def test_one_rank(ranks, average):
    ranks(1).run(averages.compare_steps, 3, average=average)


# ---- communication hooks -------------------------------------------------------------------------


def _sum_then_divide(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Any]:
    """Returns a tensor of its own."""
    work = dist.all_reduce(bucket.buffer().clone(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0] / dist.get_world_size())


HOOKS = {
    "torch's": lambda model: model.register_comm_hook(None, default_hooks.allreduce_hook),
    "own tensor": lambda model: model.register_comm_hook(None, _sum_then_divide),
    "built in": lambda model: model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
}


def _with_hook(hook: str, average: str, **options: Any) -> None:
    averages.compare_steps(2, average, hook=HOOKS[hook], **options)


@pytest.mark.parametrize("average", ["sum", "weights"])
@pytest.mark.parametrize("mode", ["default", "view"])
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks(ranks, world, hook, mode, average):
    """The result of a hook is a mean over ranks, from which the reducer makes the average."""
    ranks(world).run(_with_hook, hook, average, **MODES_OF_DDPX[mode])


# ---- unused parameters ---------------------------------------------------------------------------


def _unused_by_some(average: str, **options: Any) -> None:
    """The branch is used by no rank, by rank 1 alone, or by all ranks."""
    module = averages.make_module()
    model = ReducerDDP(
        module,
        bucket_cap_mb=averages.SMALL_CAP,
        find_unused_parameters=True,
        average=average,
        **options,
    )
    rank, world = dist.get_rank(), dist.get_world_size()
    for step, users in enumerate(([], [], [1], [0, 1, 2], [], [1], [])):
        alone = copy.deepcopy(module)
        alone.zero_grad()
        model.zero_grad()
        items = [averages.batch(step, r, 0) for r in range(world)]
        total = sum(map(len, items)) if average == "weights" else 1
        for r in range(world):
            (averages.loss_sum(alone(items[r], r in users)) / total).backward()
        if average == "weights":
            ddpx.set_weight(model, len(items[rank]))
        averages.loss_sum(model(items[rank], rank in users)).backward()
        averages.assert_close(averages.gradients(module), averages.gradients(alone))


@pytest.mark.parametrize("average", ["sum", "weights"])
@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("mode", ["default", "view", "batched"])
def test_unused_by_some_ranks(ranks, world, mode, skips, average):
    options = {**MODES_OF_DDPX[mode], "skip_all_reduce_unused_params": skips}
    ranks(world).run(_unused_by_some, average, **options)


# ---- uneven inputs -------------------------------------------------------------------------------


def _uneven(average: str, divide_by_initial_world_size: bool, **options: Any) -> None:
    """Rank r has 2 + r batches. A rank without batches has the weight 0."""
    module = averages.make_module()
    model = ReducerDDP(module, bucket_cap_mb=averages.SMALL_CAP, average=average, **options)
    rank, world = dist.get_rank(), dist.get_world_size()
    with model.join(divide_by_initial_world_size=divide_by_initial_world_size):
        for step in range(2 + rank):
            model.zero_grad()
            present = [r for r in range(world) if step < 2 + r]
            num_micro_steps = 1 + step % 2  # also in no_sync()
            expected = averages.in_one_process(module, step, present, num_micro_steps, average)
            averages.train_step(model, step, num_micro_steps, average == "weights")
            averages.assert_close(averages.gradients(module), expected)


@pytest.mark.parametrize("average", ["sum", "weights"])
@pytest.mark.parametrize("by_initial", [True, False])
@pytest.mark.parametrize("mode", ["default", "view", "static", "find unused"])
def test_join(ranks, world, mode, by_initial, average):
    ranks(world).run(_uneven, average, by_initial, **MODES_OF_DDPX[mode])


# ---- dtypes --------------------------------------------------------------------------------------


def _in_bfloat16(tolerance: float, **options: Any) -> None:
    """Sums of weights above 65,504 do not fit into 16 bits."""
    module = averages.make_module().bfloat16()
    model = ReducerDDP(module, average="weights", bucket_cap_mb=averages.SMALL_CAP, **options)
    rank, world = dist.get_rank(), dist.get_world_size()
    weights = [100_003 * (r + 1) for r in range(world)]
    for step in range(3):
        reference = copy.deepcopy(module).double()
        model.zero_grad()
        for r in range(world):
            x = averages.batch(step, r, 0).bfloat16().double()
            (averages.loss_sum(reference(x)) / sum(weights) * 1000).backward()
        ddpx.set_weight(model, weights[rank])
        x = averages.batch(step, rank, 0).bfloat16()
        (averages.loss_sum(model(x)) * 1000).backward()
        averages.assert_close(averages.gradients(module), averages.gradients(reference), tolerance)


@pytest.mark.parametrize("mode", ["default", "view", "batched"])
@pytest.mark.parametrize(
    "options, tolerance",
    [({}, 0.05), ({"reduce_dtype": torch.float32}, 0.03), ({"grad_dtype": torch.float32}, 0.03)],
    ids=["bfloat16", "reduce_dtype", "grad_dtype"],
)
def test_sixteen_bits(ranks, world, options, tolerance, mode):
    """The tolerance is that of a forward and a backward in bfloat16."""
    ranks(world).run(_in_bfloat16, tolerance, **options, **MODES_OF_DDPX[mode])


def _in_half(**options: Any) -> None:
    """The quotient by 200,000 is right to one rounding."""
    module = nn.Linear(1, 1, bias=False).half()
    model = ReducerDDP(module, average="weights", **options)
    ddpx.set_weight(model, 100_000)
    model(torch.full((1, 1), 20_000.0, dtype=torch.float16)).sum().backward()
    assert module.weight.grad is not None
    expected = 20_000.0 / 100_000
    assert abs(module.weight.grad.item() - expected) <= 2**-11 * expected


@pytest.mark.parametrize("mode", ["default", "view"])
def test_weights_beyond_the_range_of_half(ranks, mode):
    ranks(2).run(_in_half, **MODES_OF_DDPX[mode])


def _in_mixed_precision(average: str, **options: Any) -> None:
    module = averages.make_module().float()
    precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = ReducerDDP(module, average=average, mixed_precision=precision, **options)
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        reference = copy.deepcopy(module).double()
        model.zero_grad()
        expected = averages.in_one_process(reference, step, range(world), 1, average)
        if average == "weights":
            ddpx.set_weight(model, averages.num_items(step, rank, 0))
        averages.loss_sum(model(averages.batch(step, rank, 0))).backward()
        averages.assert_close(averages.gradients(module), expected, tolerance=0.1)


@pytest.mark.parametrize("average", ["sum", "weights"])
@pytest.mark.parametrize("mode", ["default", "view"])
def test_mixed_precision(ranks, world, mode, average):
    """The tolerance is that of a forward and a backward in bfloat16."""
    ranks(world).run(_in_mixed_precision, average, **MODES_OF_DDPX[mode])


# ---- other parameters ----------------------------------------------------------------------------


class _Embedding(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4, sparse=sparse)
        self.last = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(self.embedding(ids))


def _sparse(hook: bool) -> None:
    torch.manual_seed(0)
    dense = _Embedding(sparse=False).double()
    module = _Embedding(sparse=True).double()
    module.load_state_dict(dense.state_dict())
    model = ReducerDDP(module, average="weights")
    if hook:
        model.register_comm_hook(None, _sum_then_divide)
    world = dist.get_world_size()
    ids = [torch.arange(2 * r, 3 * r + 1) % 10 for r in range(world)]
    for _ in range(2):
        model.zero_grad()
        dense.zero_grad()
        (averages.loss_sum(dense(torch.cat(ids))) / sum(map(len, ids))).backward()
        mine = ids[dist.get_rank()]
        ddpx.set_weight(model, len(mine))
        averages.loss_sum(model(mine)).backward()
        grads = [g.to_dense() for g in averages.gradients(module) if g is not None]
        averages.assert_close(grads, averages.gradients(dense))


@pytest.mark.parametrize("hook", [False, True])
def test_sparse_gradients(ranks, world, hook):
    ranks(world).run(_sparse, hook)


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(self.weight * x)


def _complex(hook: str | None, **options: Any) -> None:
    module = _Complex()
    alone = copy.deepcopy(module)
    model = ReducerDDP(module, average="weights", **options)
    if hook is not None:
        HOOKS[hook](model)
    world = dist.get_world_size()
    inputs = [torch.tensor([1.0 + r, 2.0 - r]) for r in range(world)]
    weights = [3.0 * r for r in range(world)]
    for _ in range(2):
        model.zero_grad()
        alone.zero_grad()
        for x in inputs:
            (averages.loss_sum(alone(x)) / sum(weights)).backward()
        ddpx.set_weight(model, weights[dist.get_rank()])
        averages.loss_sum(model(inputs[dist.get_rank()])).backward()
        assert module.weight.grad is not None and alone.weight.grad is not None
        torch.testing.assert_close(module.weight.grad, alone.weight.grad)


@pytest.mark.parametrize("hook", [None, *HOOKS])
@pytest.mark.parametrize("mode", ["default", "view"])
def test_complex_parameters(ranks, world, mode, hook):
    ranks(world).run(_complex, hook, **MODES_OF_DDPX[mode])


# ---- weights whose gradients are gone -----------------------------------------------------------


def _leftover_micro_step() -> float:
    """An epoch ends within an accumulation, and the script clears the gradients."""
    module = torch.nn.Linear(2, 1, bias=False)
    model = ddpx.ReducerDDP(module, average="weights")
    with model.no_sync():
        ddpx.set_weight(model, 4)
        model(torch.ones(4, 2)).sum().backward()
    model.zero_grad()
    ddpx.set_weight(model, 4)
    model(torch.ones(4, 2)).sum().backward()
    return float(module.weight.grad[0, 0])


def test_weights_of_cleared_gradients_are_forgotten(ranks):
    assert ranks(2).run(_leftover_micro_step) == [1.0, 1.0]


def _abort_in_a_micro_step(clear: bool) -> float | str:
    module = torch.nn.Linear(2, 1, bias=False)
    model = ddpx.ReducerDDP(module, average="weights")
    with model.no_sync():
        ddpx.set_weight(model, 4)
        model(torch.ones(4, 2)).sum().backward()
        ddpx.set_weight(model, 4)
        loss = model(torch.ones(4, 2)).sum()
        hook = module.weight.register_hook(_raise)
        with pytest.raises(ValueError):
            loss.backward()
        hook.remove()
    if clear:
        model.zero_grad()
    ddpx.set_weight(model, 4)
    loss = model(torch.ones(4, 2)).sum()
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return float(module.weight.grad[0, 0])


def _raise(_: torch.Tensor) -> None:
    raise ValueError("in a micro-step")


def test_an_abort_in_a_micro_step_loses_no_weight_silently(ranks):
    assert ranks(2).run(_abort_in_a_micro_step, True) == [1.0, 1.0]
    for text in ranks(2).run(_abort_in_a_micro_step, False):
        assert "weights of earlier forwards are forgotten" in text and "ddpx.reset(model)" in text


def _legitimate_backwards() -> list[float]:
    """An input gradient before zero_grad(), and a frozen parameter that still has a gradient."""
    module = torch.nn.Sequential(
        torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 1, bias=False)
    )
    model = ddpx.ReducerDDP(module, average="sum")
    x = torch.ones(4, 2, requires_grad=True)
    model(x).sum().backward()
    (grad,) = torch.autograd.grad(model(x).sum(), x)
    kept = module[0].weight.grad.clone()
    module[0].weight.requires_grad_(False)
    module[1].weight.grad = None
    model(x).sum().backward()
    assert torch.equal(module[0].weight.grad, kept)
    return [float(grad.sum())]


def test_backwards_that_sum_no_kept_average(ranks):
    ranks(2).run(_legitimate_backwards)
