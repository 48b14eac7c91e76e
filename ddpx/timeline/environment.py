"""Timelines into a folder, of wrappers that somebody else makes; ``DDPX_TIMELINE=folder``."""

from __future__ import annotations

import hashlib
import os
import weakref
from collections import Counter
from pathlib import Path

from ddpx.ddp.module import ReducerDDP
from ddpx.timeline.analyze.assembly import assemble
from ddpx.timeline.export import trace_file
from ddpx.timeline.record.recorder import Recorder

FOLDER = "DDPX_TIMELINE"
STEPS = "DDPX_TIMELINE_STEPS"

_num_models: Counter[str] = Counter()  # of this process, by folder


def record_if_asked(model: ReducerDDP, agreed: bool) -> None:
    """To be called with a new wrapper: ``record_into()`` if ``DDPX_TIMELINE`` names a folder.

    Args:
        agreed: all ranks make this call, and it is known that the variables are the same on all.

    Raises:
        ValueError: ``DDPX_TIMELINE_STEPS`` is not a positive number.
    """
    folder = os.environ.get(FOLDER)
    if folder:
        record_into(folder, model, _max_steps(), agreed=agreed)


def record_into(
    folder: str | Path, model: ReducerDDP, max_steps: int | None, *, agreed: bool
) -> None:
    """Records a wrapper. Each rank writes its own file when the wrapper is destroyed, at the latest
    when Python ends.

    Args:
        max_steps: None: all.
        agreed: all ranks make this call. Otherwise (``init_sync=False``, copies) no rank waits for
            another one; clocks of several machines are then not compared.
    """
    folder = str(folder)
    recorder = Recorder(model, max_steps)
    number = _num_models[folder]
    if agreed:
        recorder.start()
    else:
        recorder.start_alone(f"{folder}/{number}/{_digest(model)}")
    path = Path(folder) / trace_file.file_name(recorder.global_rank, number)
    _num_models[folder] += 1
    weakref.finalize(model, _write, recorder, path)


def _digest(model: ReducerDDP) -> str:
    """Tells models apart: ranks that make others, or in another order, are not put together."""
    layout = [(param.name, *param.tensor.shape) for param in model._averaging.managed]
    return hashlib.sha256(repr(layout).encode()).hexdigest()


def _max_steps() -> int | None:
    text = os.environ.get(STEPS)
    if not text:
        return None
    if not text.isdigit() or int(text) < 1:
        raise _bad_timeline_steps(text)
    return int(text)


def _write(recorder: Recorder, path: Path) -> None:
    recorder.stop(wait=False)
    data = recorder.data()
    path.parent.mkdir(parents=True, exist_ok=True)
    trace_file.write(path, assemble([data]), [data])


# ---- errors --------------------------------------------------------------------------------------


def _bad_timeline_steps(text: str) -> ValueError:
    return ValueError(
        f"DDPX_TIMELINE_STEPS={text!r} is not a positive number. Set DDPX_TIMELINE_STEPS to the "
        "number of steps to record, or unset the variable."
    )
