"""What a training did, as digests: small, however large the model."""

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
    """Attributes:
    kind: "loss", "gradient" or "weight".
    step: synchronised backwards are counted, from 1; a weight's step is the one that it comes from,
        0 for the weights at the start.
    model: wrappers are counted in the order in which they were made, from 0. -1 for a loss.
    values: by name. A loss in digits, a tensor as its digest, None for a missing gradient.
    """

    kind: str
    step: int
    model: int
    values: dict[str, str | None]


@dataclass
class RankRecord:
    """Attributes:
    wrappers: of each model, the class that wrapped it.
    events: in order.
    step_ns: from the end of a synchronised backward to the next's, without the recording itself.
    peak_bytes: the most memory that the process has had.
    device_peak_bytes: the most that its tensors had on a device; 0 without one.
    """

    wrappers: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    step_ns: list[int] = field(default_factory=list)
    peak_bytes: int = 0
    device_peak_bytes: int = 0

    def write(self, folder: Path, rank: int) -> None:
        (folder / f"rank{rank}.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read_all(cls, folder: Path) -> list[RankRecord]:
        """Of all ranks, in order."""
        paths = sorted(folder.glob("rank*.json"), key=lambda path: int(path.stem[4:]))
        records = []
        for path in paths:
            values = json.loads(path.read_text())
            values["events"] = [Event(**event) for event in values["events"]]
            records.append(cls(**values))
        return records


def digest(tensor: torch.Tensor | None) -> str | None:
    """Of every bit, and of dtype, shape and strides. A sparse tensor counts as coalesced."""
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
        flat = tensor.cpu().contiguous().reshape(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
        if flat.numel():
            # Without numpy, and without a copy.
            num_bytes = flat.numel() * flat.element_size()
            state.update((ctypes.c_ubyte * num_bytes).from_address(flat.data_ptr()))
    return state.hexdigest()
