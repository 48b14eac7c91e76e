"""A small GPT: a stack of pre-norm transformer blocks that predicts the next character.

Shapes in the comments and docstrings: B windows in a batch, T positions in a window,
C channels (the width of the model), H attention heads, V characters in the alphabet.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a position sees itself and the positions before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        batch, time, width = x.shape
        qkv = self.queries_keys_values(x).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, C / H)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """Attention moves information between positions. The MLP then works on each position alone."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Maps character ids to a score for each possible next character."""

    def __init__(
        self, alphabet_size: int, context: int, layers: int, heads: int, width: int
    ) -> None:
        """Build the model. `context` is the longest window that it can read, in characters."""
        super().__init__()
        self.context = context
        self.character_embedding = nn.Embedding(alphabet_size, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.final_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, alphabet_size)
        # The usual 0.02 is meant for wider models. A small model learns faster from larger weights.
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.05)

    def forward(self, ids: Tensor) -> Tensor:
        """Character ids (B, T), int64 -> next-character logits (B, T, V)."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.character_embedding(ids) + self.position_embedding(positions)
        return self.head(self.final_norm(self.blocks(x)))


def next_character_loss(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy in nats of logits (B, T, V) against target ids (B, T).

    A scalar: nats per character with reduction "mean", their total with "sum".
    """
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


@torch.no_grad()
def generate(model: GPT, prompt: Tensor, count: int, seed: int, temperature: float) -> Tensor:
    """Append `count` sampled characters to the prompt ids (T,) -> ids (T + count,).

    A lower temperature favors the likelier characters.
    """
    # Drawing on the CPU gives the same random numbers on every device.
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    ids = prompt
    for _ in range(count):
        window = ids[-model.context :].unsqueeze(0).to(device)
        logits = model(window)[0, -1].float().cpu()
        probabilities = F.softmax(logits / temperature, dim=-1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=generator)])
    return ids
