"""A rank of ``ddpx parity``. The arguments are settings as JSON, and the script."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ddpx.cli.build import find_wrapper
from ddpx.cli.parity.recorder import Capture, Recorder
from ddpx.cli.progress import step_bar
from ddpx.cli.script import Script
from ddpx.integrations.patch import patch_ddp


@dataclass(frozen=True)
class Settings:
    """The settings of a run.

    Attributes:
        folder: The folder for the records of ranks, and for ``captured.pt``.
        wrapper: ``module:Class`` of the class that replaces DDP. None: DDP itself.
        max_steps: The number of recorded steps. None: all steps.
        capture_rank: The rank that stores tensors. -1: no rank.
        capture_event: The index of the event whose tensors are stored.
        capture_names: The names of the stored tensors.
    """

    folder: str
    wrapper: str | None
    max_steps: int | None
    capture_rank: int = -1
    capture_event: int = 0
    capture_names: Sequence[str] = ()

    def to_word(self) -> str:
        """The settings as an argument of the command line."""
        return json.dumps(asdict(self))

    def capture(self, rank: int) -> Capture | None:
        """The tensors that ``rank`` stores. None if it stores no tensors."""
        if rank != self.capture_rank:
            return None
        return Capture(self.capture_event, list(self.capture_names), Path(self.folder) / CAPTURED)


CAPTURED = "captured.pt"


def main(words: Sequence[str]) -> None:
    """Runs the script and writes the record."""
    settings = Settings(**json.loads(words[0]))
    rank = int(os.environ["RANK"])
    wrapper = None if settings.wrapper is None else find_wrapper(settings.wrapper)
    if wrapper is not None:
        patch_ddp(wrapper)
    bar = step_bar("DDP" if wrapper is None else wrapper.__name__, settings.max_steps)
    recorder = Recorder(settings.max_steps, wrapper, settings.capture(rank), bar)
    recorder.install()
    try:
        Script.from_command(words[1:]).run()
    finally:
        recorder.finish().write(Path(settings.folder), rank)
