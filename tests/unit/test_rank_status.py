"""What ``repr()`` says about a rank."""

from __future__ import annotations

from ddpx.health import RankStatus


def test_live_rank() -> None:
    status = RankStatus(1, "vm", 12, True, "step 2, phase backward", 0.4123)
    assert repr(status) == "<RankStatus: rank 1 on vm, pid 12, step 2, phase backward for 0.4 s>"


def test_this_rank() -> None:
    status = RankStatus(0, "vm", 11, True, "step 2, phase forward", 0.1, is_this_rank=True)
    assert repr(status).startswith("<RankStatus: rank 0 (this rank) on vm, pid 11, ")


def test_dead_rank() -> None:
    status = RankStatus(1, "vm", 12, False, None, None)
    assert repr(status) == "<RankStatus: rank 1 on vm, pid 12, has ended>"
