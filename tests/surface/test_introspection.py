"""What trainers read from a wrapper and set on it, besides training."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from both_wrappers import (
    SMALL_CAP,
    WRAPPERS,
    Mlp,
    Normed,
    Wrapper,
    assert_same_on_all_ranks,
    assert_trains_alike,
    mlp_step,
)
from modes import MODES
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ddpx import ReducerDDP


def _check_set_static_graph(view: bool) -> None:
    def wrap(cls: Callable[..., Wrapper], module: nn.Module) -> Wrapper:
        model = cls(module, gradient_as_bucket_view=view, **SMALL_CAP)
        model._set_static_graph()
        assert model.static_graph
        with pytest.warns(UserWarning, match="static"):  # the second call has no effect
            model._set_static_graph()
        return model

    assert_trains_alike(Mlp, wrap, mlp_step)
    model = ReducerDDP(Mlp())
    for _ in range(2):
        mlp_step(model)
    with pytest.raises(RuntimeError, match="before training loop starts"):
        model._set_static_graph()
    mlp_step(model)


def _check_warning_beside_find_unused(cls: Callable[..., Wrapper]) -> None:
    beside = pytest.warns(UserWarning, match="find_unused_parameters=")
    with beside:
        model = cls(Mlp(), find_unused_parameters=True, static_graph=True)
    mlp_step(model)
    with pytest.warns(UserWarning, match="static"):  # no error after the first step
        model._set_static_graph()
    model = cls(Mlp(), find_unused_parameters=True)
    with beside:
        model._set_static_graph()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cls(Mlp(), static_graph=True)


@pytest.mark.parametrize("cls", WRAPPERS)
def test_static_graph_beside_find_unused(ranks, cls):
    ranks(2).run(_check_warning_beside_find_unused, cls)


@pytest.mark.parametrize("view", [False, True])
def test_set_static_graph(ranks, view):
    ranks(2).run(_check_set_static_graph, view)


def _check_rebuild(mode: str) -> None:
    """A rebuild is due once, after the first step (static graph: the second), and never with
    unused params."""
    moments = []
    for cls in WRAPPERS:
        model = cls(Mlp(), **MODES[mode], **SMALL_CAP)
        rebuilt = []
        for _ in range(4):
            rebuilt.append((model.reducer._rebuild_buckets(), model._has_rebuilt_buckets))
            mlp_step(model)
        moments.append((rebuilt, model._has_rebuilt_buckets))
    assert [r for r, _ in moments[0][0]] == [r for r, _ in moments[1][0]]
    # DDP's flag covers rebuilds by forward only. Ours covers every rebuild.
    assert moments[1][1] == any(r for r, _ in moments[1][0])


@pytest.mark.parametrize("mode", MODES)
def test_rebuild_buckets(ranks, mode):
    ranks(2).run(_check_rebuild, mode)


def _check_has_rebuilt_buckets(mode: str) -> None:
    """torch's hooks for ZeroRedundancyOptimizer read the flag."""
    seen = []
    for cls in WRAPPERS:
        model = cls(Mlp(), **MODES[mode])
        flags = [model._has_rebuilt_buckets]
        for _ in range(4):
            model(torch.ones(1, 16)).sum().backward()
            flags.append(model._has_rebuilt_buckets)
        seen.append(flags)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("mode", MODES)
def test_has_rebuilt_buckets(ranks, mode):
    ranks(2).run(_check_has_rebuilt_buckets, mode)


def _check_update_group() -> None:
    """From all three ranks to the first two, and back. Sums are over the current ranks."""
    pair = dist.new_group([0, 1])
    rank = dist.get_rank()
    for cls in WRAPPERS:
        model = cls(nn.Linear(1, 1, bias=False))
        means = []
        for group in (dist.group.WORLD, pair, dist.group.WORLD):
            model._update_process_group(group)
            for _ in range(3):
                model.zero_grad()
                if group is dist.group.WORLD or rank < 2:
                    model(torch.full((1, 1), float(rank))).sum().backward()
            grad = model.module.weight.grad
            means.append(None if grad is None else grad.item())
        assert means == [1.0, 0.5 if rank < 2 else None, 1.0]


