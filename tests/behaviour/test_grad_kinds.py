"""Every kind of gradient in every mode: the mean over ranks is right to the bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from grad_kinds import LAZY, TABLE, WORLD_SIZE, Given, wrong_grads
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import ddpx
from ddpx import ReducerDDP

VIEWS = {"gradient_as_bucket_view": True}
UNUSED = {"find_unused_parameters": True}
STATIC = {"static_graph": True}
LAZY_BUCKETS = {"lazy_bucket_allocation": True}
WEIGHTS = {"average": "weights"}


def _no_change(model: ReducerDDP) -> None:
    pass


def _python_hook(model: ReducerDDP) -> None:
    model.register_comm_hook(None, default_hooks.allreduce_hook)


def _fp16_hook(model: ReducerDDP) -> None:
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def _builtin_hook(model: ReducerDDP) -> None:
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)


def _lazy_hook(model: ReducerDDP) -> None:
    """Returns the mean as a lazy negation."""

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        dist.all_reduce(buffer)
        result: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        is_dense = not buffer.is_sparse
        result.set_result(
            torch._neg_view(buffer.div(-WORLD_SIZE)) if is_dense else buffer / WORLD_SIZE
        )
        return result

    model.register_comm_hook(None, hook)


def _check_finite(model: ReducerDDP) -> None:
    model.set_check_finite()


def _mixed(dtype: torch.dtype) -> dict[str, Any]:
    from torch.nn.parallel.distributed import _MixedPrecision

    return {"mixed_precision": _MixedPrecision(param_dtype=dtype)}


@dataclass(frozen=True)
class Mode:
    """How gradients are averaged.

    Attributes:
        options: Arguments of the wrapper.
        setup: Changes the wrapper after construction.
        num_backwards: Backwards a step. All but the last one are in ``no_sync()``.
        zeroed: Whether gradients are zeroed between steps, and not dropped.
        dtype: The dtype of real parameters.
        alternates: Whether rank 1 leaves out every second parameter in every second step.
        recorded: Whether steps are recorded.
        manual: Whether the script finalizes each averaged backward.
        sparse: Whether torch's hook of this mode can compute with sparse gradients on CPU.
    """

    options: dict[str, Any] = field(default_factory=dict)
    setup: Callable[[ReducerDDP], None] = _no_change
    num_backwards: int = 1
    zeroed: bool = False
    dtype: torch.dtype = torch.float32
    alternates: bool = False
    recorded: bool = False
    manual: bool = False
    sparse: bool = True


MODES = {
    "default": Mode(),
    "views": Mode(VIEWS),
    "unused": Mode(UNUSED, alternates=True),
    "unused, views": Mode({**UNUSED, **VIEWS}, alternates=True),
    "unused, kept": Mode(UNUSED, num_backwards=2, alternates=True),
    "unused, skipped buckets": Mode(
        {**UNUSED, "skip_all_reduce_unused_params": True}, alternates=True
    ),
    "static": Mode(STATIC),
    "static, views": Mode({**STATIC, **VIEWS}),
    "kept": Mode(num_backwards=2),
    "kept, views": Mode(VIEWS, num_backwards=2),
    "zeroed": Mode(zeroed=True),
    "zeroed, views": Mode(VIEWS, zeroed=True),
    "batched": Mode({"batched_grad_copy": True}),
    "batched, views, kept": Mode({"batched_grad_copy": True, **VIEWS}, num_backwards=2),
    "mixed precision": Mode(_mixed(torch.bfloat16)),
    "mixed precision, views": Mode({**_mixed(torch.bfloat16), **VIEWS}),
    "float32 sums": Mode({"reduce_dtype": torch.float32}, dtype=torch.bfloat16),
    "float32 sums, kept": Mode(
        {"reduce_dtype": torch.float32}, dtype=torch.bfloat16, num_backwards=2
    ),
    "float32 gradients": Mode({"grad_dtype": torch.float32}, dtype=torch.bfloat16),
    "python hook": Mode(setup=_python_hook),
    "python hook, views": Mode(VIEWS, setup=_python_hook),
    "fp16 hook": Mode(setup=_fp16_hook, sparse=False),
    "built-in hook": Mode(setup=_builtin_hook),
    "lazy hook": Mode(setup=_lazy_hook),
    "lazy hook, views": Mode(VIEWS, setup=_lazy_hook),
    "finite": Mode(setup=_check_finite),
    "recorded": Mode(recorded=True),
    "lazy buckets": Mode(LAZY_BUCKETS),
    "lazy buckets, views, kept": Mode({**LAZY_BUCKETS, **VIEWS}, num_backwards=2),
    "manual": Mode(manual=True),
    "weights": Mode(WEIGHTS),
    "weights, views": Mode({**WEIGHTS, **VIEWS}),
    "weights, unused": Mode({**WEIGHTS, **UNUSED}, alternates=True),
    "weights, mixed precision": Mode({**WEIGHTS, **_mixed(torch.bfloat16)}),
    "weights, float32 sums, kept": Mode(
        {**WEIGHTS, "reduce_dtype": torch.float32}, dtype=torch.bfloat16, num_backwards=2
    ),
}
TRANSPORTS = ("group", "shm")


def _check(mode_name: str, kinds_name: str, transport: str) -> None:
    mode = MODES[mode_name]
    grows = mode.num_backwards > 1 or mode.zeroed
    kinds = {name: kind for name, kind in TABLE[kinds_name].items() if kind.grows or not grows}
    module = Given(kinds, mode.dtype)
    model = ReducerDDP(module, bucket_cap_mb=0.0005, transport=transport, **mode.options)
    mode.setup(model)
    model.require_manual_backward_finalization = mode.manual
    found = []
    with ddpx.record(model) if mode.recorded else nullcontext():
        for step in range(4):
            model.zero_grad(set_to_none=not mode.zeroed)
            found += [f"step {step}, {text}" for text in _step(model, mode, step)]
    assert not found, "\n".join(found)


def _step(model: ReducerDDP, mode: Mode, step: int) -> list[str]:
    module = model.module
    names = list(module.named())
    module.left_out = set()
    if mode.alternates and dist.get_rank() == 1 and step % 2:
        module.left_out = set(names[step // 2 :: 2])
    module.clear()
    for index in range(mode.num_backwards):
        module.number = 10 * step + index
        if mode.options.get("average") == "weights":  # all weights sum to the number of ranks
            ddpx.set_weight(model, 1 / mode.num_backwards)
        with nullcontext() if index == mode.num_backwards - 1 else model.no_sync():
            model(torch.ones(1)).backward()
    if mode.manual:
        model.finalize_backward()
    return wrong_grads(module)


@pytest.mark.parametrize(
    "mode, kinds",
    [(name, kinds) for name in MODES for kinds in TABLE if MODES[name].sparse or kinds != "sparse"],
)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_mean_is_right(ranks, transport, mode, kinds):
    ranks(WORLD_SIZE).run(_check, mode, kinds, transport)


def _lazy_bits(tensor: torch.Tensor) -> tuple[bool, bool, bool]:
    return tensor.is_conj(), tensor.is_neg(), torch._is_zerotensor(tensor)


def _check_arrivals() -> None:
    module = Given(LAZY)
    module(torch.ones(1)).backward()
    for name, param in module.named().items():
        assert param.grad is not None
        expected = module.kinds[name].make(torch.zeros_like(param.detach()))
        assert _lazy_bits(param.grad) == _lazy_bits(expected), name


def test_lazy_gradients_reach_the_param_as_they_are(ranks):
    ranks(WORLD_SIZE).run(_check_arrivals)
