"""Tensor parallelism with data parallelism on 2 x 2 ranks, compared with DDP (bit for bit) and with
one rank."""

from __future__ import annotations

import copy
import functools
import tempfile
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from modes import MODES_OF_DDPX as MODES
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import ddpx
from ddpx import ReducerDDP
from ddpx.params.dtensors import local_part

WIDTH = 8
SMALL_CAP = 0.0005
modes = pytest.mark.parametrize("mode", MODES)
sequence = pytest.mark.parametrize("sequence", [False, True], ids=["plain norm", "sequence"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@functools.cache
def _mesh() -> DeviceMesh:
    """One mesh for all tests: the threads of its gloo groups wake a hundred times a second."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def _sharded(mesh: DeviceMesh, sequence: bool) -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    for block in net.blocks:
        if sequence:
            split = PrepareModuleInput(
                input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=False
            )
            parallelize_module(block, mesh["tp"], {"norm": split})
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if sequence:
            plan = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(),
            }
        parallelize_module(block, mesh["tp"], plan)
    return net


def _wholly_sharded(mesh: DeviceMesh) -> nn.Module:
    """A module whose parameters are all DTensors, as torch's clip_grad_norm_ requires."""
    net = _sharded(mesh, sequence=True)
    plan = {"head": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(net, mesh["tp"], plan)
    return net


def _data(step: int, mesh: DeviceMesh) -> torch.Tensor:
    """The same data on ranks that share a batch."""
    torch.manual_seed(100 * step + mesh["dp"].get_local_rank())
    return torch.randn(4, 6, WIDTH)


def _local_grads(params: list[nn.Parameter]) -> Iterator[torch.Tensor | None]:
    for param in params:
        yield None if param.grad is None else local_part(param.grad)


def _check_parity(mode: str, sequence: bool) -> None:
    mesh = _mesh()
    options = {**MODES[mode], "device_mesh": mesh["dp"], "bucket_cap_mb": SMALL_CAP}
    theirs = DistributedDataParallel(_sharded(mesh, sequence), **options)
    ours = ReducerDDP(_sharded(mesh, sequence), **options)
    their_params = list(theirs.parameters())  # DDP loses parameters that were DTensors at forward
    our_params = list(ours.parameters())
    names = [name for name, _ in ours.named_parameters()]
    for step in range(4):
        for model, params in ((theirs, their_params), (ours, our_params)):
            for param in params:
                param.grad = None
            model(_data(step, mesh)).square().mean().backward()
        grads = zip(names, _local_grads(our_params), _local_grads(their_params), strict=True)
        for name, our_grad, their_grad in grads:
            assert our_grad is not None and torch.equal(our_grad, their_grad), (step, name)
        with torch.no_grad():
            for our_param, their_param in zip(our_params, their_params, strict=True):
                local_part(our_param).sub_(0.1 * local_part(our_param.grad))
                their_param.sub_(0.1 * their_param.grad)


@modes
@sequence
def test_parity(ranks, mode, sequence):
    ranks(4).run(_check_parity, mode, sequence)


def _check_training(mode: str) -> None:
    """Optimizer, clipping and accumulation, compared with the whole model on each rank."""
    mesh = _mesh()
    model = ReducerDDP(
        _wholly_sharded(mesh), device_mesh=mesh["dp"], bucket_cap_mb=SMALL_CAP, **MODES[mode]
    )
    torch.manual_seed(0)
    plain = Net()
    ours = torch.optim.AdamW(model.parameters(), lr=0.1)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(3):
        ours.zero_grad()
        theirs.zero_grad()
        for micro in range(3):
            x = _data(10 * step + micro, mesh)
            plain(x).square().mean().backward()
            if micro < 2:
                with model.no_sync():
                    model(x).square().mean().backward()
            else:
                model(x).square().mean().backward()
        for param in plain.parameters():
            dist.all_reduce(param.grad, group=mesh["dp"].get_group())
            param.grad /= 2
        for (name, param), expected in zip(
            model.named_parameters(), plain.parameters(), strict=True
        ):
            assert isinstance(param, DTensor) and isinstance(param.grad, DTensor), name
            assert param.grad.placements == param.placements
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad, msg=name)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        expected_norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.testing.assert_close(norm.full_tensor(), expected_norm)
        ours.step()
        theirs.step()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), expected, rtol=1e-4, atol=1e-5)


@modes
def test_training(ranks, mode):
    ranks(4).run(_check_training, mode)


