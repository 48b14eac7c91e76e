"""Checks at construction that all ranks wrap the same module with the same options.

A rank that cannot make its wrapper tells the other ranks, so that all ranks raise an error.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ddpx import errors, health, params, version
from ddpx.comm import state_sync, transport
from ddpx.comm.collectives import all_gather
from ddpx.comm.parts import PER_TENSOR, hides_memory, in_shown_memory, parts_of
from ddpx.comm.process_group import device_of_calls, is_alone, resolve_group, world_size
from ddpx.ddp.arguments.options import Options
from ddpx.params.dtensors import is_dtensor, local_part

_ORDER = "order of parameters"
_FAULT = "fault"
_ABSENT = "absent"
_MOST_DIFFERENCES = 10
_KINDS: Mapping[str, type[Exception]] = {
    kind.__name__: kind for kind in (RuntimeError, TypeError, ValueError)
}
_P = ParamSpec("_P")
_T = TypeVar("_T")
# These environment variables decide which collective calls a rank makes.
_VARIABLES = (
    "DDPX_CHECK_FINITE",
    "DDPX_HEALTH",
    "DDPX_HOST_LEASE",
    "DDPX_TIMELINE",
    "DDPX_TIMELINE_STEPS",
)

Description = Mapping[str, str]  # values as texts, by name


class _Construction(threading.local):
    """The construction of a wrapper on this thread."""

    compared = False  # whether the ranks have begun to compare their descriptions


_construction = _Construction()


def faults_reach_all_ranks(construct: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorates the construction of a front: an error of one rank becomes an error of all ranks.

    The decorator concerns errors before :func:`make_ranks_agree` compares the ranks, unless the
    arguments turn the comparison off.
    """
    names = list(inspect.signature(construct).parameters)

    @functools.wraps(construct)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        _construction.compared = False
        try:
            return construct(*args, **kwargs)
        except Exception as error:
            if not _construction.compared:
                _tell(error, {**dict(zip(names, args, strict=False)), **kwargs})
            raise

    return checked


def _tell(error: Exception, arguments: Mapping[str, Any]) -> None:
    """Tells the other ranks that this rank raises ``error``.

    Args:
        error: The error of this rank.
        arguments: The arguments of the constructor, by name. They may be wrong.

    Raises:
        Exception: Other ranks have no such error. The text names the ranks that have the error.
    """
    try:
        compares = bool(arguments.get("init_sync", True))
        group = resolve_group(arguments.get("process_group"), arguments.get("device_mesh"))
    except Exception:
        return  # a wrong argument that the other ranks have, too
    if not compares or is_alone(group):
        return
    device = _device_of(arguments.get("module"))
    try:
        with health.constructing(group):
            found = _compare({_FAULT: f"{type(error).__name__}: {error}"}, group, device)
    except RuntimeError:
        return  # the other ranks are gone
    if found is not None:
        raise found from error


def _device_of(module: Any) -> torch.device:
    """The device of the first parameter. The CPU if there is none, or the module raises."""
    with suppress(Exception):
        return next(param.device for _, param in module.named_parameters())
    return torch.device("cpu")


def make_ranks_agree(
    module: nn.Module,
    ignored: frozenset[str],
    options: Options,
    group: dist.ProcessGroup,
    device: torch.device,
) -> transport.Transport | None:
    """Compares the module and the options of all ranks, and broadcasts the state of rank 0.

    A collective call: one small all-gather, the broadcast, and the first time for a group the calls
    of :func:`ddpx.comm.transport.connect`.

    Args:
        module: The wrapped module.
        ignored: Names of parameters and buffers that do not take part.
        options: The options of the wrapper.
        group: The ranks.
        device: The device of the module.

    Returns:
        The transport of buckets. None: the group.

    Raises:
        RuntimeError: Ranks differ.
        ValueError: Ranks cannot use the transport of the options.
    """
    state = _state(module, ignored, options.sync_buffers_at_init)
    description = _describe(module, ignored, options, device)
    with health.constructing(group):
        found = _compare(description, group, device)
        if found is None:
            state_sync.broadcast(state, group)
            return transport.connect(options.transport, group, device)
    raise found


