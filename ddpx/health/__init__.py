"""Failure reports: errors that name the lost rank, its place and the cause."""

from ddpx.health.failure import LostRank, RankError, RankFailure, RankMismatch, RankStalled
from ddpx.health.peers import RankStatus, find_fronts_by, peer_stack, peer_status
from ddpx.health.stall_timeout import set_stall_timeout
from ddpx.health.watch import (
    begin,
    between_steps,
    collective_call,
    constructing,
    explained,
    failed_between_steps,
    introduction,
    meet,
    publish_fault,
    waiting_for_buffers,
    watch,
)

__all__ = [
    "LostRank",
    "RankError",
    "RankFailure",
    "RankMismatch",
    "RankStalled",
    "RankStatus",
    "begin",
    "between_steps",
    "collective_call",
    "constructing",
    "explained",
    "failed_between_steps",
    "find_fronts_by",
    "introduction",
    "meet",
    "peer_stack",
    "peer_status",
    "publish_fault",
    "set_stall_timeout",
    "waiting_for_buffers",
    "watch",
]
