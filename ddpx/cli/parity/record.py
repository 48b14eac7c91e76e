"""The record of a training, with digests instead of tensors."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Event:
    """Losses, gradients or weights of one step.

    Attributes:
        kind: "loss", "gradient" or "weight".
        step: The number of the synchronized backward, from 1. The step of weights is the step that
            made them, and 0 at the start.
        model: The number of the wrapper, from 0, in the order of construction. -1 for a loss.
        values: Losses as decimal text and tensors as digests, by name. None for a missing gradient.
    """

    kind: str
    step: int
    model: int
    values: dict[str, str | None]


@dataclass
class RankRecord:
    """The record of one rank.

    Attributes:
        wrappers: The class of the wrapper of each model.
        events: The events, in order.
        step_ns: The times between the ends of synchronized backwards, without the time of the
            recording.
        peak_bytes: The peak memory of the process.
        device_peak_bytes: The peak memory of tensors on the device. 0 without a device.
    """

    wrappers: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    step_ns: list[int] = field(default_factory=list)
    peak_bytes: int = 0
    device_peak_bytes: int = 0

    def write(self, folder: Path, rank: int) -> None:
        """Writes the record into a folder."""
        (folder / f"rank{rank}.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read_all(cls, folder: Path) -> list[RankRecord]:
        """Reads the records of all ranks, in order."""
        paths = sorted(folder.glob("rank*.json"), key=lambda path: int(path.stem[4:]))
        records = []
        for path in paths:
            values = json.loads(path.read_text())
            values["events"] = [Event(**event) for event in values["events"]]
            records.append(cls(**values))
        return records


def digest(tensor: torch.Tensor | None) -> str | None:
    """The digest of every bit, and of dtype, shape and strides. A sparse tensor is coalesced."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        return _digest([tensor.indices(), tensor.values()], f"sparse {tuple(tensor.shape)}")
    return _digest([tensor], "")


def _digest(tensors: Sequence[torch.Tensor], header: str) -> str:
    state = hashlib.blake2b(header.encode(), digest_size=_DIGEST_BYTES)
    for tensor in tensors:
        state.update(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}".encode())
        flat = tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat).reshape(-1)
        if flat.numel():
            # Needs neither numpy nor a copy.
            num_bytes = flat.numel() * flat.element_size()
            state.update((ctypes.c_ubyte * num_bytes).from_address(flat.data_ptr()))
    return state.hexdigest()
