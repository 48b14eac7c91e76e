"""Ranks that freeze different parameters after wrapping, with ``find_unused_parameters=True``.

As in DDP, every rank gets the average of a parameter that some rank has used, frozen or not.
"""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_arguments import skip_unless_ddp_takes
from slow_ddp import SMALL_CAP, assert_in_step, error_of, on_ranks
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP
from ddpx.testing import compare_traces, compare_with_ddp, record_training

NAMES = ("a", "b", "c")
FIND_UNUSED = {"find_unused_parameters": True, "bucket_cap_mb": SMALL_CAP}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "view": {"gradient_as_bucket_view": True},
    "batched": {"batched_grad_copy": True, "gradient_as_bucket_view": True},
    "one bucket": {"bucket_cap_mb": 25},
}


class Adapters(nn.Module):
    """A base and three adapters. A forward uses the base and the adapters that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6)
        for name in NAMES:
            self.add_module(name, nn.Linear(6, 6))

    def forward(self, x: torch.Tensor, used: str = "abc") -> torch.Tensor:
        x = torch.tanh(self.base(x))
        return x + sum(torch.tanh(getattr(self, name)(x)) for name in used)


# The adapters that each rank freezes, by step and rank.
PATTERNS: dict[str, Callable[[int, int], str]] = {
    "by rank": lambda step, rank: "abc".replace("abc"[rank % 3], ""),
    "on rank 0": lambda step, rank: "b" if rank == 0 else "",
    "not on rank 0": lambda step, rank: "" if rank == 0 else "b",
    "everywhere": lambda step, rank: "b",
    "in turn": lambda step, rank: "abc"[(step + rank) % 3],
    "from the third step on": lambda step, rank: "ab" if step >= 2 and rank == 0 else "",
    "until the third step": lambda step, rank: "ab" if step < 2 and rank == 0 else "",
    "random": lambda step, rank: "".join(
        name for name in NAMES if random.Random(f"{step} {rank} {name}").random() < 0.6
    ),
}
USES = {
    "frozen adapters are used": lambda frozen: "abc",
    "frozen adapters are left out": lambda frozen: "".join(n for n in NAMES if n not in frozen),
}


def _adapters(model: nn.Module) -> Adapters:
    return getattr(model, "module", model)


def _freeze(model: nn.Module, frozen: str) -> None:
    for name in NAMES:
        getattr(_adapters(model), name).requires_grad_(name not in frozen)


def _step(pattern: str, use: str, num_local: int = 0) -> Callable[[nn.Module, int], None]:
    def step(model: nn.Module, number: int) -> None:
        frozen = PATTERNS[pattern](number, dist.get_rank())
        if num_local:  # in these backwards, other adapters are frozen
            _freeze(model, PATTERNS[pattern](number + 1, dist.get_rank()))
        for _ in range(num_local):
            with model.no_sync():
                model(torch.randn(4, 6), "ab").square().mean().backward()
        _freeze(model, frozen)
        model(torch.randn(4, 6), USES[use](frozen)).square().mean().backward()

    return step


def _expect_no_difference(found: list[list[str]]) -> None:
    assert not any(found), found


def _compare(pattern: str, use: str, options: str, keep: bool, num_local: int) -> list[str]:
    found = compare_with_ddp(
        Adapters,
        _step(pattern, use, num_local),
        num_steps=6,
        set_to_none=None if keep else True,
        **{**FIND_UNUSED, **OPTIONS[options]},
    )
    assert_in_step()
    return list(found.differences)


@pytest.mark.parametrize("keep", [False, True], ids=["zero_grad", "kept gradients"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_as_ddp(ranks, pattern, use, options, keep, world):
    skip_unless_ddp_takes(OPTIONS[options])
    _expect_no_difference(on_ranks(ranks, world, _compare, pattern, use, options, keep, 0))


@pytest.mark.parametrize("options", ["plain", "view"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_after_local_backwards(ranks, pattern, options, world):
    """Gradients of no_sync count, and are averaged, although the parameter is frozen now."""
    use = "frozen adapters are left out"
    _expect_no_difference(on_ranks(ranks, world, _compare, pattern, use, options, False, 2))


def _compare_skipping(pattern: str) -> list[str]:
    """DDP's own skip_all_reduce_unused_params needs the same use on all ranks."""
    traces = [
        record_training(
            Adapters,
            lambda module, wrap=wrap, skip=skip: wrap(module, **FIND_UNUSED, **skip),
            _step(pattern, "frozen adapters are left out"),
            num_steps=6,
        )
        for wrap, skip in (
            (DistributedDataParallel, {}),
            (ReducerDDP, {"skip_all_reduce_unused_params": True}),
        )
    ]
    assert_in_step()
    return list(compare_traces(*traces).differences)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_unused_buckets_are_skipped(ranks, pattern, world):
    _expect_no_difference(on_ranks(ranks, world, _compare_skipping, pattern))


def _hook(_, bucket):  # DDP refuses annotations that are texts
    buffer = bucket.buffer().div_(dist.get_world_size())
    work = dist.all_reduce(buffer, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0].clone())


