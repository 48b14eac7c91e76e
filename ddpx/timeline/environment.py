"""``DDPX_TIMELINE=dir``: records every ReducerDDP of a script that cannot be edited."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from ddpx import errors
from ddpx.timeline import trace
from ddpx.timeline.assembly import assemble
from ddpx.timeline.recorder import Recorder

if TYPE_CHECKING:
    from ddpx.module import ReducerDDP

FOLDER = "DDPX_TIMELINE"
STEPS = "DDPX_TIMELINE_STEPS"

_num_models: Counter[str] = Counter()  # of this process, by folder


def record_if_asked(model: ReducerDDP) -> None:
    """To be called with a new wrapper, on every rank. The file is written when the wrapper goes,
    at the latest when Python ends, by each rank for itself.

    Raises:
        ValueError: ``DDPX_TIMELINE_STEPS`` is not a positive number.
    """
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    recorder = Recorder(model, _max_steps())
    recorder.start()
    path = Path(folder) / _file_name(recorder.global_rank, _num_models[folder])
    _num_models[folder] += 1
    weakref.finalize(model, _write, recorder, path)


def _max_steps() -> int | None:
    text = os.environ.get(STEPS)
    if not text:
        return None
    if not text.isdigit() or int(text) < 1:
        raise errors.bad_timeline_steps(text)
    return int(text)


def _file_name(rank: int, model_number: int) -> str:
    model = f"model{model_number}-" if model_number else ""
    return f"{model}rank{rank}.json"


def _write(recorder: Recorder, path: Path) -> None:
    recorder.stop(wait=False)
    data = recorder.data()
    path.parent.mkdir(parents=True, exist_ok=True)
    trace.write(path, assemble([data]), [data])
