"""Loss scaling, autocast, and params of several dtypes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from both_wrappers import (
    SMALL_CAP,
    WRAPPERS,
    Mlp,
    Wrapper,
    assert_same_on_all_ranks,
    assert_trains_alike,
    mlp_step,
)
from modes import MODES
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP


def _plain(options: dict[str, Any]) -> Callable[..., Wrapper]:
    return lambda cls, module: cls(module, **options)


def _scaled_training(cls: Callable[..., Wrapper], options: dict[str, Any], bad_rank: int) -> list:
    """Scales and weights per step. The inputs of one rank overflow in step 2."""
    torch.manual_seed(0)
    model = cls(Mlp(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    log = []
    for number in range(5):
        optimizer.zero_grad()
        torch.manual_seed(10 * number + dist.get_rank())
        x = torch.randn(6, 16)
        if number == 2 and dist.get_rank() == bad_rank:
            x[0, 0] = float("inf")
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        log.append((scaler.get_scale(), [p.detach().clone() for p in model.parameters()]))
    return log


def _check_grad_scaler(mode: str) -> None:
    """An overflow on one rank makes every rank skip the step, so scales stay equal."""
    for bad_rank in (0, 1):
        theirs, ours = (
            _scaled_training(cls, MODES[mode] | SMALL_CAP, bad_rank) for cls in WRAPPERS
        )
        assert [scale for scale, _ in ours] == [scale for scale, _ in theirs]
        assert ours[2][0] == ours[1][0] / 2
        for (_, mine), (_, other) in zip(ours, theirs, strict=True):
            assert all(map(torch.equal, mine, other))
            assert_same_on_all_ranks(*mine)
        assert all(map(torch.equal, ours[1][1], ours[2][1]))  # the skipped step
        assert not any(map(torch.equal, ours[2][1], ours[3][1]))


@pytest.mark.parametrize("mode", MODES)
def test_grad_scaler_with_overflow_on_one_rank(ranks, mode):
    ranks(2).run(_check_grad_scaler, mode)


def _autocast_around_wrapper(model: nn.Module, number: int) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randn(6, 16)).float().square().mean()
    loss.backward()


class _CastsInside(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


def _check_autocast(inside: bool, mode: str) -> None:
    build, step = (_CastsInside, mlp_step) if inside else (Mlp, _autocast_around_wrapper)
    assert_trains_alike(build, _plain(MODES[mode] | SMALL_CAP), step)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_autocast(ranks, inside, mode):
    ranks(2).run(_check_autocast, inside, mode)


class _ManyDtypes(nn.Module):
    """One dtype per layer, in mixed order. A bucket has only one dtype."""

    dtypes = (
        torch.float32,
        torch.complex64,
        torch.float64,
        torch.bfloat16,
        torch.float32,
        torch.float16,
        torch.complex128,
        torch.float64,
    )

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, dtype=dtype) for dtype in self.dtypes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x
        for layer, dtype in zip(self.layers, self.dtypes, strict=True):
            y = layer(x.to(dtype))
            total = total + (y.abs() if y.is_complex() else y).float()
        return total


def _check_many_dtypes(mode: str, caps: dict[str, float]) -> None:
    assert_trains_alike(_ManyDtypes, _plain(MODES[mode] | caps), mlp_step)
    model = ReducerDDP(_ManyDtypes(), **MODES[mode])
    params = [param.tensor for param in model._ddpx.managed]
    for bucket in model.reducer.plan.buckets:
        assert len({params[index].dtype for index in bucket}) == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("caps", [{}, SMALL_CAP], ids=["default caps", "small caps"])
@pytest.mark.parametrize("world_size", [2, 3], scope="session")
def test_many_dtypes(ranks, world_size, caps, mode):
    ranks(world_size).run(_check_many_dtypes, mode, caps)


def _check_float16_does_not_overflow() -> None:
    """Gradients are scaled before the sum, which would overflow in half precision."""
    for cls in WRAPPERS:
        model = cls(nn.Linear(2, 1, bias=False, dtype=torch.float16))
        model(torch.full((1, 2), 6e4, dtype=torch.float16)).sum().backward()
        assert (model.module.weight.grad == 6e4).all()


def test_half_precision_does_not_overflow(ranks):
    ranks(2).run(_check_float16_does_not_overflow)


def _special_values(model: nn.Module, number: int) -> None:
    """NaN, both infinities, both zeros and the smallest numbers, each at a position of its own."""
    values = torch.tensor(
        [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, 1e38, -1e38]
    )
    x = values.roll(number * (dist.get_rank() + 1)).expand(2, 8)
    model(x).sum().backward()


def _check_special_values(mode: str) -> None:
    assert_trains_alike(lambda: nn.Linear(8, 2, bias=False), _plain(MODES[mode]), _special_values)


@pytest.mark.parametrize("mode", MODES)
def test_special_values(ranks, mode):
    ranks(2).run(_check_special_values, mode)


def _check_master_weights() -> None:
    """A common pattern: the user copies gradients of a low-precision model to fp32."""
    results = []
    for cls in (DistributedDataParallel, ReducerDDP):
        torch.manual_seed(0)
        model = cls(Mlp(torch.bfloat16), gradient_as_bucket_view=True, **SMALL_CAP)
        masters = [copy.deepcopy(param.detach()).float() for param in model.parameters()]
        optimizer = torch.optim.Adam(masters, lr=0.01)
        for number in range(4):
            torch.manual_seed(10 * number + dist.get_rank())
            model.zero_grad()
            model(torch.randn(6, 16, dtype=torch.bfloat16)).square().mean().backward()
            for master, param in zip(masters, model.parameters(), strict=True):
                master.grad = param.grad.float()
            optimizer.step()
            with torch.no_grad():
                for master, param in zip(masters, model.parameters(), strict=True):
                    param.copy_(master)
        results.append(masters)
    assert all(map(torch.equal, *results))


def test_master_weights(ranks):
    ranks(2).run(_check_master_weights)


class _ComplexBesideHalf(_ManyDtypes):
    dtypes = (torch.complex64, torch.bfloat16)


def _grads_beside_complex(**options: object) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = ReducerDDP(_ComplexBesideHalf(), **options)
    model(torch.ones(2, 16) + dist.get_rank()).sum().backward()
    grads = [param.grad for param in model.parameters()]
    loss = model(torch.ones(2, 16) + dist.get_rank()).sum()
    again = model.synchronized_grads(loss, list(model.parameters()))
    for grad, other in zip(grads[:2], again[:2], strict=True):
        torch.testing.assert_close(grad, other)
    return grads


def _check_complex_beside_wide_grads(options: dict[str, torch.dtype]) -> None:
    """The options are for real numbers. Complex gradients keep their dtype, and are averaged."""
    plain, wide = _grads_beside_complex(), _grads_beside_complex(**options)
    for expected, grad in zip(plain[:2], wide[:2], strict=True):
        assert grad.dtype is torch.complex64
        torch.testing.assert_close(grad, expected)
    dtype = options.get("grad_dtype", torch.bfloat16)
    assert [grad.dtype for grad in wide[2:]] == [dtype, dtype]


@pytest.mark.parametrize(
    "options",
    [{"grad_dtype": torch.float32}, {"reduce_dtype": torch.float32}],
    ids=["grad_dtype", "reduce_dtype"],
)
def test_complex_beside_wide_grads(ranks, options):
    ranks(2).run(_check_complex_beside_wide_grads, options)


class _MixedPrecision:
    param_dtype, reduce_dtype, buffer_dtype = torch.bfloat16, None, None


class _PartlyUsed(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.always, self.seldom = (nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2))

    def forward(self, use: bool) -> torch.Tensor:
        return (self.always * (self.seldom if use else 2.0)).sum()


def _check_synchronized_grads_of_unused_in_another_dtype(
    dtype: torch.dtype, grad_dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """The gradient of a rank has another dtype than the tensor. The other rank has no gradient."""
    for transport in ("auto", "group"):
        module = _PartlyUsed(dtype)
        model = ReducerDDP(module, find_unused_parameters=True, transport=transport, **options)
        for user in range(2):
            loss = model(dist.get_rank() == user)
            (grad,) = model.synchronized_grads(loss, [module.seldom], allow_unused=True)
            assert grad.dtype is grad_dtype
            assert torch.equal(grad, torch.full((3,), 0.5, dtype=grad_dtype))


@pytest.mark.parametrize(
    ("dtype", "grad_dtype", "options"),
    [
        (torch.bfloat16, torch.float32, {"grad_dtype": torch.float32}),
        (torch.float32, torch.bfloat16, {"mixed_precision": _MixedPrecision()}),
    ],
    ids=["grad_dtype", "mixed_precision"],
)
def test_synchronized_grads_of_unused_in_another_dtype(ranks, dtype, grad_dtype, options):
    ranks(2).run(_check_synchronized_grads_of_unused_in_another_dtype, dtype, grad_dtype, options)


def _check_synchronized_grads_in_8_bits() -> None:
    model = ReducerDDP(nn.Linear(2, 2))
    narrow = torch.ones(2).to(torch.float8_e5m2).requires_grad_()
    loss = model(torch.ones(1, 2)).sum() + narrow.float().sum()
    with pytest.raises(TypeError, match=r"cannot average a gradient of torch\.float8_e5m2"):
        model.synchronized_grads(loss, [narrow])


def test_synchronized_grads_in_8_bits(ranks):
    """No backend adds these: the gradient is not lost silently."""
    ranks(2).run(_check_synchronized_grads_in_8_bits)
