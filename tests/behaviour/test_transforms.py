"""The wrapper within transforms of torch.func, and with forward-mode derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from reference import average_grads, copy_from_rank_0
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.parallel.distributed import _MixedPrecision

from ddpx import ReducerDDP

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "find unused": {"find_unused_parameters": True},
    "buffers stay": {"forward_sync_buffers": False},
    "several buckets": {"bucket_cap_mb": 0.0001},
    # A dtype with more precision, so that results stay close to those of the bare module.
    "mixed precision": {"mixed_precision": _MixedPrecision(torch.float64, torch.float64)},
}
BATCH = 3


class _Net(nn.Module):
    """Each parameter has an influence on each derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.last = nn.Linear(8, 2, bias=False)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)) ** 2) * self.scale


def _forward_mode(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        return forward_ad.unpack_dual(model(dual)).tangent


def _of_parameters(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The derivative with respect to parameters that functional_call puts in."""
    params = dict(model.named_parameters())
    jacobian = jacrev(lambda given: functional_call(model, given, (x,)).sum(0))(params)
    return torch.cat([each.flatten() for each in jacobian.values()])


def _ensemble(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    params = {name: torch.stack([p, p]) for name, p in model.named_parameters()}
    buffers = {name: torch.stack([b, b]) for name, b in model.named_buffers()}
    return vmap(lambda p, b: functional_call(model, (p, b), (x,)))(params, buffers)


DERIVATIVES: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "vmap": lambda model, x: vmap(model)(x),
    "vmap of jacrev": lambda model, x: vmap(jacrev(model))(x),
    "vmap of jacfwd": lambda model, x: vmap(jacfwd(model))(x),
    "hessian": lambda model, x: hessian(lambda y: model(y).sum())(x),
    "vjp": lambda model, x: vjp(model, x)[1](torch.ones(BATCH, 2))[0],
    "jvp": lambda model, x: jvp(model, (x,), (torch.ones_like(x),))[1],
    "grad": lambda model, x: grad(lambda y: model(y).square().sum())(x),
    "forward mode": _forward_mode,
    "ensemble": _ensemble,
    "of parameters": _of_parameters,
}


def _step(model: nn.Module, name: str, x: torch.Tensor) -> None:
    model.zero_grad()
    DERIVATIVES[name](model, x).square().sum().backward()


def _check(name: str, mode: str) -> None:
    module = _Net()
    plain = copy_from_rank_0(module)
    model = ReducerDDP(module, **MODES[mode])
    for number in range(4):  # the second step rebuilds buckets
        torch.manual_seed(10 * number + dist.get_rank())
        x = torch.randn(BATCH, 4)
        if mode != "buffers stay":
            plain.scale.fill_(1.0 + number)
            model.module.scale.fill_(1.0 + number + dist.get_rank())
        _step(model, name, x)
        _step(plain, name, x)
        average_grads(plain)
        for expected, actual in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-5, atol=1e-5)
        if name != "ensemble" and mode != "buffers stay":
            assert torch.equal(model.module.scale, plain.scale)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", DERIVATIVES)
def test_gradients_are_averaged(ranks, name, mode):
    ranks(2).run(_check, name, mode, timeout=30)


def _check_construction() -> None:
    """One rank makes its wrapper within a transform."""
    models, module = [], _Net()

    def construct(x: torch.Tensor) -> torch.Tensor:
        models.append(ReducerDDP(module))
        return x.sum()

    x = torch.ones(2, 4)
    if dist.get_rank():
        grad(construct)(x)
    else:
        construct(x)
    (model,) = models
    for _ in range(3):
        _step(model, "vmap", torch.ones(BATCH, 4) * dist.get_rank())
    weights = [torch.empty_like(model.module.last.weight) for _ in range(2)]
    dist.all_gather(weights, model.module.last.weight.detach())
    assert torch.equal(*weights)


def test_construction_within_a_transform(ranks):
    ranks(2).run(_check_construction, timeout=30)


def _check_join(name: str) -> None:
    """Rank 1 has two more batches. Its last steps are without rank 0."""
    module = _Net()
    plain = copy_from_rank_0(module)
    model = ReducerDDP(module)
    with model.join():
        for number in range(3 + 2 * dist.get_rank()):
            x = torch.full((BATCH, 4), float(number))
            _step(model, name, x)
            _step(plain, name, x)
            share = 1.0 if number < 3 else 0.5
            for expected, actual in zip(plain.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(actual.grad, expected.grad * share)


@pytest.mark.parametrize("name", ["vmap", "vmap of jacrev", "jvp", "grad", "hessian"])
def test_uneven_inputs(ranks, name):
    ranks(2).run(_check_join, name, timeout=30)


def _check_no_sync(name: str) -> None:
    """The forward alone is in no_sync(): its backward is local, as without a transform."""
    module = _Net()
    plain = copy_from_rank_0(module)
    model = ReducerDDP(module)
    x = torch.full((BATCH, 4), 1.0 + dist.get_rank())
    for _ in range(3):
        model.zero_grad()
        plain.zero_grad()
        with model.no_sync():
            y = DERIVATIVES[name](model, x)
        y.square().sum().backward()
        DERIVATIVES[name](plain, x).square().sum().backward()
        for expected, actual in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(actual.grad, expected.grad)


# A reverse-mode derivative need not reach the output of its forward: see docs/divergences.md.
@pytest.mark.parametrize("name", ["vmap", "vmap of jacfwd", "jvp", "ensemble", "forward mode"])
def test_forward_in_no_sync(ranks, name):
    ranks(2).run(_check_no_sync, name, timeout=30)