def test_update_process_group(ranks):
    ranks(3).run(_check_update_group)


def _check_device_mesh() -> None:
    mesh = init_device_mesh("cpu", (2,))

    def wrap(cls: Callable[..., Wrapper], module: nn.Module) -> Wrapper:
        model = cls(module, device_mesh=mesh)
        assert model.process_group is mesh.get_group(0)
        assert model.device_mesh is mesh
        return model

    assert_trains_alike(Mlp, wrap, mlp_step)
    square = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shards", "replicas"))
    assert_trains_alike(Mlp, lambda cls, m: cls(m, device_mesh=square["replicas"]), mlp_step)
    for cls in WRAPPERS:
        with pytest.raises(RuntimeError, match="both process_group and device_mesh"):
            cls(Mlp(), device_mesh=mesh, process_group=dist.group.WORLD)
        with pytest.raises(RuntimeError, match="Only 1D device mesh"):
            cls(Mlp(), device_mesh=square)


def test_device_mesh(ranks):
    ranks(2).run(_check_device_mesh)


def _check_module_hooks() -> None:
    """Module hooks on the wrapper get the same arguments as under DDP. Their results are used."""
    logs = []
    for cls in WRAPPERS:
        torch.manual_seed(0)
        model = cls(Mlp())
        log: list[Any] = []
        model.register_forward_pre_hook(lambda m, args, log=log: (args[0] * 2,))
        model.register_forward_hook(lambda m, args, output, log=log: log.append(output) or output)
        model.register_full_backward_hook(lambda m, gi, go, log=log: log.append((gi, go)))
        model.register_full_backward_pre_hook(lambda m, go, log=log: (go[0] * 3,))
        x = torch.ones(2, 16, requires_grad=True)
        for _ in range(2):
            model.zero_grad()
            model(x).square().mean().backward()
            log.append([param.grad.clone() for param in model.parameters()])
        logs.append([log, x.grad])
    flat = [_tensors(log) for log in logs]
    assert len(flat[0]) == len(flat[1]) > 12
    assert all(map(torch.equal, *flat))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value.detach()]
    return [tensor for item in value or () for tensor in _tensors(item)]


def test_forward_and_backward_hooks(ranks):
    ranks(2).run(_check_module_hooks)


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Mlp(), Mlp()

    def forward(self, x: torch.Tensor, use_left: bool) -> torch.Tensor:
        return self.left(x) if use_left else self.right(x)


def _branch_step(model: nn.Module, number: int) -> None:
    """All ranks agree here. Otherwise DDP loses step with skip_all_reduce_unused_params."""
    model(torch.randn(6, 16), number % 4 < 2).square().mean().backward()


ARGUMENTS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "skip_all_reduce_unused_params": (
        _Branches,
        _branch_step,
        {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    ),
    "batched_grad_copy": (Mlp, mlp_step, {"batched_grad_copy": True}),
    "batched_grad_copy, view": (
        Mlp,
        mlp_step,
        {"batched_grad_copy": True, "gradient_as_bucket_view": True},
    ),
    "forward_sync_buffers": (Normed, mlp_step, {"forward_sync_buffers": True}),
    "no forward_sync_buffers": (Normed, mlp_step, {"forward_sync_buffers": False}),
    "no broadcast_buffers": (Normed, mlp_step, {"broadcast_buffers": False}),
    "no init_sync": (Normed, mlp_step, {"init_sync": False}),
}


def _check_arguments(name: str, caps: dict[str, float]) -> None:
    build, step, options = ARGUMENTS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # broadcast_buffers has a newer name
        assert_trains_alike(build, lambda cls, m: cls(m, **options, **caps), step, num_steps=8)


