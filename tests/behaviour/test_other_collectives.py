"""Other collective calls in the same backward, on the same group, match as under DDP.

With ``find_unused_parameters``, the use of parameters may differ by rank. Each bucket must then be
launched at the same position among the collective calls of a backward on every rank, whatever
parameters this rank uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddpx import ReducerDDP
from ddpx.testing import RankPool

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.0002},
}
NUM_STEPS = 5


@pytest.fixture(scope="module", params=["gloo", "shm"])
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(2, request.param) as two_ranks:
        yield two_ranks


class Decoder(nn.Module):
    """Uses ``optional`` in the selected steps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.optional = nn.Linear(8, 8)
        self.last = nn.Linear(8, width)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        return self.last(x + self.optional(x) if use else x)


class SumInBackward(torch.autograd.Function):
    """Sums its gradient over ranks in backward, as SyncBatchNorm sums statistics."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        total = grads[0].clone()
        dist.all_reduce(total)
        return total


class WithCollective(nn.Module):
    """Has a collective call in backward, between its optional layers and its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.decoder = Decoder(8)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        return self.decoder(SumInBackward.apply(self.first(x)), use)


class Checkpointed(nn.Module):
    """An encoder whose first layer runs in a checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self.first, x, use_reentrant=self.reentrant))


class CheckpointedDecoder(Decoder):
    """A decoder with a checkpoint over no parameter, over its first layer, or over its last
    layer.

    The optional layer is never in the checkpoint.
    """

    def __init__(self, width: int, over: str, reentrant: bool) -> None:
        super().__init__(width)
        self.first = nn.Linear(8, 8)
        self.over = over
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        x = self._run("first layer", self.first, x)
        x = self._run("no parameter", torch.tanh, x)
        x = x + self.optional(x) if use else x * 1
        return self._run("last layer", self.last, x)

    def _run(self, part: str, function: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        if self.over == part:
            return checkpoint(function, x, use_reentrant=self.reentrant)
        return function(x)


# Whether this rank uses the optional layer in a step.
USES: dict[str, Callable[[int], bool]] = {
    "rank 0 alone": lambda step: dist.get_rank() == 0,
    "rank 1 alone": lambda step: dist.get_rank() == 1,
    "in turn": lambda step: (step + dist.get_rank()) % 2 == 0,
    "all but in the fourth step": lambda step: step != 3 or dist.get_rank() == 0,
}


def _two_wrappers(wrap: Callable[..., Any], uses: Callable[[int], bool], width: int, mode: str):
    encoder = wrap(Decoder(8), **MODES[mode])
    decoder = wrap(Decoder(width), find_unused_parameters=True, **MODES[mode])

    def step(number: int) -> torch.Tensor:
        return decoder(encoder(torch.randn(4, 8), True), uses(number))

    return nn.ModuleList([encoder, decoder]), step


def _collective_within(wrap: Callable[..., Any], uses: Callable[[int], bool], mode: str):
    model = wrap(WithCollective(), find_unused_parameters=True, **MODES[mode])
    return model, lambda number: model(torch.randn(4, 8), uses(number))


def _checkpoint_upstream(wrap: Callable[..., Any], uses: Callable[[int], bool], mode: str):
    encoder = wrap(Checkpointed(reentrant=True), **MODES[mode])
    decoder = wrap(Decoder(3), find_unused_parameters=True, **MODES[mode])

    def step(number: int) -> torch.Tensor:
        return decoder(encoder(torch.randn(4, 8, requires_grad=True)), uses(number))

    return nn.ModuleList([encoder, decoder]), step


def _checkpoint_inside(wrap: Callable[..., Any], uses: Callable[[int], bool], over: str, mode: str):
    """DDP refuses reentrant checkpoints over parameters, so its model has non-reentrant ones."""
    reentrant = wrap is ReducerDDP
    encoder = wrap(Decoder(8), **MODES[mode])
    module = CheckpointedDecoder(3, over, reentrant)
    decoder = wrap(module, find_unused_parameters=True, **MODES[mode])

    def step(number: int) -> torch.Tensor:
        return decoder(encoder(torch.randn(4, 8), True), uses(number))

    return nn.ModuleList([encoder, decoder]), step


def _grads(make: Callable[..., Any], wrap: Callable[..., Any], uses: str, *args: Any) -> list:
    torch.manual_seed(0)
    model, step = make(wrap, USES[uses], *args)
    kept = []
    for number in range(NUM_STEPS):
        torch.manual_seed(100 * number + dist.get_rank())
        model.zero_grad()
        output = step(number)
        output.backward(2 * output.detach())  # the root of the backward is the output's own node
        kept.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    return kept


def _compare(
    make: Callable[..., Any],
    uses: str,
    *args: Any,
    wrap: Callable[..., Any] = ReducerDDP,
    factor: float = 1.0,
) -> None:
    """``factor``: the average of ``wrap`` in relation to the mean."""
    expected = _grads(make, DistributedDataParallel, uses, *args)
    found = _grads(make, wrap, uses, *args)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for left, right in zip(ours, theirs, strict=True):
            assert (left is None) == (right is None), f"step {number}"
            assert left is None or torch.equal(left, right * factor), f"step {number}"


@pytest.mark.parametrize("uses", USES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("width", [8, 3])
def test_two_wrappers_in_one_backward(pool, width, mode, uses):
    pool.run(_compare, _two_wrappers, uses, width, mode, timeout=30.0)


@pytest.mark.parametrize("uses", USES)
@pytest.mark.parametrize("mode", MODES)
def test_a_collective_within_the_module(pool, mode, uses):
    pool.run(_compare, _collective_within, uses, mode, timeout=30.0)


@pytest.mark.parametrize("uses", USES)
@pytest.mark.parametrize("mode", MODES)
def test_a_reentrant_checkpoint_in_another_wrapper(pool, mode, uses):
    pool.run(_compare, _checkpoint_upstream, uses, mode, timeout=30.0)


@pytest.mark.parametrize("uses", USES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("over", ["no parameter", "first layer", "last layer"])
def test_a_reentrant_checkpoint_in_the_wrapper(pool, over, mode, uses):
    pool.run(_compare, _checkpoint_inside, uses, over, mode, timeout=30.0)


# ---- features that make further calls, or launch buckets in another way --------------------------


def _sums(module: nn.Module, **options: Any) -> ReducerDDP:
    return ReducerDDP(module, average="sum", **options)


def _weights(module: nn.Module, **options: Any) -> ReducerDDP:
    """The weights of a step add up to 4."""
    model = ReducerDDP(module, average="weights", **options)
    model.register_forward_pre_hook(lambda *_: model.set_weight(1 + 2 * dist.get_rank()))
    return model


def _checked(module: nn.Module, **options: Any) -> ReducerDDP:
    model = ReducerDDP(module, **options)
    model.set_check_finite(True)
    return model


def _hooked(module: nn.Module, **options: Any) -> ReducerDDP:
    model = ReducerDDP(module, **options)
    model.register_comm_hook(None, allreduce_hook)
    return model


def _lazy(module: nn.Module, **options: Any) -> ReducerDDP:
    return ReducerDDP(module, lazy_bucket_allocation=True, **options)


# The wrapper, and its average in relation to the mean of two ranks.
FEATURES: dict[str, tuple[Callable[..., Any], float]] = {
    "sum": (_sums, 2.0),
    "weights": (_weights, 0.5),
    "check for NaN": (_checked, 1.0),
    "communication hook": (_hooked, 1.0),
    "lazy buckets": (_lazy, 1.0),
}
MODELS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "two wrappers": (_two_wrappers, (3,)),
    "a collective within": (_collective_within, ()),
}


@pytest.mark.parametrize("uses", USES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("model", MODELS)
def test_a_feature(pool, model, feature, mode, uses):
    make, args = MODELS[model]
    wrap, factor = FEATURES[feature]
    pool.run(_compare, make, uses, *args, mode, wrap=wrap, factor=factor, timeout=30.0)
