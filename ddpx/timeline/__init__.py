"""Timelines: recordings of the steps of a model, and their evaluation."""

from ddpx.timeline.timeline import Timeline, record

__all__ = ["Timeline", "record"]
