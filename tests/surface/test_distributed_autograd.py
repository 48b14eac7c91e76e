"""torch's distributed autograd: gradients lie in a context, and are averaged there as with DDP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from slow_ddp import MODES, SMALL_CAP, modes, on_ranks
from torch import nn
from torch.distributed import rpc
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP

NUM_STEPS = 4


@contextmanager
def _rpc(folder: Path) -> Iterator[None]:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder / 'rpc'}")
    rank, world = dist.get_rank(), dist.get_world_size()
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world, rpc_backend_options=options)
    yield
    rpc.shutdown()


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))


def _inputs(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, 5, generator=generator)


def _train(wrap: Any, mode: str) -> list[list[torch.Tensor]]:
    """The gradients of each step. Each ``param.grad`` must stay None."""
    module = _net()
    model = wrap(module, bucket_cap_mb=SMALL_CAP, **MODES[mode])
    steps = []
    for step in range(NUM_STEPS):
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [model(_inputs(step)).square().mean()])
            grads = dist_autograd.get_gradients(context)
            steps.append([grads[param].clone() for param in module.parameters()])
        assert all(param.grad is None for param in module.parameters())
    return steps


def _compare(mode: str, folder: Path) -> None:
    with _rpc(folder):
        theirs, ours = (_train(wrap, mode) for wrap in (DistributedDataParallel, ReducerDDP))
    for step, (expected, found) in enumerate(zip(theirs, ours, strict=True)):
        assert all(map(torch.equal, expected, found)), step


@modes
def test_gradients_are_those_of_ddp(ranks, mode, world, tmp_path):
    on_ranks(ranks, world, _compare, mode, tmp_path)


def _mixed(folder: Path) -> None:
    """Local, distributed and plain backwards of one wrapper."""
    with _rpc(folder):
        module = nn.Linear(3, 2)
        model = ReducerDDP(module)
        with dist_autograd.context() as context, model.no_sync():
            inputs = torch.full((1, 3), float(dist.get_rank()))
            dist_autograd.backward(context, [model(inputs).sum()])
            local = dist_autograd.get_gradients(context)[module.weight].clone()
        assert torch.equal(local, inputs.expand(2, 3))
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [model(inputs).sum()])
            averaged = dist_autograd.get_gradients(context)[module.weight].clone()
        assert module.weight.grad is None
        model(inputs).sum().backward()
        assert torch.equal(averaged, module.weight.grad)
        assert torch.equal(averaged, torch.full((2, 3), (dist.get_world_size() - 1) / 2))
        before = module.weight.grad
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [model(inputs).sum()])
            assert torch.equal(dist_autograd.get_gradients(context)[module.weight], averaged)
        assert module.weight.grad is before and torch.equal(before, averaged)


def test_local_and_plain_backwards(ranks, world, tmp_path):
    on_ranks(ranks, world, _mixed, tmp_path)


def _unused(folder: Path) -> None:
    """A layer that no rank uses gets no gradient. DDP fails here."""
    with _rpc(folder):
        module = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
        module.forward = lambda x: module[0](x)  # type: ignore[method-assign]
        model = ReducerDDP(module, find_unused_parameters=True)
        inputs = torch.full((1, 3), float(dist.get_rank()))
        for _ in range(3):
            with dist_autograd.context() as context:
                dist_autograd.backward(context, [model(inputs).sum()])
                grads = dist_autograd.get_gradients(context)
                mean = torch.full((2, 3), (dist.get_world_size() - 1) / 2)
                assert torch.equal(grads[module[0].weight], mean)
                assert len(grads) == 2
            assert all(param.grad is None for param in module.parameters())


def test_layer_that_no_rank_uses(ranks, world, tmp_path):
    on_ranks(ranks, world, _unused, tmp_path)


def _failing(folder: Path) -> None:
    """A backward that fails gives ``param.grad`` back, and the next step is right."""
    with _rpc(folder):
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        model = ReducerDDP(module)
        inputs = torch.ones(1, 3)

        def fail(_: torch.Tensor) -> None:
            raise ValueError("on purpose")

        with dist_autograd.context() as context:
            handle = module[0].weight.register_hook(fail)
            with pytest.raises(RuntimeError, match="Error on Node"):
                dist_autograd.backward(context, [model(inputs).sum()])
            handle.remove()
        assert all(param.grad is None for param in module.parameters())
        model(inputs).sum().backward()
        assert all(param.grad is not None for param in module.parameters())


def test_failed_backward(ranks, world, tmp_path):
    on_ranks(ranks, world, _failing, tmp_path)
