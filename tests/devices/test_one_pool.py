"""A test process has at most one pool of ranks on CUDA."""

from __future__ import annotations

import pytest
from device_ranks import DeviceRanks, NcclRanks, OnePool


def test_another_kind_of_ranks_ends_the_pool(monkeypatch):
    ended = []
    monkeypatch.setattr(DeviceRanks, "close", lambda ranks: ended.append(ranks))
    with OnePool() as pool:
        gloo = pool.get(2)
        assert pool.get(2) is gloo and ended == []
        nccl = pool.get(NcclRanks(2))
        assert nccl is not gloo and ended == [gloo]
        assert pool.get(NcclRanks(3)) is not nccl and ended == [gloo, nccl]
    assert len(ended) == 3


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_the_start_method_of_ranks(method, monkeypatch):
    monkeypatch.setattr("device_ranks.START_METHOD", method)
    assert DeviceRanks("cuda", 2)._pool.start_method == method