@pytest.mark.parametrize("caps", [{}, SMALL_CAP], ids=["one bucket", "several buckets"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_argument(ranks, name, caps):
    ranks(2).run(_check_arguments, name, caps)


def _check_skip_where_ranks_differ() -> None:
    """Buckets are skipped by agreement of all ranks: a bucket that one rank uses is
    communicated."""
    torch.manual_seed(0)
    module = _Branches()
    twin = copy.deepcopy(module)
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    model = ReducerDDP(module, **options, **SMALL_CAP)
    for number in range(9):
        use_left = number % 4 < 2 or (number % 3 == 2 and dist.get_rank() == 1)
        for either in (model, twin):
            torch.manual_seed(10 * number + dist.get_rank())
            either.zero_grad()
            either(torch.randn(6, 16), use_left).square().mean().backward()
        for ours, plain in zip(module.parameters(), twin.parameters(), strict=True):
            used = torch.tensor(float(plain.grad is not None))
            dist.all_reduce(used)
            grad = torch.zeros_like(plain) if plain.grad is None else plain.grad * 0.5
            dist.all_reduce(grad)
            assert (ours.grad is None) == (not used)
            assert not used or torch.equal(ours.grad, grad)


def test_skip_where_ranks_differ(ranks):
    ranks(2).run(_check_skip_where_ranks_differ)


def _check_copies(options: dict[str, Any]) -> None:
    """Copies average over the same ranks, independently, and keep settings.

    Copies of a DDP with a static graph leave gradients local, so this mode is left out.
    """
    for cls in (ReducerDDP,) if options.get("static_graph") else WRAPPERS:
        torch.manual_seed(0)
        model = cls(Mlp(), **options, **SMALL_CAP)
        torch.manual_seed(dist.get_rank())
        mlp_step(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for twin in (torch.load(file, weights_only=False), copy.deepcopy(model)):
            assert type(twin) is cls
            assert list(twin.state_dict()) == list(model.state_dict())
            assert twin.bucket_bytes_cap == model.bucket_bytes_cap
            assert twin.find_unused_parameters == model.find_unused_parameters
            for _ in range(3):
                twin.zero_grad()
                mlp_step(twin)
                assert_same_on_all_ranks(*(param.grad for param in twin.parameters()))
            assert not set(map(id, twin.parameters())) & set(map(id, model.parameters()))


@pytest.mark.wrapper_only
@pytest.mark.parametrize("mode", MODES)
def test_pickle_and_deepcopy(ranks, mode):
    ranks(2).run(_check_copies, MODES[mode])


_ATTRIBUTES = (
    "dim",
    "device",
    "device_ids",
    "output_device",
    "device_type",
    "broadcast_buffers",
    "process_group",
    "find_unused_parameters",
    "require_backward_grad_sync",
    "require_forward_param_sync",
    "gradient_as_bucket_view",
    "static_graph",
    "bucket_bytes_cap",
    "broadcast_bucket_size",
    "is_multi_device_module",
    "skip_all_reduce_unused_params",
    "batched_grad_copy",
)


def _check_module_surface() -> None:
    """The wrapper as a module: names, modes, casts, apply, and attributes that trainers read."""
    ddp, ours = (cls(Normed()) for cls in WRAPPERS)
    for names in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        mine = [name for name, _ in getattr(ours, names)()]
        assert mine == [name for name, _ in getattr(ddp, names)()]
    for model in (ddp, ours):
        assert model.train() is model and model.module.training
        assert model.eval() is model and not model.module.norm.training
        model.requires_grad_(True)
        with torch.no_grad():
            assert not model(torch.ones(2, 16)).requires_grad
        with torch.inference_mode():
            model(torch.ones(2, 16))
    for name in _ATTRIBUTES:
        assert getattr(ours, name) == getattr(ddp, name), name
    assert set(ours.parameters_to_ignore) == set(ddp.parameters_to_ignore)
    assert type(ours.parameters_to_ignore) is set
    assert hasattr(ours, "device_mesh") is hasattr(ddp, "device_mesh") is False


@pytest.mark.wrapper_only
def test_surface_of_a_module(ranks):
    ranks(2).run(_check_module_surface)
