"""Modules that a plan describes, and the plan itself, of small values that are sent to every
rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 4
ROWS = 5  # number of rows of embeddings
KINDS = ("linear", "no bias", "scale", "transposed", "embedding", "sparse", "complex")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
SHAPES: tuple[tuple[int, ...], ...] = ((WIDTH,), (1,), (), (3, 1, WIDTH), (0, 2), (7, WIDTH))
OUTPUT_TYPES = ("tuple", "dict", "custom")


@dataclass(frozen=True)
class Layer:
    kind: str
    dtype: str = "float64"
    shape: tuple[int, ...] = (WIDTH,)  # shape of a scale
    frozen: bool = False  # whether frozen before wrapping
    tied: bool = False  # whether it shares the weight of the first linear layer of its type


@dataclass(frozen=True)
class Use:
    """One use of a layer in forward."""

    layer: int
    checkpoint: str = "none"  # or "reentrant", "non-reentrant"
    optional: bool = False  # whether a step may leave it out


@dataclass(frozen=True)
class MicroBatch:
    kind: str = "plain"  # a key of random_steps.KINDS
    sync: bool = True


@dataclass(frozen=True)
class Step:
    """``left_out`` (indices of uses) and ``frozen`` (of layers) have an entry per rank."""

    micro_batches: tuple[MicroBatch, ...]
    left_out: tuple[frozenset[int], ...]
    frozen: tuple[frozenset[int], ...]
    reverse: tuple[bool, ...]  # per rank: optional uses run in the opposite order


@dataclass(frozen=True)
class Plan:
    layers: tuple[Layer, ...]
    uses: tuple[Use, ...]
    cut: int  # the second output comes after this use
    output_type: str
    options: tuple[tuple[str, Any], ...]  # options of ReducerDDP
    hook: bool  # whether torch's allreduce_hook replaces the all-reduce
    zero_style: str  # how gradients are zeroed before a step
    steps: tuple[Step, ...]


class Scale(nn.Module):
    """A param of any shape, also without dimensions or without elements."""

    def __init__(self, param: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(param)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if weight.dim() == 0 or weight.numel() == 0 or weight.shape[-1] != WIDTH:
            return x * weight.sum()
        return x * weight.reshape(-1, WIDTH).sum(0)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 2, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight.prod(1)).real


class Custom:
    """A type that does not reveal its tensors."""

    __slots__ = ("tensors",)

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self.tensors = tensors


def make_layer(layer: Layer) -> nn.Module:
    dtype = DTYPES[layer.dtype]
    if layer.kind in ("linear", "no bias"):
        return nn.Linear(WIDTH, WIDTH, bias=layer.kind == "linear", dtype=dtype)
    if layer.kind in ("embedding", "sparse"):
        return nn.Embedding(ROWS, WIDTH, sparse=layer.kind == "sparse", dtype=dtype)
    if layer.kind == "complex":
        return Complex()
    if layer.kind == "transposed":
        return Scale(torch.randn(WIDTH, 3, dtype=dtype).t())
    return Scale(torch.randn(layer.shape, dtype=dtype) / max(1, math.prod(layer.shape)) + 0.5)


class RandomModule(nn.Module):
    """Runs the layers that the plan and the step select."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.layers = nn.ModuleList(make_layer(layer) for layer in plan.layers)
        originals: dict[tuple[str, str], nn.Module] = {}
        for layer, module in zip(plan.layers, self.layers, strict=True):
            original = originals.setdefault((layer.kind, layer.dtype), module)
            if layer.tied and "linear" in layer.kind:
                module.weight = original.weight
        for layer, module in zip(plan.layers, self.layers, strict=True):
            if layer.frozen:
                module.requires_grad_(False)

    def forward(self, x: torch.Tensor, rows: torch.Tensor, step: Step, rank: int) -> Any:
        order = [i for i in range(len(self.plan.uses)) if i not in step.left_out[rank]]
        if step.reverse[rank]:
            order = order[:1] + order[:0:-1]
        at_cut = x
        for position, index in enumerate(order):
            x = self._use(self.plan.uses[index], x, rows)
            if position == min(self.plan.cut, len(order) - 1):
                at_cut = x * 1.0  # an output of its own, even after the last use
        outputs = (x, at_cut)
        if self.plan.output_type == "dict":
            return {"outputs": list(outputs), "nothing": None}
        return Custom(outputs) if self.plan.output_type == "custom" else outputs

    def _use(self, use: Use, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if use.checkpoint == "none":
            return self._run(use.layer, x, rows)
        reentrant = use.checkpoint == "reentrant"
        return checkpoint(self._run, use.layer, x, rows, use_reentrant=reentrant)

    def _run(self, index: int, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        layer, module = self.plan.layers[index], self.layers[index]
        if layer.kind in ("embedding", "sparse"):
            change = module(rows)
        elif layer.kind == "complex":
            change = module(x)
        else:
            change = module(x.to(DTYPES[layer.dtype]))
        return torch.tanh(x + change.to(x.dtype))


def outputs_of(output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(output, Custom):
        output = output.tensors
    elif isinstance(output, dict):
        output = output["outputs"]
    last, at_cut = output
    return last, at_cut
