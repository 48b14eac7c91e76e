"""What must be the same on all ranks when a module is wrapped: checked, and reported alike."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ddpx import errors, health
from ddpx.ddp.options import Options
from ddpx.params import named_managed_buffers
from ddpx.params.dtensors import is_dtensor, local_part

_ORDER = "order of parameters"
_ABSENT = "absent"
# Those on which collective calls depend.
_VARIABLES = ("DDPX_CHECK_FINITE", "DDPX_HEALTH", "DDPX_TIMELINE", "DDPX_TIMELINE_STEPS")

Description = Mapping[str, str]  # by what it is about


def describe(
    module: nn.Module, ignored: frozenset[str], options: Options, extra: Mapping[str, object]
) -> Description:
    """Of this rank.

    Args:
        ignored: params and buffers that take no part.
        extra: further options.
    """
    import ddpx  # not at the top: it imports this module

    found = {"torch version": torch.__version__, "ddpx version": ddpx.__version__}
    for name, value in {**asdict(options), **extra}.items():
        found[f"option {name}"] = repr(value)
    for name in _VARIABLES:
        found[f"environment variable {name}"] = os.environ.get(name, "not set")
    params = [(name, p) for name, p in module.named_parameters() if name not in ignored]
    for name, param in params:
        found[f"parameter '{name}'"] = (
            f"{_layout(param)}, {'trained' if param.requires_grad else 'frozen'}"
        )
    for name, buffer in named_managed_buffers(module, ignored):
        found[f"buffer '{name}'"] = _layout(buffer)
    found[_ORDER] = json.dumps([name for name, _ in params])
    return found


def _layout(tensor: torch.Tensor) -> str:
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        return "uninitialized"
    dtype = str(tensor.dtype).removeprefix("torch.")
    if is_dtensor(tensor):
        local = local_part(tensor)
        placements = tuple(tensor.placements)  # type: ignore[attr-defined]
        return f"DTensor of shape {tuple(tensor.shape)}, {placements}, locally {_layout(local)}"
    return f"shape {tuple(tensor.shape)}, {dtype}, strides {tensor.stride()}"


def differences(
    description: Description, group: dist.ProcessGroup, device: torch.device
) -> list[str]:
    """A sentence for each thing that is not the same on every rank, with the values there.

    One small all-gather if all is well. Otherwise descriptions are exchanged.

    Args:
        device: where tensors that the group can send must lie.
    """
    if group.size() == 1:
        return []
    payload = json.dumps(description).encode()
    digest = hashlib.sha256(payload).digest()
    digests = _all_gather_bytes(digest, len(digest), device, group)
    if len(set(digests)) == 1:
        return []
    sizes = _all_gather_bytes(len(payload).to_bytes(8, "little"), 8, device, group)
    longest = max(int.from_bytes(size, "little") for size in sizes)
    texts = _all_gather_bytes(payload, longest, device, group)
    per_rank: list[Description] = [json.loads(text.rstrip(b"\0")) for text in texts]
    return _differences(per_rank)


def _differences(per_rank: Sequence[Description]) -> list[str]:
    """In the order of rank 0."""
    keys = dict.fromkeys(key for description in per_rank for key in description)
    found = []
    for key in keys:
        values = [description.get(key, _ABSENT) for description in per_rank]
        if len(set(values)) > 1 and key != _ORDER:
            found.append(f"{key}: {_by_value(values)}")
    if not found:
        found.append(_first_out_of_order([json.loads(d[_ORDER]) for d in per_rank]))
    return found


def _by_value(values: Sequence[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on {errors.list_ranks(at)}" for value, at in ranks.items())


def _first_out_of_order(orders: Sequence[Sequence[str]]) -> str:
    for place, names in enumerate(zip(*orders, strict=True)):
        if len(set(names)) > 1:
            return f"parameter number {place}: {_by_value([repr(name) for name in names])}"
    return "the digests of the descriptions: different, although the descriptions are equal"


def _all_gather_bytes(
    payload: bytes, size: int, device: torch.device, group: dist.ProcessGroup
) -> list[bytes]:
    """Each rank's ``payload``, padded with zero bytes to ``size``, as a tensor on ``device``."""
    mine = torch.frombuffer(bytearray(payload.ljust(size, b"\0")), dtype=torch.uint8).to(device)
    theirs = [torch.empty_like(mine) for _ in range(group.size())]
    with health.collective_call(group):
        health.wait(dist.all_gather(theirs, mine, group=group, async_op=True), group, device)
        # Over NCCL it is here that the host waits.
        return [bytes(tensor.cpu().tolist()) for tensor in theirs]
