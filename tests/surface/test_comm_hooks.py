"""Every communication hook of torch gives the same bits as under DDP."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from both_wrappers import (
    SMALL_CAP,
    WORLD_SIZES,
    WRAPPERS,
    Mlp,
    Wrapper,
    assert_trains_alike,
    mlp_step,
)
from modes import MODES
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    quantization_hooks,
    register_ddp_comm_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from ddpx import ReducerDDP

# All-reduce before this step, compression from this step on. By then buckets have been rebuilt.
_FIRST_COMPRESSED_STEP = 2


def _power_sgd(**options: Any) -> PowerSGDState:
    options = {"matrix_approximation_rank": 1, "min_compression_rate": 1.5, **options}
    return PowerSGDState(None, start_powerSGD_iter=_FIRST_COMPRESSED_STEP, **options)


# Each creates a new (state, hook), since states count steps.
HOOKS: dict[str, Callable[[], tuple[Any, Callable[..., Any]]]] = {
    "allreduce": lambda: (None, allreduce_hook),
    "allreduce, with a group": lambda: (dist.group.WORLD, allreduce_hook),
    "fp16": lambda: (None, fp16_compress_hook),
    "fp16 around allreduce": lambda: (None, fp16_compress_wrapper(allreduce_hook)),
    "noop": lambda: (None, noop_hook),
}
# These hooks start a second collective on a thread of gloo when the first is done. Its order among
# other communication (another bucket, the used-map) may then differ between ranks, under DDP as
# well. They are therefore tested with one bucket, in modes without a used-map during compression.
CHAINED_HOOKS: dict[str, Callable[[], tuple[Any, Callable[..., Any]]]] = {
    "PowerSGD": lambda: (_power_sgd(), power_sgd.powerSGD_hook),
    "PowerSGD of rank 2": lambda: (
        _power_sgd(matrix_approximation_rank=2),
        power_sgd.powerSGD_hook,
    ),
    "PowerSGD, cold": lambda: (
        _power_sgd(warm_start=False, use_error_feedback=False),
        power_sgd.powerSGD_hook,
    ),
    "PowerSGD, batched tensors": lambda: (
        _power_sgd(batch_tensors_with_same_shape=True),
        power_sgd.powerSGD_hook,
    ),
    "fp16 around PowerSGD": lambda: (_power_sgd(), fp16_compress_wrapper(power_sgd.powerSGD_hook)),
    "batched PowerSGD": lambda: (_power_sgd(), power_sgd.batched_powerSGD_hook),
    "batched PowerSGD, cold": lambda: (
        _power_sgd(warm_start=False, use_error_feedback=False),
        power_sgd.batched_powerSGD_hook,
    ),
}

ALL_HOOKS = HOOKS | CHAINED_HOOKS


def _orthogonalize(matrices: torch.Tensor, epsilon: float = 0) -> None:
    """torch's function, also for the single matrix of the batched hook, which that of torch 2.13
    refuses."""
    _torchs_orthogonalize(matrices.unsqueeze(0) if matrices.dim() == 2 else matrices, epsilon)


_torchs_orthogonalize = power_sgd._orthogonalize


def _check_hook(name: str, mode: str, caps: dict[str, float]) -> None:
    def wrap(cls: Callable[..., Wrapper], module: nn.Module) -> Wrapper:
        model = cls(module, **MODES[mode], **caps)
        model.register_comm_hook(*ALL_HOOKS[name]())
        return model

    with mock.patch.object(power_sgd, "_orthogonalize", _orthogonalize):
        assert_trains_alike(Mlp, wrap, mlp_step, num_steps=6)


class _StackedGather:
    """The future of NCCL's all_gather has one stacked tensor, as the hooks expect. gloo's has
    not."""

    def __init__(self, tensors: list[torch.Tensor], tensor: torch.Tensor, **options: Any) -> None:
        self.tensors = tensors
        dist.all_gather(tensors, tensor)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([torch.stack(self.tensors)])
        return future


def _check_quantization(hook: Callable[..., Any], mode: str, caps: dict[str, float]) -> None:
    def wrap(cls: Callable[..., Wrapper], module: nn.Module) -> Wrapper:
        model = cls(module, **MODES[mode], **caps)
        model.register_comm_hook(dist.group.WORLD, hook)
        return model

    with mock.patch.object(quantization_hooks, "dist", mock.Mock(wraps=dist)) as patched:
        patched.all_gather = _StackedGather
        assert_trains_alike(Mlp, wrap, mlp_step)


def _check_bf16(wrapped: bool, mode: str) -> None:
    """DDP refuses these hooks without NCCL. gloo supports them, so here they work."""
    hook = bf16_compress_wrapper(allreduce_hook) if wrapped else bf16_compress_hook
    torch.manual_seed(0)
    module = Mlp()
    model = ReducerDDP(module, **MODES[mode], **SMALL_CAP)
    model.register_comm_hook(None, hook)
    x = torch.randn(6, 16) * (dist.get_rank() + 1)
    twin = copy.deepcopy(module)
    for _ in range(3):
        for either in (model, twin):
            either.zero_grad()
            either(x).square().mean().backward()
        for ours, plain in zip(module.parameters(), twin.parameters(), strict=True):
            assert ours.grad is not None and plain.grad is not None
            expected = plain.grad.to(torch.bfloat16).div_(dist.get_world_size())
            dist.all_reduce(expected)
            assert torch.equal(ours.grad, expected.float())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrapped", [False, True], ids=["hook", "wrapper"])
def test_bf16_hook_works_without_nccl(ranks, wrapped, mode):
    ranks(2).run(_check_bf16, wrapped, mode)


def _check_power_sgd_compresses() -> None:
    """The hook's state gets the same steps, buckets and tensors as under DDP, and warms up."""

    def train(cls: Callable[..., Wrapper]) -> PowerSGDState:
        torch.manual_seed(0)
        model = cls(Mlp())
        state = _power_sgd()
        model.register_comm_hook(state, power_sgd.powerSGD_hook)
        for _ in range(6):
            model.zero_grad()
            mlp_step(model)
        return state

    theirs, ours = (train(cls) for cls in WRAPPERS)
    assert ours.iter == theirs.iter
    assert ours.compression_stats() == theirs.compression_stats()
    assert ours.total_numel_after_compression < ours.total_numel_before_compression
    for kept in ("error_dict", "p_memory_dict", "q_memory_dict"):
        mine, other = getattr(ours, kept), getattr(theirs, kept)
        assert mine.keys() == other.keys() and mine
        assert all(torch.equal(mine[key], other[key]) for key in mine)


