"""A look into the steps of a model: what to record, and what to make of it."""

from ddpx.timeline.timeline import Timeline, record

__all__ = ["Timeline", "record"]
