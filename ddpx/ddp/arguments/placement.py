"""The devices of a module, and the meaning of ``device_ids`` for the module."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index as index_of
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Placement:
    """The devices of a module.

    Attributes:
        device: The device of the first parameter.
        is_multi_device: Whether parameters are on several devices.
        device_ids: A list with the device to which forward moves inputs. None: inputs stay.
        output_device: The index of the device of outputs, or None.
    """

    device: torch.device
    is_multi_device: bool
    device_ids: list[int] | None
    output_device: int | None


def place(
    module: nn.Module,
    ignored: Collection[str],
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> Placement:
    """Returns the placement of ``module``.

    Raises:
        TypeError: ``device_ids`` is not a list.
        ValueError: Parameters are on devices of several types; or ``device_ids`` has several
            entries; or ``device_ids`` is given, but the module is not on exactly one accelerator.
    """
    devices = [p.device for name, p in module.named_parameters() if name not in ignored]
    types = {device.type for device in devices}
    if len(types) > 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, but input "
            f"module parameters locate in {', '.join(sorted(types))}. Move all parameters to "
            "devices of one type, such as with module.to('cuda')."
        )
    if device_ids is not None and (
        isinstance(device_ids, (str, bytes, Mapping)) or not isinstance(device_ids, Iterable)
    ):
        raise TypeError(
            "device_ids must be a list with one device, or None, but got "
            f"{type(device_ids).__name__}. Pass e.g. device_ids=[local_rank]."
        )
    if not _may_be_device(output_device):
        raise TypeError(
            f"output_device must be a device or None, but got {type(output_device).__name__}. "
            "Leave output_device out."
        )
    ids = [] if device_ids is None else list(device_ids)
    first = devices[0] if devices else torch.device("cpu")
    is_multi_device = len(set(devices)) > 1
    if len(ids) > 1:
        raise ValueError(
            f"device_ids can only be None or contain a single element. device_ids is {ids}. Start "
            "one process per device (torchrun --nproc-per-node=N) and pass device_ids=[local_rank]."
        )
    if not ids or is_multi_device or first.type == "cpu":
        if ids or output_device:  # as in DDP, 0 is no device here
            raise ValueError(
                "DistributedDataParallel device_ids and output_device arguments only work with "
                "single-device/multiple-device GPU modules or CPU modules, but got device_ids "
                f"{device_ids}, output_device {output_device}, and module parameters on "
                f"{', '.join(sorted({str(device) for device in devices}))}. For a module on CPU or "
                "on several devices, leave both out. To use several accelerators, start one "
                "process per accelerator (torchrun --nproc-per-node=N) and pass "
                "device_ids=[local_rank]."
            )
        return Placement(first, is_multi_device, None, None)
    index = _index(ids[0])
    return Placement(
        torch.device(first.type, index),
        is_multi_device,
        [index],
        index if output_device is None else _index(output_device),
    )


def _may_be_device(device: object) -> bool:
    """Whether ``device`` is None, a number, a text or a torch.device."""
    if device is None or isinstance(device, (str, torch.device)):
        return True
    try:
        index_of(device)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True


def _index(device: Any) -> int:
    """The index of a device such as 1 or "cuda:1". Without an index, the current device."""
    if hasattr(type(device), "__index__"):
        return index_of(device)
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index
