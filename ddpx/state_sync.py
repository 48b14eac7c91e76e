"""Keeps parameters and buffers equal across ranks: checked and broadcast from rank 0."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ddpx import errors
from ddpx.params import ManagedParam

# Tensors are flattened together up to this size for a broadcast.
BROADCAST_BYTES = 250 * 1024 * 1024


def check_params_agree(params: Sequence[ManagedParam], group: dist.ProcessGroup) -> None:
    """Raises on every rank if shapes, dtypes or strides differ between ranks.

    One small all-gather if all is well. Otherwise descriptions are exchanged, and every rank raises
    the same report.

    Raises:
        RuntimeError: naming the first difference, with the values on rank 0 and on the first rank
            that differs from it.
    """
    if group.size() == 1:
        return
    device = params[0].tensor.device
    lines = [_describe(param.tensor) for param in params]
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    digests = _all_gather_bytes(digest, len(digest), device, group)
    if len(set(digests)) == 1:
        return
    text = "\n".join(f"{param.name}\t{line}" for param, line in zip(params, lines, strict=True))
    payload = text.encode()
    sizes = _all_gather_bytes(len(payload).to_bytes(8, "little"), 8, device, group)
    longest = max(int.from_bytes(size, "little") for size in sizes)
    texts = [
        raw.rstrip(b"\0").decode() for raw in _all_gather_bytes(payload, longest, device, group)
    ]
    raise errors.params_differ(_first_difference(texts))


def broadcast(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, source: int = 0) -> None:
    """Overwrites ``tensors`` with those of the group's rank ``source``, in few broadcasts."""
    if tensors and group.size() > 1:
        with torch.no_grad():
            dist._broadcast_coalesced(group, list(tensors), BROADCAST_BYTES, source)


def _describe(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"shape {tuple(tensor.shape)}, dtype {dtype}, strides {tensor.stride()}"


def _all_gather_bytes(
    payload: bytes, size: int, device: torch.device, group: dist.ProcessGroup
) -> list[bytes]:
    """Each rank's ``payload``, padded with zero bytes to ``size``, as a tensor on ``device``."""
    mine = torch.frombuffer(bytearray(payload.ljust(size, b"\0")), dtype=torch.uint8).to(device)
    theirs = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(theirs, mine, group=group)
    return [bytes(tensor.cpu().tolist()) for tensor in theirs]


def _first_difference(texts: Sequence[str]) -> str:
    per_rank = [[line.split("\t") for line in text.splitlines()] for text in texts]
    for rank, params in enumerate(per_rank[1:], start=1):
        for index, (ours, theirs) in enumerate(zip(per_rank[0], params, strict=False)):
            if ours[1] != theirs[1]:
                return (
                    f"Parameter {index} is '{ours[0]}' with {ours[1]} on rank 0, "
                    f"but '{theirs[0]}' with {theirs[1]} on rank {rank}."
                )
        if len(params) != len(per_rank[0]):
            longer = max(params, per_rank[0], key=len)
            shorter = min(len(params), len(per_rank[0]))
            return (
                f"Rank 0 has {len(per_rank[0])} parameters that require gradients, rank {rank} has "
                f"{len(params)}; the first without a counterpart is '{longer[shorter][0]}'."
            )
    return "The digests differ, but the descriptions do not."
