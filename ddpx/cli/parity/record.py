"""The settings that the command passes to the ranks, and the record of each rank."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ddpx.testing.events import Event


@dataclass(frozen=True)
class Settings:
    """The settings of a run.

    Attributes:
        folder: The folder for the records of ranks, and for a stored tensor.
        wrapper: ``module:Class`` of the class that replaces DDP. None: DDP itself.
        max_steps: The number of recorded steps. None: all steps.
        captured_rank: The rank that stores a tensor. None: no rank.
        captured_event: The index of the event of the tensor.
        captured_name: The name of the tensor.
    """

    folder: str
    wrapper: str | None
    max_steps: int | None
    captured_rank: int | None = None
    captured_event: int = 0
    captured_name: str = ""

    @property
    def captured(self) -> Path:
        """The file of the stored tensor."""
        return Path(self.folder, "captured.pt")

    def to_word(self) -> str:
        """The settings as an argument of the command line."""
        return json.dumps(asdict(self))


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
