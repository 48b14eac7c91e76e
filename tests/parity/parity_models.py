"""Small models that together use every layout, dtype and graph shape of the parity matrix."""

from __future__ import annotations

import torch
from torch import nn


class Mlp(nn.Sequential):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(
            nn.Linear(24, 96, dtype=dtype),
            nn.Tanh(),
            nn.Linear(96, 160, dtype=dtype),
            nn.Tanh(),
            nn.Linear(160, 33, dtype=dtype),
            nn.Tanh(),
            nn.Linear(33, 5, dtype=dtype),
        )


class ConvBatchNorm(nn.Sequential):
    """Has buffers: running statistics, which rank 0 broadcasts."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 12, 3, padding=1, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(48, 5),
        )


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(tokens)))


class TiedEmbeddings(nn.Module):
    """One parameter in two places. Its gradient is accumulated twice before it is final."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.hidden = nn.Linear(32, 32)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(self.embed(tokens))))


class OddParams(nn.Module):
    """Parameters without elements, without dimensions, transposed, and with gaps in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.scalar = nn.Parameter(torch.randn(()))
        self.transposed = nn.Parameter(torch.randn(16, 24).t())
        self.gapped = nn.Parameter(torch.randn(16, 10)[:, ::2])
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ self.transposed) @ self.gapped
        return y * self.scalar + self.frozen + self.empty.sum()


class LazyGrads(nn.Module):
    """Autograd hands over lazy conjugates and negations of gradients, expanded ones and views."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 5, dtype=torch.complex64))
        self.real = nn.Parameter(torch.randn(()))
        self.imag = nn.Parameter(torch.randn(()))
        self.real_row = nn.Parameter(torch.randn(1))
        self.imag_row = nn.Parameter(torch.randn(1))
        self.scale = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.randn(5, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phase = torch.complex(self.real, self.imag).conj()
        pole = torch.complex(self.real_row, self.imag_row).conj()
        y = torch.tanh(x.to(torch.complex64) @ self.weight.conj()) * phase + pole
        z = torch.view_as_real(y * self.scale.conj().conj())
        return z.sum(-1) @ self.bias + self.bias.sum()


class MixedDtypes(nn.Module):
    """Two dtypes in alternation. Each dtype has its own buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 40)
        self.second = nn.Linear(40, 64, dtype=torch.float64)
        self.third = nn.Linear(64, 30)
        self.fourth = nn.Linear(30, 5, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x)).double()))
        return self.fourth(torch.tanh(self.third(x.float())).double())


class SparseEmbeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32, sparse=True)
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


class Branches(nn.Module):
    """Arguments of forward select the parameters in use. No forward uses ``never``."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(24, 32)
        self.left = nn.Linear(32, 5)
        self.never = nn.Linear(7, 3)
        self.right = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor, use_left: bool) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(x))
        return self.left(hidden) if use_left else self.right(hidden)


class Adversaries(nn.Module):
    """A generator and a discriminator, wrapped separately and trained by one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 48), nn.Tanh(), nn.Linear(48, 24))
        self.discriminator = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 1))
