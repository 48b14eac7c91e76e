"""Tensors of all ranks, of different lengths."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def all_gather_rows(
    rows: torch.Tensor, group: dist.ProcessGroup, device: torch.device
) -> list[torch.Tensor]:
    """Every rank's ``rows``, on the CPU, by rank. Collective over ``group``.

    Args:
        rows: which may be of another number on each rank; what is in a row is alike.
        device: where tensors that the group can send must lie.
    """
    own = torch.tensor([len(rows)], dtype=torch.int64, device=device)
    counts = [int(count.item()) for count in _all_gather(own, group)]
    padded = rows.new_zeros(max(counts), *rows.shape[1:], device=device)
    padded[: len(rows)] = rows.to(device)
    gathered = _all_gather(padded, group) if max(counts) else [padded] * len(counts)
    return [each[:count].cpu() for each, count in zip(gathered, counts, strict=True)]


def all_gather_json(value: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """Every rank's ``value``, as JSON has it, by rank. Collective over ``group``."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    texts = all_gather_rows(text, group, device)
    return [json.loads(bytes(each.tolist())) for each in texts]


def _all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(gathered, tensor, group=group)
    return gathered
