"""What the backend ``shm`` checks and chooses before ranks connect."""

from __future__ import annotations

import pytest
import torch

from ddpx import _C
from ddpx.comm import shm


@pytest.mark.parametrize(
    ("num_ranks", "text"),
    [
        (2, r"'gloo' on 1 rank \(rank 0\); 'fixed' on 1 rank \(rank 1\)\."),
        (17, r"'gloo' on 9 ranks \(rank 0, .*, 14, …\); 'fixed' on 8 ranks \(rank 1, .*, 15\)\."),
    ],
)
def test_different_orders_are_named(num_ranks: int, text: str) -> None:
    """Odd ranks have the order ``fixed``."""

    def all_reduce(places: torch.Tensor) -> None:
        places[1::2] = 1

    with pytest.raises(RuntimeError, match=text):
        shm.check_same_order(_C.ShmOrder.GLOO, 0, num_ranks, all_reduce)


@pytest.mark.parametrize(("interfaces", "number"), [("lo", 1), ("lo,lo", 2), (",lo,", 1)])
def test_gloo_has_a_device_of_each_interface(
    monkeypatch: pytest.MonkeyPatch, interfaces: str, number: int
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces)
    devices = shm.one_thread_options(shm._DEFAULT_TIMEOUT)._devices
    assert len(devices) == number
