"""Makes parameters and buffers equal across ranks: broadcast from rank 0."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

# Tensors are flattened together up to this size for a broadcast.
BROADCAST_BYTES = 250 * 1024 * 1024


def broadcast(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, source: int = 0) -> None:
    """Overwrites ``tensors`` with those of the group's rank ``source``, in few broadcasts."""
    if tensors and group.size() > 1:
        with torch.no_grad():
            dist._broadcast_coalesced(group, list(tensors), BROADCAST_BYTES, source)
