"""What ``ddpx parity`` starts as a rank; its settings, as JSON, stand before the script."""

from __future__ import annotations

import json
import os
import sys
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
    """Attributes:
    folder: for the ranks' records, and for ``captured.pt``.
    wrapper: ``module:Class`` of the class in DDP's place. None: DDP itself.
    max_steps: None: all.
    capture_rank, capture_event, capture_names: which tensors to keep; rank -1 for none.
    """

    folder: str
    wrapper: str | None
    max_steps: int | None
    capture_rank: int = -1
    capture_event: int = 0
    capture_names: Sequence[str] = ()

    def to_word(self) -> str:
        return json.dumps(asdict(self))

    def capture(self, rank: int) -> Capture | None:
        if rank != self.capture_rank:
            return None
        return Capture(self.capture_event, list(self.capture_names), Path(self.folder) / CAPTURED)


CAPTURED = "captured.pt"


def main() -> None:
    settings = Settings(**json.loads(sys.argv[1]))
    rank = int(os.environ["RANK"])
    wrapper = None if settings.wrapper is None else find_wrapper(settings.wrapper)
    if wrapper is not None:
        patch_ddp(wrapper)
    bar = step_bar("DDP" if wrapper is None else wrapper.__name__, settings.max_steps)
    recorder = Recorder(settings.max_steps, wrapper, settings.capture(rank), bar)
    recorder.install()
    try:
        Script.from_command(sys.argv[2:]).run()
    finally:
        recorder.finish().write(Path(settings.folder), rank)


if __name__ == "__main__":
    main()