def _check_checkpoint(folder: str) -> None:
    """A checkpoint from 2 x 2 ranks is loaded on 2 x 2 ranks, and without tensor parallelism."""
    mesh = _mesh()
    model = ReducerDDP(_wholly_sharded(mesh), device_mesh=mesh["dp"])
    for step in range(2):
        model(_data(step, mesh)).square().mean().backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad
    whole = {n: p.full_tensor() for n, p in model.module.named_parameters()}
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)

    again = ReducerDDP(_wholly_sharded(mesh), device_mesh=mesh["dp"])
    state = {"model": get_model_state_dict(again)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(again, state["model"])
    plain = ReducerDDP(Net())
    state = {"model": get_model_state_dict(plain)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(plain, state["model"])
    for name, expected in whole.items():
        assert torch.equal(again.module.get_parameter(name).full_tensor(), expected), name
        assert torch.equal(plain.module.get_parameter(name), expected), name

    again.load_state_dict(model.state_dict())
    again(_data(2, mesh)).square().mean().backward()


def test_checkpoint(ranks):
    with tempfile.TemporaryDirectory(prefix="ddpx-checkpoint-") as folder:
        ranks(4).run(_check_checkpoint, folder)


class WithBuffer(nn.Module):
    def __init__(self, mesh: DeviceMesh, value: float) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        whole = torch.full((4, WIDTH), value)
        self.register_buffer("table", distribute_tensor(whole, mesh["tp"], [Shard(0)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def _check_buffers() -> None:
    """Local shards are broadcast from the first of the data-parallel ranks."""
    mesh = _mesh()
    data_parallel_rank = mesh["dp"].get_local_rank()
    model = ReducerDDP(WithBuffer(mesh, float(data_parallel_rank)), device_mesh=mesh["dp"])
    assert model.module.table.full_tensor().eq(0).all()
    model.module.table.add_(data_parallel_rank + 1)
    model(torch.ones(2, WIDTH)).sum().backward()
    assert model.module.table.full_tensor().eq(1).all()


def test_buffers(ranks):
    ranks(4).run(_check_buffers)


def _check_frozen() -> None:
    """A gradient of an earlier step does not count, even if it is a view of a bucket."""
    mesh = _mesh()
    model = ReducerDDP(_wholly_sharded(mesh), device_mesh=mesh["dp"], gradient_as_bucket_view=True)
    plain = copy.deepcopy(_wholly_sharded(mesh))
    x = _data(0, mesh)
    model(x).square().mean().backward()
    model.zero_grad()
    model.module.head.weight.requires_grad_(False)
    for _ in range(2):  # the second backward adds to views of buckets
        model(x).square().mean().backward()
        plain(x).square().mean().backward()
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        if name.endswith("head.weight"):
            assert param.grad is None
            continue
        total = expected.grad.full_tensor()
        dist.all_reduce(total, group=mesh["dp"].get_group())
        torch.testing.assert_close(param.grad.full_tensor(), total / 2, msg=name)


def test_a_frozen_parameter(ranks):
    ranks(4).run(_check_frozen)


def _check_other_calls() -> None:
    mesh = _mesh()
    model = ReducerDDP(_wholly_sharded(mesh), device_mesh=mesh["dp"])
    plain = _wholly_sharded(mesh)
    x = _data(0, mesh)
    params = list(model.parameters())
    grads = model.synchronized_grads(model(x).square().mean(), params)
    seen: list[torch.Tensor] = []
    model.register_post_sync_hook(model, lambda param: seen.append(param.grad.full_tensor()))
    model.set_check_finite()
    model(x).square().mean().backward()
    plain(x).square().mean().backward()
    for param, grad, after, expected in zip(params, grads, seen, plain.parameters(), strict=True):
        total = expected.grad.full_tensor()
        dist.all_reduce(total, group=mesh["dp"].get_group())
        torch.testing.assert_close(param.grad.full_tensor(), total / 2)
        torch.testing.assert_close(after, total / 2)
        torch.testing.assert_close(grad.full_tensor(), total / 2)


def test_other_calls(ranks):
    ranks(4).run(_check_other_calls)


def _check_plan() -> None:
    mesh = _mesh()
    ours = ReducerDDP(_wholly_sharded(mesh), device_mesh=mesh["dp"], bucket_cap_mb=SMALL_CAP)
    for step in range(2):
        ours(_data(step, mesh)).square().mean().backward()
    plan = ddpx.bucket_plan(ours)
    assert sum(plan.num_bytes) == sum(local_part(param).nbytes for param in ours.parameters())
    caps = {"bucket_cap_mb_list": plan.cap_mb_list}
    theirs = DistributedDataParallel(_wholly_sharded(mesh), device_mesh=mesh["dp"], **caps)
    again = ReducerDDP(_wholly_sharded(mesh), device_mesh=mesh["dp"], **caps)
    for model in (theirs, again):
        for step in range(4):
            model(_data(step, mesh)).square().mean().backward()
        sizes = model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        assert [int(size) for size in sizes.split(", ")] == list(plan.num_bytes)


def test_a_plan_has_the_sizes_of_local_shards(ranks):
    """With its list of caps, DDP makes the same buckets."""
    ranks(4).run(_check_plan)


def _check_memory() -> None:
    """zero_grad() frees gradients."""
    mesh = _mesh()
    model = ReducerDDP(_wholly_sharded(mesh), device_mesh=mesh["dp"])
    for _ in range(2):
        model(_data(0, mesh)).square().mean().backward()
        grads = [weakref.ref(local_part(param.grad)) for param in model.parameters()]
        model.zero_grad()
        assert not any(grad() is not None for grad in grads)


def test_gradients_are_freed(ranks):
    ranks(4).run(_check_memory)


def _refusal(wrap: Any) -> str:
    try:
        wrap()
    except (RuntimeError, ValueError) as error:
        return str(error)
    raise AssertionError("nothing was refused")


def _check_refusals() -> None:
    mesh = _mesh()
    text = _refusal(lambda: ReducerDDP(_sharded(mesh, sequence=False)))
    assert "blocks.0.up.weight" in text and "device_mesh=mesh['dp']" in text
    assert "head.weight" not in text
    frozen = _sharded(mesh, sequence=False)
    for name, param in frozen.named_parameters():
        param.requires_grad_("head" in name)
    before = local_part(frozen.blocks[0].up.weight).clone()
    assert "blocks.0.up.weight" in _refusal(lambda: ReducerDDP(frozen))
    assert torch.equal(local_part(frozen.blocks[0].up.weight), before), "nothing was broadcast"
    assert "table" in _refusal(lambda: ReducerDDP(WithBuffer(mesh, 1.0)))
    model = ReducerDDP(_sharded(mesh, sequence=False), device_mesh=mesh["dp"])
    text = _refusal(lambda: model._update_process_group(dist.group.WORLD))
    assert "blocks.0.up.weight" in text and model.process_group is mesh["dp"].get_group()


def _check_placements() -> None:
    mesh = _mesh()
    split = Shard(mesh["dp"].get_local_rank())
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh["tp"], [split]))
    text = _refusal(lambda: ReducerDDP(layer, device_mesh=mesh["dp"]))
    assert "parameter 'weight'" in text and "Shard(dim=1)" in text, text


def test_other_placements_on_another_rank_are_refused(ranks):
    ranks(4).run(_check_placements)


def _check_optimizers_in_backward() -> None:
    mesh = _mesh()
    model = ReducerDDP(_sharded(mesh, sequence=False), device_mesh=mesh["dp"])
    text = _refusal(lambda: model._register_fused_optim(torch.optim.SGD, lr=0.1))
    assert "_register_fused_optim()" in text and "blocks.0.up.weight" in text
    net = _sharded(mesh, sequence=False)
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    model = ReducerDDP(net, device_mesh=mesh["dp"])
    text = _refusal(lambda: model(_data(0, mesh)))
    assert "_apply_optimizer_in_backward()" in text and "blocks.0.up.weight" in text


def test_optimizers_in_backward_are_refused(ranks):
    ranks(4).run(_check_optimizers_in_backward)


def test_a_group_with_several_shards_is_refused(ranks):
    ranks(4).run(_check_refusals)


def _check_fully_shard(forward_first: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = _mesh()
    net = Net()
    fully_shard(net.blocks[1], mesh=mesh["tp"], reshard_after_forward=not forward_first)
    if forward_first:
        net(_data(0, mesh))
        assert not isinstance(net.blocks[1].up.weight, DTensor), "unsharded until backward"
    text = _refusal(lambda: ReducerDDP(net, device_mesh=mesh["dp"]))
    assert "blocks.1.up.weight" in text and "fully_shard(module, mesh=...)" in text
    assert "has the data-parallel dimension" in text, text
    assert "blocks.0" not in text and "head" not in text
    net.blocks[1].requires_grad_(False)
    assert "blocks.1.up.weight" in _refusal(lambda: ReducerDDP(net, device_mesh=mesh["dp"]))
    ignored = {f"blocks.1.{name}" for name, _ in net.blocks[1].named_parameters()}
    net._ddp_params_and_buffers_to_ignore = ignored
    model = ReducerDDP(net, device_mesh=mesh["dp"])
    model(_data(0, mesh)).square().mean().backward()
    assert model.reducer.num_steps == 1


@pytest.mark.parametrize("forward_first", [False, True])
def test_parts_under_fully_shard_are_refused(ranks, forward_first):
    ranks(4).run(_check_fully_shard, forward_first)
