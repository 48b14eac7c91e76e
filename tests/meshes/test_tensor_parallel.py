"""Tensor parallelism with data parallelism on 2 x 2 ranks, compared with DDP (bit for bit) and with
one rank."""

from __future__ import annotations

import copy
import functools
import tempfile
import weakref
from collections.abc import Iterator
from functools import partial
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
from torch.utils.checkpoint import checkpoint

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


DTYPES: dict[str, dict[str, torch.dtype]] = {
    "reduce": {"reduce_dtype": torch.float32},
    "grad": {"grad_dtype": torch.float32},
    "both": {"reduce_dtype": torch.float32, "grad_dtype": torch.float32},
}
FULL_ONLY = pytest.mark.full_only
# Half a unit in the last place of bfloat16, plus a small float32 rounding error.
ONE_ROUNDING = 2.0**-8 * (1 + 2.0**-6)
FLOAT32 = 2.0**-21
NUM_PARTS = 6


class Repeated(nn.Module):
    """A module in which each parameter's gradient arrives in NUM_PARTS parts per backward."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.bfloat16)
        self.down = nn.Linear(2 * WIDTH, WIDTH, dtype=torch.bfloat16)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(self, mesh["tp"], plan)

    def _block(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(NUM_PARTS):
            x = checkpoint(self._block, x, use_reentrant=True)
        return x


def _sums_of_parts(plain: nn.Module, xs: torch.Tensor, mesh: DeviceMesh) -> list[torch.Tensor]:
    """The mean of the local shards over data-parallel ranks, over all parts, in float64."""
    params = list(plain.parameters())
    sums = [torch.zeros_like(local_part(param), dtype=torch.float64) for param in params]

    def add(total: torch.Tensor, param: DTensor, grad: DTensor) -> None:
        total += local_part(grad.redistribute(placements=param.placements))

    handles = [
        param.register_hook(partial(add, total, param))
        for total, param in zip(sums, params, strict=True)
    ]
    for x in xs:
        plain(x.requires_grad_()).float().square().sum().backward()
    for handle in handles:
        handle.remove()
    for total in sums:
        dist.all_reduce(total, group=mesh["dp"].get_group())
        total /= 2
    return sums


def _assert_one_rounding(
    model: ReducerDDP, expected: list[torch.Tensor], dtypes: str, step: int
) -> None:
    for (name, param), total in zip(model.module.named_parameters(), expected, strict=True):
        rounds = dtypes == "reduce"
        assert param.grad.dtype is (torch.bfloat16 if rounds else torch.float32), name
        error = (local_part(param.grad).double() - total).abs()
        allowed = (ONE_ROUNDING if rounds else 0) * total.abs() + FLOAT32 * total.abs().max()
        assert (error <= allowed).all(), (step, name, (error / total.abs().max()).max())


def _check_dtypes(mode: str, dtypes: str, num_micro_steps: int) -> None:
    mesh = _mesh()
    torch.manual_seed(0)
    module = Repeated(mesh)
    plain = copy.deepcopy(module)
    model = ReducerDDP(
        module, device_mesh=mesh["dp"], bucket_cap_mb=SMALL_CAP, **MODES[mode], **DTYPES[dtypes]
    )
    for step in range(3):
        torch.manual_seed(100 * step + mesh["dp"].get_local_rank())
        xs = torch.randn(num_micro_steps, 5, WIDTH, dtype=torch.bfloat16)
        expected = _sums_of_parts(plain, xs.clone(), mesh)
        model.zero_grad()
        for number, x in enumerate(xs):
            model.require_backward_grad_sync = number == num_micro_steps - 1
            model(x.requires_grad_()).float().square().sum().backward()
        _assert_one_rounding(model, expected, dtypes, step)


@modes
@pytest.mark.parametrize(
    "dtypes",
    [*(pytest.param(name, marks=FULL_ONLY) for name in ("reduce", "grad")), "both"],
)
@pytest.mark.parametrize("num_micro_steps", [pytest.param(1, marks=FULL_ONLY), 3])
def test_sums_of_several_parts_are_made_in_float32(ranks, mode, dtypes, num_micro_steps):
    ranks(4).run(_check_dtypes, mode, dtypes, num_micro_steps)


def _check_late_count(mode: str, dtypes: str) -> None:
    """Parts of an output inside no_sync arrive first. They count once backward reaches the other
    output.

    Backward goes through the later forward first.
    """
    mesh = _mesh()
    torch.manual_seed(0)
    module = Repeated(mesh)
    plain = copy.deepcopy(module)
    model = ReducerDDP(
        module, device_mesh=mesh["dp"], bucket_cap_mb=SMALL_CAP, **MODES[mode], **DTYPES[dtypes]
    )
    for step in range(3):
        torch.manual_seed(100 * step + mesh["dp"].get_local_rank())
        xs = torch.randn(2, 5, WIDTH, dtype=torch.bfloat16)
        expected = _sums_of_parts(plain, xs.clone(), mesh)
        model.zero_grad()
        outside, inside = (x.clone().requires_grad_() for x in xs)
        loss = model(outside).float().square().sum()
        with model.no_sync():
            loss = loss + model(inside).float().square().sum()
        loss.backward()
        assert model.reducer.num_steps == step + 1
        _assert_one_rounding(model, expected, dtypes, step)


@modes
@pytest.mark.parametrize(
    "dtypes", [*(pytest.param(name, marks=FULL_ONLY) for name in ("reduce", "grad")), "both"]
)
def test_several_parts_that_are_counted_late(ranks, mode, dtypes):
    ranks(4).run(_check_late_count, mode, dtypes)
