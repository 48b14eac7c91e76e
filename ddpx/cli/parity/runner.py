"""A rank of ``ddpx parity``. The arguments are settings as JSON, and the script."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from ddpx.cli.build import find_wrapper
from ddpx.cli.parity.record import Settings
from ddpx.cli.parity.recorder import Recorder
from ddpx.cli.progress import step_bar
from ddpx.cli.script import Script
from ddpx.integrations.patch import patch_ddp


def main(words: Sequence[str]) -> None:
    """Runs the script and writes the record."""
    settings = Settings(**json.loads(words[0]))
    rank = int(os.environ["RANK"])
    wrapper = None if settings.wrapper is None else find_wrapper(settings.wrapper)
    bar = step_bar("DDP" if wrapper is None else wrapper.__name__, settings.max_steps)
    if wrapper is not None:
        patch_ddp(wrapper)  # changes the name of the class
    recorder = Recorder(settings, rank, wrapper, bar)
    recorder.install()
    try:
        Script.from_command(words[1:]).run()
    finally:
        recorder.finish().write(Path(settings.folder), rank)