def _state(module: nn.Module, ignored: frozenset[str], with_buffers: bool) -> list[torch.Tensor]:
    """The tensors of the module that ranks broadcast.

    Raises:
        RuntimeError: One of the tensors cannot be broadcast.
    """
    named = dict(params.named_state(module, ignored, with_buffers))
    for name, tensor in named.items():
        try:
            parts_of(in_shown_memory(tensor.detach()))
        except Exception as error:
            raise RuntimeError(
                f"construction cannot broadcast '{name}', a {type(tensor).__name__}: {error}. Give "
                "this tensor its values and a layout that torch can write to before wrapping, or "
                "exclude the tensor: "
                "ReducerDDP._set_params_and_buffers_to_ignore_for_model(module, names)."
            ) from error
    return [tensor.detach() for tensor in named.values()]


def _describe(
    module: nn.Module,
    ignored: frozenset[str],
    options: Options,
    device: torch.device,
) -> Description:
    """Everything about this rank's wrapper that must be the same on all ranks."""
    found = {
        "torch version": torch.__version__,
        "ddpx version": version.__version__,
        "device type": device.type,
    }
    for name, value in options.describe(module).items():
        found[f"option {name}"] = repr(value)
    for name in _VARIABLES:
        found[f"environment variable {name}"] = os.environ.get(name, "not set")
    named_params = [(name, p) for name, p in module.named_parameters() if name not in ignored]
    sparse = {p.name for p in params.managed_params(module, ignored) if p.expect_sparse}
    for name, param in named_params:
        use = "trained" if param.requires_grad else "frozen"
        gradients = " with sparse gradients" if name in sparse else ""
        found[f"parameter '{name}'"] = f"{_layout(param)}, {use}{gradients}"
    for name, buffer in params.named_managed_buffers(module, ignored):
        found[f"buffer '{name}'"] = _layout(buffer)
    found[_ORDER] = json.dumps([name for name, _ in named_params])
    return found


def _layout(tensor: torch.Tensor) -> str:
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        return "uninitialized"
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_nested:
        return f"nested, {dtype}, {tensor.layout}, with {tensor.values().numel()} elements"
    if is_dtensor(tensor):
        local = local_part(tensor)
        placements = tuple(tensor.placements)  # type: ignore[attr-defined]
        return f"DTensor of shape {tuple(tensor.shape)}, {placements}, locally {_layout(local)}"
    has_own_class = is_traceable_wrapper_subclass(tensor) or hides_memory(tensor)
    if tensor.layout is torch.strided and not has_own_class:
        memory = f"strides {tensor.stride()}"
    else:
        layout = f"layout {str(tensor.layout).removeprefix('torch.')}"
        memory = f"class {type(tensor).__name__}" if has_own_class else layout
        with suppress(TypeError):  # the layout hides its memory
            sizes = [tuple(part.shape) for part in parts_of(tensor)]
            memory += f" of tensors of shapes {', '.join(map(str, sizes))}"
    if tensor.is_quantized:
        memory += f", {tensor.qscheme()}"
        if tensor.qscheme() in PER_TENSOR:
            memory += f" by {tensor.q_scale()} from {tensor.q_zero_point()}"
    return f"shape {tuple(tensor.shape)}, {dtype}, {memory}"


