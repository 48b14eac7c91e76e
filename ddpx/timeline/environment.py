"""Records wrappers into a folder without a call of the script: ``DDPX_TIMELINE=folder``."""

from __future__ import annotations

import hashlib
import logging
import os
import weakref
from collections import Counter
from pathlib import Path

from ddpx.ddp.fronts.front import Front
from ddpx.timeline.analyze.assembly import assemble
from ddpx.timeline.export import trace_file
from ddpx.timeline.record.recorder import Recorder

FOLDER = "DDPX_TIMELINE"
STEPS = "DDPX_TIMELINE_STEPS"

_logger = logging.getLogger("ddpx.timeline")
_num_models: Counter[str] = Counter()  # that this process has recorded, by folder


def record_if_asked(model: Front, agreed: bool) -> None:
    """Records a new front, if ``DDPX_TIMELINE`` names a folder.

    Args:
        model: The front.
        agreed: True if all ranks make this call, with the same environment variables.

    Raises:
        ValueError: ``DDPX_TIMELINE_STEPS`` is not a positive number, or the folder is not
            writable.
    """
    folder = os.environ.get(FOLDER)
    if folder:
        record_into(folder, model, _max_steps(), agreed=agreed)


def record_into(folder: str | Path, model: Front, max_steps: int | None, *, agreed: bool) -> None:
    """Records a wrapper until the wrapper is destroyed or Python ends.

    Each rank then writes a file.

    Args:
        folder: The folder of the files.
        model: The front.
        max_steps: The number of steps to record. None: as ``max_steps`` of
            :func:`ddpx.record`.
        agreed: True if all ranks make this call. Otherwise (``init_sync=False``, copies) no rank
            waits for another rank, and clocks of several machines are not compared.

    Raises:
        ValueError: The folder is not writable.
    """
    folder = str(folder)
    trace_file.check_folder(folder)  # before training, not after
    recorder = Recorder(model._ddpx, max_steps)
    number = _num_models[folder]
    if agreed:
        recorder.start()
    else:
        recorder.start_alone(f"{folder}/{number}/{_digest(model)}")
    path = Path(folder) / trace_file.file_name(recorder.global_rank, number)
    _num_models[folder] += 1
    weakref.finalize(model, _write, recorder, path)


def _digest(model: Front) -> str:
    """A digest of the layout. Ranks whose models differ do not get one recording."""
    layout = [(param.name, *param.tensor.shape) for param in model._ddpx.managed]
    return hashlib.sha256(repr(layout).encode()).hexdigest()


def _max_steps() -> int | None:
    text = os.environ.get(STEPS)
    if not text:
        return None
    if not text.isdigit() or int(text) < 1:
        raise ValueError(
            f"DDPX_TIMELINE_STEPS={text!r} is not a positive number. Set DDPX_TIMELINE_STEPS to "
            "the number of steps to record, or unset the variable."
        )
    return int(text)


def _write(recorder: Recorder, path: Path) -> None:
    recorder.stop(wait=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        trace_file.write(path, assemble([recorder.data]), [recorder.data])
    except OSError as error:  # the training itself has not failed
        _logger.warning("[ddpx] the timeline %s was not written: %s", path, error)