def test_power_sgd_compresses_as_under_ddp(ranks):
    ranks(2).run(_check_power_sgd_compresses)


def _check_hook_type(name: str) -> None:
    def wrap(cls: Callable[..., Wrapper], module: nn.Module) -> Wrapper:
        model = cls(module, **SMALL_CAP)
        register_ddp_comm_hook(DDPCommHookType[name], model, dist.group.WORLD)
        return model

    assert_trains_alike(Mlp, wrap, mlp_step)


# BF16_COMPRESS and the QUANTIZE hooks need features that gloo lacks. The hooks that they name are
# tested above.
@pytest.mark.parametrize(
    "name",
    [
        hook.name
        for hook in DDPCommHookType
        if hook.name != "BF16_COMPRESS" and not hook.name.startswith("QUANTIZE")
    ],
)
def test_register_by_type(ranks, name):
    ranks(2).run(_check_hook_type, name)


def _check_builtin(name: str, mode: str, caps: dict[str, float]) -> None:
    def wrap(cls: Callable[..., Wrapper], module: nn.Module) -> Wrapper:
        model = cls(module, **MODES[mode], **caps)
        model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, name))
        return model

    assert_trains_alike(Mlp, wrap, mlp_step)


_CAPS = {"one bucket": {}, "several buckets": SMALL_CAP}
_QUANTIZATION = {
    "quantization by tensor": quantization_hooks.quantization_pertensor_hook,
    "quantization by channel": quantization_hooks.quantization_perchannel_hook,
}
# All in one test, so that pytest starts the ranks of a world size once: name -> (function,
# arguments).
CASES: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
    f"{name}, {mode}, {num_buckets}": (check, (argument, mode, caps))
    for check, arguments in (
        (_check_hook, {name: name for name in HOOKS}),
        (_check_quantization, _QUANTIZATION),
        (_check_builtin, {f"built-in {name}": name for name in ("ALLREDUCE", "FP16_COMPRESS")}),
    )
    for name, argument in arguments.items()
    for mode in MODES
    for num_buckets, caps in _CAPS.items()
    if mode == "default" or caps
} | {
    f"{name}, {mode}": (_check_hook, (name, mode, {}))
    for name in CHAINED_HOOKS
    for mode in ("default", "view", "static")
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", WORLD_SIZES, scope="session")
def test_hook(ranks, world_size, case):
    check, arguments = CASES[case]
    ranks(world_size).run(check, *arguments)


def _check_builtin_compresses() -> None:
    """Half precision is really used: a gradient above its range becomes infinite."""
    for cls in WRAPPERS:
        model = cls(nn.Linear(2, 1, bias=False))
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        (model(torch.ones(1, 2)) * 1e6).sum().backward()
        assert model.module.weight.grad.isinf().all()


def test_builtin_fp16_hook_compresses(ranks):
    ranks(2).run(_check_builtin_compresses)


def _check_noop_stays_local() -> None:
    for cls in WRAPPERS:
        model = cls(nn.Linear(2, 1, bias=False))
        model.register_comm_hook(None, noop_hook)
        model(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
        assert (model.module.weight.grad == dist.get_rank() + 1.0).all()


def test_noop_hook_leaves_gradients_local(ranks):
    ranks(2).run(_check_noop_stays_local)


_NOT_CONTIGUOUS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "every second element": lambda values: torch.stack([values, -values], 1)[:, 0],
    "columns first": lambda values: values.view(2, -1).t().contiguous().t(),
    "one element for all": lambda values: torch.ones(1).expand(len(values)),
}


class _Weights(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(2, 3, dtype=dtype))
        self.vector = nn.Parameter(torch.ones(4, dtype=dtype))

    def forward(self) -> torch.Tensor:
        return self.matrix.abs().sum() + self.vector.abs().sum()


def _check_not_contiguous(name: str, as_view: bool, dtype: torch.dtype) -> None:
    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(_NOT_CONTIGUOUS[name](torch.arange(float(bucket.buffer().numel()))))
        return future

    model = ReducerDDP(_Weights(dtype), gradient_as_bucket_view=as_view)
    model.register_comm_hook(None, hook)
    for _ in range(2):
        model.zero_grad()
        model().backward()
        grads = [param.grad.flatten() for param in model.parameters()]
        numel = sum(torch.view_as_real(g).numel() if g.is_complex() else len(g) for g in grads)
        expected = _NOT_CONTIGUOUS[name](torch.arange(float(numel))).reshape(-1)
        if dtype.is_complex:
            expected = torch.view_as_complex(expected.contiguous().view(-1, 2))
        # In the order of params in the first step, later in the order of their gradients.
        orders = (torch.cat(grads), torch.cat(grads[::-1]))
        assert any(torch.equal(order, expected) for order in orders)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("name", _NOT_CONTIGUOUS)
def test_result_that_is_not_contiguous(ranks, name, as_view, dtype):
    ranks(2).run(_check_not_contiguous, name, as_view, dtype)


def _check_accumulation(name: str, mode: str) -> None:
    """The hook gets the gradients that were accumulated under no_sync."""

    def wrap(cls: Callable[..., Wrapper], module: nn.Module) -> Wrapper:
        model = cls(module, **MODES[mode])
        model.register_comm_hook(*ALL_HOOKS[name]())
        return model

    def step(model: Any, number: int) -> None:
        if number:  # DDP fails an assertion if a static graph begins without synchronization
            with model.no_sync():
                mlp_step(model)
        mlp_step(model)

    assert_trains_alike(Mlp, wrap, step, set_to_none=None if mode == "default" else True)


@pytest.mark.parametrize("mode", ["default", "view", "static"])
@pytest.mark.parametrize("name", ["allreduce", "fp16", "PowerSGD"])
def test_hook_with_accumulation(ranks, name, mode):
    ranks(2).run(_check_accumulation, name, mode)
