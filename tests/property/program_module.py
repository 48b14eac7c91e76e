"""The module of a program: a chain of layers, each with a use of its parameter."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from gradient_forms import formed
from programs import DTYPES, SHAPES, Layer, Program, Step, original
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 4
BATCH = 3
ROWS = 5  # number of rows of embeddings


class PlannedFailure(Exception):
    """The exception of a rank that fails as the program says."""


class Param(nn.Module):
    """One parameter."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value)


def _make(layer: Layer) -> nn.Module:
    dtype = DTYPES[layer.dtype]
    if layer.kind in ("linear", "no bias"):
        return nn.Linear(WIDTH, WIDTH, bias=layer.kind == "linear", dtype=dtype)
    if layer.kind == "conv":
        return nn.Conv1d(1, 1, 3, padding=1, dtype=dtype)
    if layer.kind == "norm":
        return nn.BatchNorm1d(WIDTH, dtype=dtype)
    if layer.kind in ("embedding", "sparse"):
        return nn.Embedding(ROWS, WIDTH, sparse=layer.kind == "sparse", dtype=dtype)
    if layer.kind == "complex":
        return Param(torch.randn(WIDTH, 2, dtype=torch.complex128))
    if layer.kind == "turned":
        return Param(torch.randn(WIDTH, 3, dtype=dtype).t())
    shape = SHAPES[layer.kind]
    return Param(torch.randn(shape, dtype=dtype) / max(1, math.prod(shape)) + 0.5)


def _linear(module: Any, weight: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    return F.linear(x, weight, module.bias)


def _conv(module: Any, weight: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    return F.conv1d(x.unsqueeze(1), weight, module.bias, padding=1).squeeze(1)


def _norm(module: Any, weight: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    return module(x)


def _embedding(module: Any, weight: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    return F.embedding(rows, weight, sparse=module.sparse)


def _complex(module: Any, weight: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    return (x * weight.prod(1)).real


def _scale(module: Any, weight: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    if weight.dim() == 0 or weight.numel() == 0 or weight.shape[-1] != WIDTH:
        return x * weight.sum()
    return x * weight.reshape(-1, WIDTH).sum(0)


_RUN: dict[str, Callable[..., Tensor]] = {
    "linear": _linear,
    "no bias": _linear,
    "conv": _conv,
    "norm": _norm,
    "embedding": _embedding,
    "sparse": _embedding,
    "complex": _complex,
}


class _FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise PlannedFailure


@dataclass
class Outputs:
    """An output type that reveals its tensors."""

    last: Tensor
    middle: Tensor


class Hidden:
    """An output type that does not reveal its tensors."""

    __slots__ = ("tensors",)

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors


class ProgramModule(nn.Module):
    """Runs the layers that the program and the step select. The weights are equal on all ranks."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.layers = nn.ModuleList(_make(layer) for layer in program.layers)
        for index, (layer, module) in enumerate(zip(program.layers, self.layers, strict=True)):
            module.weight = self.layers[original(program.layers, index)].weight
            if layer.frozen:
                module.requires_grad_(False)
        names = [f"layers.{i}" for i, layer in enumerate(program.layers) if layer.ignored]
        self._ddp_params_and_buffers_to_ignore = [
            name
            for name, _ in (*self.named_parameters(), *self.named_buffers())
            if name.rpartition(".")[0] in names
        ]

    def forward(self, x: Tensor, rows: Tensor, step: Step, rank: int, fail: str = "") -> Any:
        """Returns the output after the last layer, and after the first layers."""
        order = [i for i in range(len(self.layers)) if i not in step.left_out[rank]]
        if rank in step.reverse:
            order = order[:1] + order[:0:-1]
        middle = x
        for position, index in enumerate(order):
            for _ in range(self.program.layers[index].calls):
                x = self._use(index, x, rows)
            # All ranks fail at the same place, so they have launched the same buckets.
            if fail == "backward" and position == 0:
                x = _FailInBackward.apply(x)
            if position == len(order) // 2:
                if fail == "forward":
                    raise PlannedFailure
                middle = x * 1.0  # an output of its own, even after the last layer
        return self._output(x, middle)

    def _output(self, last: Tensor, middle: Tensor) -> Any:
        if self.program.output == "dict":
            return {"outputs": [last, middle], "nothing": None}
        if self.program.output == "dataclass":
            return Outputs(last, middle)
        return Hidden((last, middle)) if self.program.output == "hidden" else (last, middle)

    def _use(self, index: int, x: Tensor, rows: Tensor) -> Tensor:
        kind = self.program.layers[index].checkpoint
        if kind == "none":
            return self._run(index, x, rows)
        return checkpoint(self._run, index, x, rows, use_reentrant=kind == "reentrant")

    def _run(self, index: int, x: Tensor, rows: Tensor) -> Tensor:
        layer, module = self.program.layers[index], self.layers[index]
        weight = formed(module.weight, layer.gradient)
        inputs = x if weight.is_complex() else x.to(weight.dtype)
        change = _RUN.get(layer.kind, _scale)(module, weight, inputs, rows)
        return torch.tanh(x + change.to(x.dtype))


def outputs_of(output: Any) -> tuple[Tensor, Tensor]:
    """The two tensors of an output of ``ProgramModule``."""
    if isinstance(output, Outputs):
        return output.last, output.middle
    if isinstance(output, Hidden):
        output = output.tensors
    elif isinstance(output, dict):
        output = output["outputs"]
    last, middle = output
    return last, middle
