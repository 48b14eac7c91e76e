"""Random wrappers, groups and collective calls in one backward, compared with DDP.

A model is a chain of wrapped modules. A module is a chain of layers, and a rank may leave out the
optional ones. Collective calls in backward stand after layers that every rank uses, or between
modules. Every rank uses the last layer of a module. At these places DDP, too, has launched the same
buckets on every rank. Elsewhere DDP is wrong, or hangs.

Each wrapper has its own mode. In the default mode every layer is used in every step. In a static
graph a rank uses the same layers in every step. In these two modes reentrant checkpoints are over
layers. With ``find_unused_parameters`` they are over no parameter, as DDP requires. In some steps a
backward inside ``no_sync()`` comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddpx import ReducerDDP

WIDTH = 4
KINDS = ("all_reduce", "all_gather", "broadcast", "barrier")
NUM_STEPS = 4
NUM_GROUPS = 2  # the default group, and a second group of all ranks
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "find unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


@dataclass(frozen=True)
class Call:
    """A collective call in backward."""

    kind: str
    group: int


@dataclass(frozen=True)
class Layer:
    """A linear layer, with a call in backward before its own gradient unless the layer is
    optional."""

    optional: bool
    call: Call | None
    checkpointed: bool = False  # by a reentrant checkpoint


@dataclass(frozen=True)
class Module:
    layers: tuple[Layer, ...]
    group: int
    mode: str  # a key of MODES
    options: tuple[tuple[str, Any], ...]
    call: Call | None  # after the module


@dataclass(frozen=True)
class Plan:
    modules: tuple[Module, ...]
    # Per step, rank, module and layer: whether the rank leaves out an optional layer.
    left_out: tuple[tuple[tuple[tuple[bool, ...], ...], ...], ...]
    accumulates: tuple[bool, ...]  # per step: whether a backward inside no_sync() comes first


@st.composite
def plans(draw: Callable[..., Any], world_size: int) -> Plan:
    groups = st.integers(0, NUM_GROUPS - 1)
    calls = st.none() | st.builds(Call, st.sampled_from(KINDS), groups)
    checkpointed = st.booleans()
    layers = st.builds(Layer, st.just(True), st.none(), checkpointed) | st.builds(
        Layer, st.just(False), calls, checkpointed
    )
    options = st.fixed_dictionaries(
        {
            "gradient_as_bucket_view": st.booleans(),
            "bucket_cap_mb": st.sampled_from([0.00005, 0.0002, 25]),
        }
    )
    modules = []
    for _ in range(draw(st.integers(1, 3))):
        chosen = [*draw(st.lists(layers, min_size=1, max_size=4)), Layer(False, draw(calls))]
        kept = tuple(draw(options).items())
        mode = draw(st.sampled_from(["find unused", *MODES]))
        modules.append(Module(tuple(chosen), draw(groups), mode, kept, draw(calls)))
    left_out = [
        [[[draw(st.booleans()) for _ in m.layers] for m in modules] for _ in range(world_size)]
        for _ in range(NUM_STEPS)
    ]
    for step in left_out:
        for rank, of_modules in enumerate(step):
            for index, module in enumerate(modules):
                if module.mode == "default":
                    of_modules[index] = [False for _ in module.layers]
                elif module.mode == "static":
                    of_modules[index] = left_out[0][rank][index]
    accumulates = [draw(st.booleans()) for _ in range(NUM_STEPS)]
    if any(module.mode == "static" for module in modules):
        accumulates[0] = False  # DDP fails: "expect_autograd_hooks_ INTERNAL ASSERT FAILED"
    return Plan(tuple(modules), _frozen(left_out), tuple(accumulates))


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


class _CallInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: str, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.kind, ctx.group = kind, group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _communicate(grads[0].clone(), ctx.kind, ctx.group), None, None


def _communicate(grad: torch.Tensor, kind: str, group: dist.ProcessGroup) -> torch.Tensor:
    if kind == "all_reduce":
        dist.all_reduce(grad, group=group)
    elif kind == "broadcast":
        dist.broadcast(grad, 0, group=group)
    elif kind == "all_gather":
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grad, group=group)
        grad = torch.stack(parts).sum(0)
    else:
        dist.barrier(group=group)
    return grad


class Chain(nn.Module):
    def __init__(self, module: Module, groups: list[dist.ProcessGroup]) -> None:
        super().__init__()
        self.plan = module
        self.groups = groups
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in module.layers)

    def forward(self, x: torch.Tensor, left_out: tuple[bool, ...]) -> torch.Tensor:
        for layer, plan, left in zip(self.layers, self.plan.layers, left_out, strict=True):
            if plan.optional and left:
                continue
            x = self._run(layer, x, plan.checkpointed)
            x = self._with_call(x, plan.call)
        return x

    def _run(self, layer: nn.Module, x: torch.Tensor, checkpointed: bool) -> torch.Tensor:
        if not checkpointed:
            return torch.tanh(layer(x))
        if self.plan.mode == "find unused":  # DDP refuses reentrant checkpoints over parameters
            return checkpoint(torch.tanh, layer(x), use_reentrant=True)
        return checkpoint(lambda value: torch.tanh(layer(value)), x, use_reentrant=True)

    def _with_call(self, x: torch.Tensor, call: Call | None) -> torch.Tensor:
        return x if call is None else _CallInBackward.apply(x, call.kind, self.groups[call.group])


def _train(
    plan: Plan, wrapper: Callable[..., nn.Module], groups: list[Any], device: str
) -> list[Any]:
    torch.manual_seed(0)
    wrapped = [
        wrapper(
            Chain(m, groups).to(device),
            process_group=groups[m.group],
            **dict(m.options),
            **MODES[m.mode],
        )
        for m in plan.modules
    ]
    grads = []
    for number in range(NUM_STEPS):
        torch.manual_seed(97 * number + dist.get_rank())
        for model in wrapped:
            model.zero_grad()
        if plan.accumulates[number]:
            with ExitStack() as stack:
                for model in wrapped:
                    stack.enter_context(model.no_sync())
                _backward(plan, wrapped, number, device)
        _backward(plan, wrapped, number, device)
        params = [p for model in wrapped for p in model.parameters()]
        grads.append([None if p.grad is None else p.grad.to("cpu", copy=True) for p in params])
    return grads


def _backward(plan: Plan, wrapped: list[Any], number: int, device: str) -> None:
    x = torch.randn(3, WIDTH).to(device).requires_grad_()
    for index, model in enumerate(wrapped):
        x = model(x, plan.left_out[number][dist.get_rank()][index])
        x = model.module._with_call(x, plan.modules[index].call)
    x.square().sum().backward()


def run_plan(plan: Plan, device: str) -> None:
    """Trains on ``device`` with either wrapper and compares every bit. Body of a rank."""
    groups = [dist.group.WORLD, dist.new_group()]
    try:
        expected = _train(plan, DistributedDataParallel, groups, device)
        found = _train(plan, ReducerDDP, groups, device)
        # a rank need not read the last agreement of ranks, but its peers may
        dist.barrier(groups[1])
    finally:
        dist.destroy_process_group(groups[1])
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for index, (left, right) in enumerate(zip(ours, theirs, strict=True)):
            where = f"rank {dist.get_rank()}, step {number}, parameter {index}"
            assert (left is None) == (right is None), where
            assert left is None or torch.equal(left, right), where
