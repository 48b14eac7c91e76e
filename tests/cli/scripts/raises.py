"""Raises an error in a function, in the way that the argument names."""

from __future__ import annotations

import sys
import traceback
from types import TracebackType

from torch.distributed.elastic.multiprocessing.errors import record

how = sys.argv[1]


class LearningError(Exception):
    """The script's own type of error."""


def train() -> None:
    raise LearningError("the loss is 42")


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    files = [frame.filename for frame in traceback.extract_tb(trace)]
    same = traceback.extract_tb(error.__traceback__) == traceback.extract_tb(trace)
    print(f"hook of the script: {kind.__name__}, {error}, same {same}, from {files[0]}")


if how == "its own hook":
    sys.excepthook = show
if how == "recorded":
    train = record(train)
if how == "interrupted":
    raise KeyboardInterrupt
if how == "chained":
    try:
        train()
    except LearningError as cause:
        raise RuntimeError("no success") from cause
train()
