"""Files of timelines: Chrome trace events for viewers, and beside them all that was recorded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ddpx import errors
from ddpx.timeline.chrome import to_events
from ddpx.timeline.model import Recording
from ddpx.timeline.raw import RankData

_VERSION = 1


def write(path: str | Path, recording: Recording, ranks: Sequence[RankData]) -> None:
    """Args:
    recording: what is shown by viewers.
    ranks: what ``read`` gives again.
    """
    contents = {
        "traceEvents": to_events(recording),
        "displayTimeUnit": "ms",
        "ddpx": {"version": _VERSION, "ranks": [data.to_json() for data in ranks]},
    }
    Path(path).write_text(json.dumps(contents))


def read(path: str | Path) -> list[RankData]:
    """Of a file, or of all files in a folder, which are then of one rank each.

    Raises:
        ValueError: it is no timeline, or the ranks' files do not belong together.
    """
    path = Path(path)
    files = sorted(path.glob("rank*.json")) if path.is_dir() else [path]
    if not files:
        raise errors.not_a_timeline(path, "there is no rank*.json in it")
    ranks = [data for file in files for data in _read_file(file)]
    ranks.sort(key=lambda data: data.rank)
    if len({data.rank for data in ranks}) < len(ranks) or len({data.name for data in ranks}) > 1:
        raise errors.not_a_timeline(
            path, "its files are of several jobs or process groups; use a folder for each"
        )
    return ranks


def _read_file(path: Path) -> list[RankData]:
    try:
        contents = json.loads(path.read_text())
        stored = contents["ddpx"]
        if stored["version"] != _VERSION:
            raise errors.not_a_timeline(path, f"version {stored['version']}, not {_VERSION}")
        return [RankData.from_json(values) for values in stored["ranks"]]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as cause:
        raise errors.not_a_timeline(path, f"{type(cause).__name__}: {cause}") from cause
