"""Failure reports: errors that name the lost rank, its place and the cause."""

from ddpx.health.failure import Casualty, RankFailure, RankMismatch, RankStalled
from ddpx.health.look import RankStatus, ranks, stack_of
from ddpx.health.patience import set_patience
from ddpx.health.watch import begin, collective_call, constructing, wait, waiting_for_buffers, watch

__all__ = [
    "Casualty",
    "RankFailure",
    "RankMismatch",
    "RankStalled",
    "RankStatus",
    "begin",
    "collective_call",
    "constructing",
    "ranks",
    "set_patience",
    "stack_of",
    "wait",
    "waiting_for_buffers",
    "watch",
]
