"""Models of common sizes in plain torch, so that no further package is needed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Build = Callable[[], tuple[nn.Module, torch.Tensor]]


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions."""

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        channels_out = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, channels_out, 1, bias=False),
            nn.BatchNorm2d(channels_out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False),
                nn.BatchNorm2d(channels_out),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet(batch: int, side: int, depths: tuple[int, ...] = (3, 4, 6, 3)) -> Build:
    """ResNet-50 with the default depths: 25.6 M parameters in 161 tensors."""

    def build() -> tuple[nn.Module, torch.Tensor]:
        layers: list[nn.Module] = [
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        ]
        channels = 64
        for stage, depth in enumerate(depths):
            width = 64 << stage
            for number in range(depth):
                stride = 2 if stage > 0 and number == 0 else 1
                layers.append(Bottleneck(channels, width, stride))
                channels = 4 * width
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)]
        return nn.Sequential(*layers), torch.randn(batch, 3, side, side)

    return build


class Block(nn.Module):
    """The block of GPT-2: attention and MLP, each after a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    """The output layer is tied to the embedding."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.blocks(self.tokens(ids) + self.positions(places))
        return nn.functional.linear(self.norm(x), self.tokens.weight)


def gpt(
    batch: int,
    length: int,
    vocabulary: int = 50257,
    width: int = 768,
    heads: int = 12,
    depth: int = 12,
) -> Build:
    """The smallest GPT-2 with the defaults and 1024 tokens: 124 M parameters in 148 tensors."""

    def build() -> tuple[nn.Module, torch.Tensor]:
        model = GPT(vocabulary, length, width, heads, depth)
        return model, torch.randint(vocabulary, (batch, length))

    return build


def small_layers(number: int, width: int = 16) -> Build:
    """Linear layers, whose step takes the time of the host."""

    def build() -> tuple[nn.Module, torch.Tensor]:
        layers = (nn.Linear(width, width) for _ in range(number))
        return nn.Sequential(*layers), torch.randn(4, width)

    return build


def models(tiny: bool) -> dict[str, Build]:
    if tiny:
        return {
            "ResNet-like": resnet(2, 32, (1, 1)),
            "GPT-like": gpt(2, 16, vocabulary=100, width=32, heads=2, depth=2),
            "10 small layers": small_layers(10),
        }
    return {
        "ResNet-50": resnet(32, 224),
        "GPT-2 124 M": gpt(4, 1024),
        "1,000 small layers": small_layers(1000),
    }
