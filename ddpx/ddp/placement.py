"""The devices of a module, and the meaning of ``device_ids`` for the module."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

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
        raise _mixed_device_types(types)
    if device_ids is not None and not isinstance(device_ids, (list, tuple)):
        raise _bad_device_ids(device_ids)
    first = devices[0] if devices else torch.device("cpu")
    is_multi_device = len(set(devices)) > 1
    if not device_ids:
        if output_device is not None:
            raise _device_ids_without_single_device(
                device_ids, output_device, {str(device) for device in devices}
            )
        return Placement(first, is_multi_device, None, None)
    if is_multi_device or first.type == "cpu":
        raise _device_ids_without_single_device(
            list(device_ids), output_device, {str(device) for device in devices}
        )
    if len(device_ids) > 1:
        raise _several_device_ids(list(device_ids))
    index = _index(device_ids[0])
    return Placement(
        torch.device(first.type, index),
        is_multi_device,
        [index],
        index if output_device is None else _index(output_device),
    )


def _index(device: int | str | torch.device) -> int:
    """The index of a device such as 1 or "cuda:1". Without an index, the current device."""
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


# ---- errors --------------------------------------------------------------------------------------


def _mixed_device_types(device_types: Iterable[str]) -> ValueError:
    return ValueError(
        f"the parameters of the module are on devices of different types: "
        f"{', '.join(sorted(device_types))}. Move all parameters to devices of one type, e.g. "
        "with module.to('cuda')."
    )


def _device_ids_without_single_device(
    device_ids: object, output_device: object, devices: Iterable[str]
) -> ValueError:
    return ValueError(
        f"device_ids and output_device are for modules on one accelerator, but got "
        f"device_ids={device_ids}, output_device={output_device} with parameters on "
        f"{', '.join(sorted(devices))}. For a module on CPU or on several devices, leave both out. "
        "To use several accelerators, start one process per accelerator "
        "(torchrun --nproc-per-node=N) and pass device_ids=[local_rank]."
    )


def _bad_device_ids(device_ids: object) -> TypeError:
    return TypeError(
        f"device_ids must be a list with one device, or None, but got "
        f"{type(device_ids).__name__}. Pass e.g. device_ids=[local_rank]."
    )


def _several_device_ids(device_ids: object) -> ValueError:
    return ValueError(
        f"device_ids={device_ids} names several devices, but a process uses one device. Start one "
        "process per device (torchrun --nproc-per-node=N) and pass device_ids=[local_rank]."
    )
