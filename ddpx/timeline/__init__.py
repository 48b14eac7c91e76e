"""Timelines: a recording of the steps of a model, and its evaluation."""

from ddpx.timeline.timeline import Timeline, record

__all__ = ["Timeline", "record"]