def _compare(
    description: Description, group: dist.ProcessGroup, device: torch.device
) -> Exception | None:
    """Returns an error with each difference between ranks, and the values of all ranks.

    Ranks first exchange digests, and introduce themselves to each other's failure detectors. They
    exchange descriptions only if digests differ.

    Returns:
        None: the ranks agree, or each rank has a fault of its own to raise.
    """
    _construction.compared = True
    if is_alone(group):
        return None
    device = device_of_calls(group, device)
    payload = json.dumps(description).encode()
    digest = hashlib.sha256(payload).digest()
    own = digest + health.introduction(group)
    gathered = _all_gather_bytes(own, len(own), device, group)
    if len({each[: len(digest)] for each in gathered}) == 1:
        introductions = [each[len(digest) :] for each in gathered]
        health.meet(introductions, group, lambda host: _all_gather_bytes(host, 8, device, group))
        return None
    sizes = _all_gather_bytes(len(payload).to_bytes(8, "little"), 8, device, group)
    longest = max(int.from_bytes(size, "little") for size in sizes)
    texts = _all_gather_bytes(payload, longest, device, group)
    per_rank: list[Description] = [json.loads(text.rstrip(b"\0")) for text in texts]
    faults = {rank: each[_FAULT] for rank, each in enumerate(per_rank) if _FAULT in each}
    if faults:
        return None if len(faults) == len(per_rank) else _some_ranks_have_faults(faults)
    return _ranks_disagree(_differences(per_rank))


def _differences(per_rank: Sequence[Description]) -> list[str]:
    """A sentence for each difference, in the order of rank 0's description."""
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
    found = _ranks_by_value(dict(enumerate(values)))
    return "; ".join(f"{value} on {_list_ranks(at)}" for value, at in found.items())


def _ranks_by_value(values: Mapping[int, str]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ranks


def _first_out_of_order(orders: Sequence[Sequence[str]]) -> str:
    for place, names in enumerate(zip(*orders, strict=True)):
        if len(set(names)) > 1:
            return f"parameter number {place}: {_by_value([repr(name) for name in names])}"
    return "the digests of the descriptions: different, although the descriptions are equal"


def _all_gather_bytes(
    payload: bytes, size: int, device: torch.device, group: dist.ProcessGroup
) -> list[bytes]:
    """Returns the payloads of all ranks, padded with zero bytes to ``size``."""
    with health.collective_call(group):
        own = torch.frombuffer(bytearray(payload.ljust(size, b"\0")), dtype=torch.uint8)
        gathered = all_gather(own.to(device), group, world_size(group))
        # With NCCL the host waits here, so that this must be within collective_call().
        return [bytes(tensor.cpu().tolist()) for tensor in gathered]


# ---- errors --------------------------------------------------------------------------------------


def _ranks_disagree(differences: Sequence[str]) -> RuntimeError:
    """``differences``: sentences, each with the values of all ranks."""
    lines = [f"  {difference}" for difference in differences[:_MOST_DIFFERENCES]]
    if (more := len(differences) - _MOST_DIFFERENCES) > 0:
        lines.append(f"  and {errors.count(more, 'more difference')}")
    return RuntimeError(
        "DDP expects same model across all ranks. ddpx needs the same module, options and versions "
        "on every rank, but ranks differ:\n"
        + "\n".join(lines)
        + "\nBuild the model in the same way on every rank. Freeze the same parameters before "
        "wrapping."
    )


def _some_ranks_have_faults(faults: Mapping[int, str]) -> Exception:
    """``faults``: the type and the text of an error, by rank. The type is that of the first."""
    kind = next(iter(faults.values())).split(":")[0]
    by_fault = _ranks_by_value(faults)
    text = "\n".join(f"  {_list_ranks(at)}: {fault}" for fault, at in by_fault.items())
    return _KINDS.get(kind, RuntimeError)(
        "construction failed on some of the ranks. All ranks raise this error. The cause:\n" + text
    )


def _list_ranks(ranks: Sequence[int]) -> str:
    """ "rank 1, rank 2". Of more than 8 ranks, the first ranks and the number of ranks."""
    shown = ", ".join(f"rank {rank}" for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown}, … ({len(ranks)} ranks)"
