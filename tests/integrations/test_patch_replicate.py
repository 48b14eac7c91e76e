"""``patch_ddp(replicate=True)``: code that calls torch's function replicate() trains with ddpx."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate as by_package
from torch.distributed._composable.replicate import replicate as by_name
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard

import ddpx
from ddpx.ddp.fronts.lookup import hooks_of
from ddpx.integrations import torch_replicate

OURS = torch_replicate.replicate


def _replicate() -> Any:
    """The function as this module's name has it now."""
    return by_name


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.second(torch.tanh(self.norm(self.first(x)))) * scale


# ---- as torch's function -----------------------------------------------------------------------


def _plain(replicate: Any) -> nn.Module:
    return replicate(Net())


def _options(replicate: Any) -> nn.Module:
    options = {"bucket_cap_mb": 1, "gradient_as_bucket_view": True}
    return replicate(Net(), device_id=torch.device("cpu"), **options)


def _mesh(replicate: Any) -> nn.Module:
    return replicate(Net(), device_mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def _ignored(replicate: Any) -> nn.Module:
    module = Net()
    return replicate(module, ignored_modules=[module.first])


def _parts(replicate: Any) -> nn.Module:
    module = Net()
    for part in (module.first, module.norm, module.second):
        replicate(part)
    return module


def _beside_fsdp(replicate: Any) -> nn.Module:
    module = Net()
    fully_shard(module.first)
    return replicate(module)


def _with_a_hook(replicate: Any) -> nn.Module:
    module = replicate(Net())
    module.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return module


MAKE: dict[str, Callable[[Any], nn.Module]] = {
    make.__name__.strip("_"): make
    for make in (_plain, _options, _mesh, _ignored, _parts, _beside_fsdp, _with_a_hook)
}


def _train(make: Callable[[Any], nn.Module], replicate: Any) -> list[torch.Tensor]:
    torch.manual_seed(dist.get_rank())  # torch's function broadcasts parameters, but no buffers
    module = make(replicate)
    torch.manual_seed(10 + dist.get_rank())
    found = []
    for step in range(4):
        module.zero_grad()
        if make in (_plain, _options):
            module.set_requires_gradient_sync(step % 2 == 1)
        module(torch.randn(6, 4), scale=2.0).square().mean().backward()
        tensors = [*module.parameters(), *(p.grad for p in module.parameters()), *module.buffers()]
        found += [getattr(t, "_local_tensor", t).detach().clone() for t in tensors if t is not None]
    return found


def _same_bits(name: str) -> None:
    assert by_name is not OURS
    theirs = _train(MAKE[name], by_name)
    with ddpx.patch_ddp(replicate=True):
        assert by_name is by_package is OURS
        assert torch.distributed._composable.replicate is by_name
        ours = _train(MAKE[name], by_name)
    assert by_name is by_package is not OURS
    assert len(theirs) == len(ours)
    assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))


@pytest.mark.parametrize("name", MAKE)
def test_same_bits_as_torchs_function(ranks, name):
    ranks(2).run(_same_bits, name)


# ---- the module ----------------------------------------------------------------------------------


def _module() -> None:
    with ddpx.patch_ddp(replicate=True):
        module = _replicate()(Net())
    assert isinstance(module, Net)
    assert list(module.state_dict()) == list(Net().state_dict())
    assert hooks_of(module) is None  # the front is made in the first forward
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(twin) is Net
        assert not twin._forward_pre_hooks
    module(torch.ones(2, 4)).sum().backward()
    front = hooks_of(module)
    assert front is torch_replicate.replicate.state(module)._ddp_weakref()
    assert len(module._forward_pre_hooks) == 1
    for protocol in (2, 4):
        twin = pickle.loads(pickle.dumps(module, protocol))
        assert type(twin) is Net
        assert not twin._forward_pre_hooks and not twin._forward_hooks
    with ddpx.no_sync(module):
        module(torch.ones(2, 4)).sum().backward()
    torch_replicate.replicate.state(module)._no_sync = True
    assert not front.require_backward_grad_sync
    assert len(nn.Sequential(*[module])[:1]) == 1


def test_module(ranks):
    ranks(2).run(_module)


def _refused() -> None:
    with ddpx.patch_ddp(replicate=True):
        replicate = _replicate()
        with pytest.raises(RuntimeError, match=r"Expected device_id to be int or torch\.device"):
            replicate(Net(), device_id=[0])
        with pytest.raises(TypeError, match="no_such_option"):
            replicate(Net(), no_such_option=1)
        with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, but got list"):
            replicate([Net()])
        with pytest.raises(NotImplementedError, match=r"mp_policy=.*mixed_precision"):
            replicate(Net(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        with pytest.raises(NotImplementedError, match="dp_mesh_dims"):
            replicate(Net(), dp_mesh_dims=("a",))
        with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
            replicate(fully_shard(nn.Linear(4, 4)))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        module = Net()
        ignored = {*module.first.parameters()}
        defaults = {"mp_policy": MixedPrecisionPolicy(), "offload_policy": OffloadPolicy()}
        replicate(module, mesh=mesh, ignored_params=ignored, **defaults)
        with pytest.raises(RuntimeError, match="was called twice with the same DDPNet"):
            replicate(module)
        module(torch.ones(2, 4)).sum().backward()
        front = hooks_of(module)
        assert front is not None
        assert {"first.weight", "first.bias"} <= front.parameters_to_ignore


def test_refused(ranks):
    ranks(2).run(_refused)


def _undo() -> None:
    outer = ddpx.patch_ddp()
    assert by_name is not OURS
    with ddpx.patch_ddp(replicate=True):
        assert by_name is OURS
    assert by_name is not OURS
    assert nn.parallel.DistributedDataParallel is ddpx.ReducerDDP
    outer.undo()
    assert nn.parallel.DistributedDataParallel is not ddpx.ReducerDDP
    name = "torch.distributed.pipelining.stage"
    assert name not in sys.modules or sys.modules[name].replicate is not torch_replicate.replicate


def test_undo(ranks):
    ranks(2).run(_undo)


def _check_deletion() -> None:
    with ddpx.patch_ddp(replicate=True):
        modules = [_replicate()(Net()) for _ in range(2)]
    modules[1](torch.ones(2, 4)).sum().backward()
    gone = [weakref.ref(module) for module in modules]
    modules.clear()
    gc.collect()
    assert [module() for module in gone] == [None, None]


def test_a_module_that_is_deleted(ranks):
    """Before its first forward, and after a step."""
    ranks(2).run(_check_deletion)


def _check_group_of_a_front() -> bool:
    """Nothing but the front holds the group after the first forward."""
    group = dist.new_group()
    with ddpx.patch_ddp(replicate=True):
        module = _replicate()(Net(), process_group=group)
    module(torch.ones(2, 4)).sum().backward()
    dist.destroy_process_group(group)
    ddpx.unreplicate(module)
    gone = weakref.ref(group)
    del group
    gc.collect()
    return gone() is None


def test_a_group_that_ends_before_the_module(ranks):
    assert ranks(2).run(_check_group_of_a_front) == [True, True]
