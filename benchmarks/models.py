"""The measured models, each with an input."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import nn

Build = Callable[[], tuple[nn.Module, torch.Tensor]]


def small_layers(num_params: int) -> tuple[nn.Module, torch.Tensor]:
    """Layers of 16 x 16 and 16, with ``num_params`` tensors in all."""
    layers = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(num_params // 2)]
    return nn.Sequential(*layers), torch.randn(8, 16)


def many_small() -> tuple[nn.Module, torch.Tensor]:
    return small_layers(1000)


def transformer(width: int = 320, depth: int = 8) -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
    return model, torch.randn(4, 64, width)


def wide(width: int = 2048, depth: int = 6) -> tuple[nn.Module, torch.Tensor]:
    layers = (nn.Linear(width, width) for _ in range(depth))
    return nn.Sequential(*layers), torch.randn(8, width)


class Joined(nn.Module):
    """A model with almost no arithmetic: the cost of a step is the cost per tensor."""

    def __init__(self, num_params: int) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(nn.Parameter(torch.randn(16)) for _ in range(num_params))
        self._tensors = list(self.tensors)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._tensors) * x


def joined(num_params: int) -> tuple[nn.Module, torch.Tensor]:
    return Joined(num_params), torch.ones(1)


class StochasticDepth(nn.Module):
    """Residual layers. Each rank skips each layer with probability 0.2, anew in each step."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor, draw: random.Random) -> torch.Tensor:
        for layer in self.layers:
            if draw.random() >= 0.2:
                x = x + torch.relu(layer(x))
        return x


class Mixture(nn.Module):
    """Blocks of a shared layer and 8 experts. Each rank uses one expert of each block."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.shared = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(8 * depth))

    def forward(self, x: torch.Tensor, draw: random.Random) -> torch.Tensor:
        for block, shared in enumerate(self.shared):
            expert = self.experts[8 * block + draw.randrange(8)]
            x = shared(x)
            x = x + torch.relu(expert(x))
        return x


def varying(name: str, tiny: bool) -> tuple[nn.Module, torch.Tensor]:
    """A model whose used params vary by rank and step. A layer has 1 MiB."""
    width, depth = (32, 2) if tiny else (512, 4)
    x = torch.randn(64, width)
    return (StochasticDepth(width, 4 * depth), x) if name == DEPTH else (Mixture(width, depth), x)


DEPTH, MIXTURE = "stochastic depth", "mixture of 8 experts"
SMALL, TRANSFORMER, WIDE = "1,000 small tensors", "transformer, 10 M", "wide layers, 25 M"

MODELS: dict[str, Build] = {SMALL: many_small, TRANSFORMER: transformer, WIDE: wide}

# Small models under the same names, for a smoke run.
TINY_MODELS: dict[str, Build] = {
    SMALL: lambda: small_layers(100),
    TRANSFORMER: lambda: transformer(64, 2),
    WIDE: lambda: wide(256, 3),
}


def build(name: str, tiny: bool) -> tuple[nn.Module, torch.Tensor]:
    return (TINY_MODELS if tiny else MODELS)[name]()
