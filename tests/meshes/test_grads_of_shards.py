"""Gradients of shards that the script replaces, and what a wrapper leaves on their parameters."""

from __future__ import annotations

import gc

import torch
from test_tensor_parallel import WIDTH, _mesh
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from ddpx import ReducerDDP
from ddpx.params.dtensors import Shard


def _split_layer() -> nn.Module:
    torch.manual_seed(0)
    return parallelize_module(nn.Linear(WIDTH, 2 * WIDTH), _mesh()["tp"], ColwiseParallel())


def _grads(model: nn.Module) -> list[torch.Tensor]:
    return [param.grad.full_tensor() for param in model.parameters()]


def _check_other_placement() -> None:
    """The gradient of the script is replicated, where the parameter is split."""
    module = _split_layer()
    model = ReducerDDP(module, device_mesh=_mesh()["dp"])
    x = torch.ones(3, WIDTH)
    model(x).sum().backward()
    averaged = _grads(module)
    for param in module.parameters():
        ones = torch.ones(param.shape)
        param.grad = distribute_tensor(ones, _mesh()["tp"], [Replicate()])
    model(x).sum().backward()
    for before, after in zip(averaged, _grads(module), strict=True):
        torch.testing.assert_close(after, before + 1)


def test_a_gradient_with_another_placement_is_kept(ranks):
    ranks(4).run(_check_other_placement)


def _check_ignored() -> None:
    """Ranks of the process group hold different shards of the first layer."""
    module = nn.Sequential(_split_layer(), nn.Linear(4, 2))
    ReducerDDP._set_params_and_buffers_to_ignore_for_model(module, ["0.weight", "0.bias"])
    model = ReducerDDP(module)
    model.module[1](torch.ones(3, 4)).sum().backward()
    assert model.reducer.num_steps == 1


def test_ignored_shards_may_differ(ranks):
    ranks(4).run(_check_ignored)


def _check_hooks() -> None:
    module = _split_layer()
    for _ in range(2):
        model = ReducerDDP(module, device_mesh=_mesh()["dp"])
        model(torch.ones(3, WIDTH)).sum().backward()
        del model
        gc.collect()
    assert not any(param._backward_hooks for param in module.parameters())


def test_a_wrapper_leaves_no_hooks(ranks):
    ranks(4).run(_check_hooks)


def _check_removed() -> None:
    """The reducer has removed the gradient of the shard."""
    param = _split_layer().weight
    param.grad = param.detach().clone()
    shard = Shard(param)
    shard.pull()
    shard.tensor.grad = None
    shard.push()
    assert param.grad is None


def test_a_removed_gradient(ranks):
    ranks(4).run(_check_removed)
