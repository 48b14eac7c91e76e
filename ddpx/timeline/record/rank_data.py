"""What one rank recorded, as it is gathered from the ranks and stored in files."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ddpx.timeline.record.clocks import Reading


@dataclass(frozen=True)
class RawPlan:
    """Attributes:
    first_step: that it holds for.
    buckets: of each, its params and its bytes.
    """

    first_step: int
    buckets: tuple[tuple[tuple[int, ...], int], ...]


@dataclass(frozen=True, eq=False)  # a comparison of tensors is no bool
class RankData:
    """Attributes:
    name: of the recording, the same on all ranks.
    rank, world_size: in the process group.
    host: its name.
    backend, device: of the process group; of the module.
    param_names, param_bytes: of those that take part; bytes are 0 if the gradient is sparse.
    readings: of the clock; one or two.
    device_error_ns: how far a device's times may be off the host's.
    num_lost: events that the ring had no room for.
    plans: in order.
    events: rows of time in ns on this rank's clock, step, kind, index; as ``_C.Recording``.
    param_kinds: of each param's gradient, what a bucket cannot mix: dtype, device, whether it is
        delayed. Empty in files of older versions.
    clock: by which ranks of one clock are known, if this rank's was not read against rank 0's.
    """

    name: str
    rank: int
    world_size: int
    host: str
    backend: str
    device: str
    param_names: tuple[str, ...]
    param_bytes: tuple[int, ...]
    readings: tuple[Reading, ...]
    device_error_ns: int
    num_lost: int
    plans: tuple[RawPlan, ...]
    events: torch.Tensor
    param_kinds: tuple[str, ...] = ()
    clock: str = ""

    def to_json(self) -> dict[str, Any]:
        rest = asdict(replace(self, events=torch.empty(0)))
        return {**rest, "events": self.events.tolist()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RankData:
        """Raises KeyError, TypeError, ValueError or RuntimeError if ``to_json`` did not give it."""
        values = dict(values)
        for key in ("param_names", "param_bytes"):
            values[key] = tuple(values[key])
        values["param_kinds"] = tuple(values.get("param_kinds", ()))
        values["events"] = torch.tensor(values["events"], dtype=torch.int64).view(-1, 4)
        values["readings"] = tuple(Reading(**reading) for reading in values["readings"])
        values["plans"] = tuple(
            RawPlan(
                plan["first_step"],
                tuple((tuple(params), num_bytes) for params, num_bytes in plan["buckets"]),
            )
            for plan in values["plans"]
        )
        return cls(**values)
