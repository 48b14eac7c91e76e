"""The models that are timed, each with an input."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Build = Callable[[], tuple[nn.Module, torch.Tensor]]


def small_layers(num_params: int) -> tuple[nn.Module, torch.Tensor]:
    """Layers of 16 x 16 and 16: ``num_params`` tensors in all."""
    layers = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(num_params // 2)]
    return nn.Sequential(*layers), torch.randn(8, 16)


def many_small() -> tuple[nn.Module, torch.Tensor]:
    return small_layers(1000)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(320, 8, 1280, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
    return model, torch.randn(4, 64, 320)


def wide() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6))), torch.randn(8, 2048)


MODELS: dict[str, Build] = {
    "1,000 small tensors": many_small,
    "transformer, 10 M": transformer,
    "wide layers, 25 M": wide,
}
