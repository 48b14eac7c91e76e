"""A recording as Chrome trace events."""

from __future__ import annotations

from typing import Any

from ddpx.timeline.model import Recording


def to_events(recording: Recording) -> list[dict[str, Any]]:
    return []