def _compare_with_hook(pattern: str, view: bool) -> list[str]:
    def wrap(module: nn.Module, kind: Any) -> nn.Module:
        model = kind(module, gradient_as_bucket_view=view, **FIND_UNUSED)
        model.register_comm_hook(None, _hook)
        return model

    traces = [
        record_training(
            Adapters,
            lambda module, kind=kind: wrap(module, kind),
            _step(pattern, "frozen adapters are left out"),
            num_steps=4,
        )
        for kind in (DistributedDataParallel, ReducerDDP)
    ]
    return list(compare_traces(*traces).differences)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("pattern", ["by rank", "in turn", "everywhere"])
def test_communication_hook(ranks, pattern, view):
    _expect_no_difference(on_ranks(ranks, 2, _compare_with_hook, pattern, view))


def _train_in_join(kind: Any, view: bool) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    model = kind(Adapters(), gradient_as_bucket_view=view, **FIND_UNUSED)
    rank = dist.get_rank()
    _freeze(model, "b" if rank else "")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(rank)
    with Join([model]):
        for _ in range(3 if rank else 5):
            optimizer.zero_grad()
            model(torch.randn(4, 6, generator=generator)).square().mean().backward()
            optimizer.step()
    return [tensor for p in model.parameters() for tensor in (p.grad, p.detach())]


def _compare_in_join(view: bool) -> None:
    expected, actual = (
        _train_in_join(kind, view) for kind in (DistributedDataParallel, ReducerDDP)
    )
    for left, right in zip(expected, actual, strict=True):
        assert left is right is None or torch.equal(left, right)


@pytest.mark.parametrize("view", [False, True])
def test_join(ranks, view):
    on_ranks(ranks, 2, _compare_in_join, view)


def _weights_stay_equal(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = ReducerDDP(Adapters(), find_unused_parameters=True, **options)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for number in range(4):
        torch.manual_seed(number * 10 + dist.get_rank())
        optimizer.zero_grad()
        _step("by rank", "frozen adapters are left out")(model, number)
        optimizer.step()
    for param in model.parameters():
        both = [torch.empty_like(param) for _ in range(dist.get_world_size())]
        dist.all_gather(both, param.detach())
        assert all(torch.equal(both[0], other) for other in both)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduce_dtype": torch.float64},
        {
            "mixed_precision": torch.nn.parallel.distributed._MixedPrecision(
                torch.bfloat16, torch.float32
            )
        },
    ],
    ids=["float32", "reduce_dtype", "mixed_precision"],
)
def test_weights_stay_equal(ranks, options, world):
    on_ranks(ranks, world, _weights_stay_equal, options)


def _load(model: ReducerDDP) -> ReducerDDP:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: ReducerDDP = torch.load(file, weights_only=False)
    return loaded


def _compare_copies(view: bool) -> None:
    """A copy averages the parameters of the original, although each rank froze another adapter."""
    options = {**FIND_UNUSED, "gradient_as_bucket_view": view}
    model = ReducerDDP(Adapters(), **options)
    _freeze(model, "ab"[dist.get_rank()])
    trained = [param.requires_grad for param in model.parameters()]
    for twin in (copy.deepcopy(model), _load(model)):
        assert [param.requires_grad for param in twin.parameters()] == trained
        for number in range(4):
            frozen = "ab"[dist.get_rank()] if number < 3 else ""
            for each in (model, twin):
                torch.manual_seed(10 * number + dist.get_rank())
                each.zero_grad()
                _freeze(each, frozen)
                each(torch.randn(4, 6)).square().mean().backward()
            for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
                assert torch.equal(ours.grad, theirs.grad)
    assert_in_step()


@pytest.mark.parametrize("view", [False, True])
def test_copies(ranks, view):
    on_ranks(ranks, 2, _compare_copies, view)


def _copy_changed_layers() -> None:
    """A copy has no layer that was replaced, and may have a frozen layer of integers."""
    model = ReducerDDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 100_000)))
    file = io.BytesIO()
    model.module[2] = nn.Identity()
    torch.save(model, file)
    assert file.tell() < 100_000
    model.module[0].weight.requires_grad_(False)
    model.module[0].weight.data = model.module[0].weight.data.to(torch.int8)
    twin = copy.deepcopy(model)
    twin.module[1](torch.ones(2, 4)).sum().backward()
    assert twin.module[1].weight.grad is not None


def test_copies_of_changed_layers(ranks):
    on_ranks(ranks, 2, _copy_changed_layers)


def _not_finite() -> str:
    model = ReducerDDP(Adapters(), **FIND_UNUSED)
    model.set_check_finite()
    _freeze(model, "b" if dist.get_rank() else "")
    x = torch.ones(2, 6)
    return error_of(lambda: (model(x) * (1 if dist.get_rank() else torch.inf)).sum().backward())


def test_a_gradient_that_is_not_finite(ranks):
    for text in on_ranks(ranks, 2, _not_finite):
        assert "gradients contain NaN or infinity" in text
