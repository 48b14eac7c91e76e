"""The bucket that a communication hook gets, and what the hook may do with it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from both_wrappers import SMALL_CAP, WRAPPERS, Mlp, Wrapper, assert_trains_alike, mlp_step
from modes import MODES
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
)

from ddpx import ReducerDDP

Future = torch.futures.Future[torch.Tensor]


def _done(tensor: torch.Tensor) -> Future:
    future: Future = torch.futures.Future()
    future.set_result(tensor)
    return future


def _describe(bucket: dist.GradBucket, names: dict[int, str]) -> dict[str, Any]:
    return {
        "type": type(bucket).__name__,
        "index": bucket.index(),
        "last": bucket.is_last(),
        "params": [names[id(param)] for param in bucket.parameters()],
        "shapes": [tuple(grad.shape) for grad in bucket.gradients()],
        "strides": [grad.stride() for grad in bucket.gradients()],
        "values": [grad.clone() for grad in bucket.gradients()],
        "buffer": bucket.buffer().clone(),
        "in the buffer": all(
            grad.untyped_storage().data_ptr() == bucket.buffer().untyped_storage().data_ptr()
            for grad in bucket.gradients()
        ),
    }


def _buckets_seen(cls: Callable[..., Wrapper], options: dict[str, Any]) -> list[list[dict]]:
    """Per step, a description of each bucket that the hook got."""
    torch.manual_seed(0)
    module = Mlp()
    names = {id(param): name for name, param in module.named_parameters()}
    model = cls(module, **options)
    seen: list[dict] = []

    def hook(state, bucket):  # no annotations: DDP refuses annotations as text, which this file has
        state.append(_describe(bucket, names))
        return _done(bucket.buffer())

    model.register_comm_hook(seen, hook)
    steps = []
    for number in range(4):
        model.zero_grad()
        torch.manual_seed(10 * number + dist.get_rank())
        mlp_step(model)
        steps.append(seen[:])
        seen.clear()
    return steps


def _check_contents(options: dict[str, Any]) -> None:
    theirs, ours = (_buckets_seen(cls, options) for cls in WRAPPERS)
    assert [len(step) for step in ours] == [len(step) for step in theirs]
    assert len(ours[-1]) > 1
    for our_step, their_step in zip(ours, theirs, strict=True):
        # In plan order, whatever the order in which buckets became full.
        assert [bucket["index"] for bucket in our_step] == list(range(len(our_step)))
        for mine, other in zip(our_step, their_step, strict=True):
            assert mine["in the buffer"]
            assert mine.keys() == other.keys()
            for key in mine:
                assert _same(mine[key], other[key]), key


def _same(mine: Any, other: Any) -> bool:
    if isinstance(mine, torch.Tensor):
        return torch.equal(mine, other)
    if isinstance(mine, list):
        return len(mine) == len(other) and all(map(_same, mine, other))
    return mine == other


@pytest.mark.parametrize("mode", MODES)
def test_bucket_has_the_same_contents(ranks, mode):
    ranks(2).run(_check_contents, MODES[mode] | SMALL_CAP)


# What a hook may do with a bucket. `count` distinguishes buckets and calls.


def _in_place(count: int, bucket: dist.GradBucket) -> Future:
    for grad in bucket.gradients():
        grad.mul_(count)
    return _done(bucket.buffer())


def _another_tensor(count: int, bucket: dist.GradBucket) -> Future:
    return _done(bucket.buffer() * count)


def _set_buffer(count: int, bucket: dist.GradBucket) -> Future:
    bucket.set_buffer(bucket.buffer() + count)
    return _done(bucket.buffer())


def _another_dtype(count: int, bucket: dist.GradBucket) -> Future:
    return _done((bucket.buffer() * count).double())


def _chained(count: int, bucket: dist.GradBucket) -> Future:
    return _done(bucket.buffer()).then(lambda done: done.value() * count).then(lambda f: f.value())


TRANSFORMS = (
    _in_place,
    _another_tensor,
    _set_buffer,
    _another_dtype,
    _chained,
)


def _check_transform(transform: Callable[..., Any], mode: str) -> None:
    def wrap(cls: Callable[..., Wrapper], module: nn.Module) -> Wrapper:
        model = cls(module, **MODES[mode], **SMALL_CAP)
        calls = [0]

        def hook(state, bucket):
            state[0] += 1
            return transform(state[0] % 7 + 1, bucket)

        model.register_comm_hook(calls, hook)
        return model

    assert_trains_alike(Mlp, wrap, mlp_step)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda t: t.__name__.strip("_"))
def test_hook_decides_what_gradients_become(ranks, transform, mode):
    ranks(2).run(_check_transform, transform, mode)


class _CallableHook:
    """A hook that is an object with a reference to its wrapper."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.world_sizes: list[Any] = []

    def __call__(self, state, bucket):
        self.world_sizes.append(self.model._get_ddp_logging_data()["world_size"])
        return self.model.reducer._run_allreduce_hook(bucket).then(lambda done: done.value()[0])


def _check_callable_object() -> None:
    """The hook may query the wrapper, and run the reducer's own all-reduce, which is a sum."""
    model = ReducerDDP(nn.Linear(2, 2, bias=False))
    hook = _CallableHook(model)
    model.register_comm_hook(None, hook)
    model(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
    assert hook.world_sizes == [2]
    assert (model.module.weight.grad == 3.0).all()


def test_callable_object_may_use_the_wrapper(ranks):
    ranks(2).run(_check_callable_object)


class _Mixed(nn.Module):
    """Real and complex layers."""

    def __init__(self) -> None:
        super().__init__()
        self.real = nn.Linear(16, 8)
        self.imaginary = nn.Linear(8, 4, dtype=torch.complex64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.imaginary(self.real(x).to(torch.complex64)).abs()


def _check_complex(hook: Any, mode: str) -> None:
    torch.manual_seed(0)
    module = _Mixed()
    twin = copy.deepcopy(module)
    model = ReducerDDP(module, **MODES[mode])
    if isinstance(hook, str):
        model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, hook))
    else:
        model.register_comm_hook(None, hook)
    for number in range(3):
        for either in (model, twin):
            torch.manual_seed(10 * number + dist.get_rank())
            either.zero_grad()
            mlp_step(either)
        for ours, plain in zip(module.parameters(), twin.parameters(), strict=True):
            dist.all_reduce(plain.grad)
            expected = plain.grad / dist.get_world_size()
            torch.testing.assert_close(ours.grad, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hook", [allreduce_hook, fp16_compress_hook, "ALLREDUCE", "FP16_COMPRESS"])
def test_hook_on_complex_params(ranks, hook, mode):
    """Half precision keeps imaginary parts."""
    ranks(2).run(_check_complex, hook, mode)


def _check_complex_views() -> None:
    """DDP gives floats at wrong positions. ddpx gives the gradients, as complex numbers or as
    reals."""
    model = ReducerDDP(nn.Linear(3, 2, dtype=torch.complex64))
    seen: list[torch.Tensor] = []

    def hook(state, bucket):
        seen.extend(grad.clone() for grad in bucket.gradients())
        return _done(bucket.buffer())

    model.register_comm_hook(None, hook)
    model(torch.randn(1, 3, dtype=torch.complex64)).abs().sum().backward()
    for param, grad in zip(model.module.parameters(), seen, strict=True):
        expected = param.grad if grad.is_complex() else torch.view_as_real(param.grad)
        assert torch.equal(grad, expected)


def test_hook_sees_complex_gradients(ranks):
    ranks(2).run(_check_complex_views)
