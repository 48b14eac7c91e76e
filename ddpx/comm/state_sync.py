"""Broadcasts the parameters and buffers of one rank, so that all ranks have the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ddpx import _C, health
from ddpx.comm import collectives, transforms
from ddpx.comm.parts import in_shown_memory, parts_of
from ddpx.comm.process_group import is_alone

# Tensors are flattened together up to this size for a broadcast.
BROADCAST_BYTES = 250 * 1024 * 1024


def broadcast(
    tensors: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    source: int = 0,
    most_bytes: int = BROADCAST_BYTES,
) -> None:
    """Overwrites ``tensors`` with the tensors of rank ``source`` of the group.

    Small tensors share a broadcast, of at most ``most_bytes``. Tensors may have any layout, which
    is the same on all ranks.
    """
    if not tensors or is_alone(group):
        return
    with torch.no_grad(), transforms.outside():
        if _C.hold_plain_values(tensors):
            _broadcast_dense(tensors, group, source, most_bytes)
            return
        shown = [in_shown_memory(tensor) for tensor in tensors]
        parts = [part for each in shown for part in parts_of(each)]
        _broadcast_dense(parts, group, source, most_bytes)
        for tensor, values in zip(tensors, shown, strict=True):
            if values is not tensor and group.rank() != source:
                tensor.copy_(values)


def _broadcast_dense(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, source: int, most_bytes: int
) -> None:
    if not all(_C.needs_abort_polling(group, tensor.device) for tensor in tensors):
        _broadcast_coalesced(tensors, group, source, most_bytes)
        return
    for together in collectives.flattened_together(tensors, most_bytes):
        _broadcast_flat(together, group, source)


def _broadcast_coalesced(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, source: int, most_bytes: int
) -> None:
    # torch would send the memory of a lazy conjugate or negation, not its values.
    sent = [t.clone() if t.is_conj() or t.is_neg() else t for t in tensors]
    with health.collective_call(group):
        dist._broadcast_coalesced(group, sent, most_bytes, source)
    for tensor, values in zip(tensors, sent, strict=True):
        if values is not tensor:
            tensor.copy_(values)


def _broadcast_flat(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, source: int) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    with health.collective_call(group):
        collectives.broadcast(flat, group, source)
    if group.rank() != source:
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))
