"""Collective calls that wait for their end, and tensors that share a call. An error names the lost
ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddpx import _C, health
from ddpx.comm.process_group import is_written_in_python

# Groups that are written in Python get calls of torch, because their works may be of any kind.


def wait_for(work: dist.Work | None, group: dist.ProcessGroup, device: torch.device) -> None:
    """Waits for a collective call of torch on tensors of ``device``.

    Not named ``wait``: pybind11 would take a function of this name with ``work`` as its first
    argument for ``work.wait()`` of a work in Python, and would call the base class instead.
    """
    assert work is not None  # only a rank outside the group gets None
    with health.explained(health.watch(group)):
        _C.wait(work, group, device)


def all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> torch.Tensor:
    """Reduces ``tensor`` over all ranks in place, and returns it."""
    if is_written_in_python(group):
        work = dist.all_reduce(tensor, op, group=group, async_op=True)
        wait_for(work, group, tensor.device)
        _copy_result(work, tensor)
        return tensor
    with health.explained(health.watch(group)):
        _C.all_reduce(tensor, group, op)
    return tensor


def _copy_result(work: Any, tensor: torch.Tensor) -> None:
    """Copies the value of the work's future. The reducer reads the future of such a group, too."""
    try:
        future = work.get_future()
    except RuntimeError:  # the work has no future
        return
    value = future.wait()
    result = value[0] if isinstance(value, (list, tuple)) else value
    if isinstance(result, torch.Tensor) and result is not tensor:
        tensor.copy_(result)


def broadcast(tensor: torch.Tensor, group: dist.ProcessGroup, source: int = 0) -> torch.Tensor:
    """Overwrites ``tensor`` with the tensor of rank ``source`` of the group, and returns it."""
    if is_written_in_python(group):
        work = dist.broadcast(tensor, group=group, group_src=source, async_op=True)
        wait_for(work, group, tensor.device)
        return tensor
    with health.explained(health.watch(group)):
        _C.broadcast(tensor, group, source)
    return tensor


def all_gather(
    tensor: torch.Tensor, group: dist.ProcessGroup, num_ranks: int | None = None
) -> list[torch.Tensor]:
    """Returns the tensors of all ranks, which have one shape, by rank.

    Args:
        tensor: The tensor of this rank.
        group: The ranks.
        num_ranks: The number of tensors that a group in Python returns. None: its ``size()``.
    """
    if is_written_in_python(group):
        gathered = [torch.empty_like(tensor) for _ in range(num_ranks or group.size())]
        work = dist.all_gather(gathered, tensor, group=group, async_op=True)
        wait_for(work, group, tensor.device)
        return gathered
    with health.explained(health.watch(group)):
        return _C.all_gather(tensor, group)


def all_gather_rows(
    rows: torch.Tensor, group: dist.ProcessGroup, device: torch.device
) -> list[torch.Tensor]:
    """Returns the rows of every rank, on the CPU, by rank. A collective call.

    Args:
        rows: A tensor whose first dimension may differ between ranks.
        group: The ranks.
        device: The device of tensors that the group can send.
    """
    own = torch.tensor([len(rows)], dtype=torch.int64, device=device)
    counts = [int(count.item()) for count in all_gather(own, group)]
    padded = rows.new_zeros(max(counts), *rows.shape[1:], device=device)
    padded[: len(rows)] = rows.to(device)
    gathered = all_gather(padded, group) if max(counts) else [padded] * len(counts)
    return [each[:count].cpu() for each, count in zip(gathered, counts, strict=True)]


def all_gather_json(value: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """Returns the JSON value of every rank, by rank. A collective call."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    texts = all_gather_rows(text, group, device)
    return [json.loads(bytes(each.tolist())) for each in texts]


def flattened_together(
    tensors: Sequence[torch.Tensor], most_bytes: int
) -> Iterator[list[torch.Tensor]]:
    """Splits tensors into lists of one dtype and device, and of at most ``most_bytes``.

    A larger tensor has a list of its own.
    """
    for kind in dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors):
        together: list[torch.Tensor] = []
        num_bytes = 0
        for tensor in tensors:
            if (tensor.dtype, tensor.device) != kind:
                continue
            num_bytes += tensor.nbytes
            if together and num_bytes > most_bytes:
                yield together
                together, num_bytes = [], tensor.nbytes
            together.append(tensor)
        yield together
