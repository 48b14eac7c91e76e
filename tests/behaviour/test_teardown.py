"""Repeats: the group is destroyed, then the wrapper is dropped. No rank may hang."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from free_port import free_port
from new_ranks import run_in_new_ranks
from torch import nn

from ddpx import ReducerDDP

ROUNDS = 150


def _wrap_and_destroy() -> None:
    model = ReducerDDP(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    for _ in range(5):
        model(torch.ones(2, 64)).sum().backward()
    dist.destroy_process_group()


def _rounds(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=timedelta(seconds=60))
    for number in range(ROUNDS):
        round_store = dist.PrefixStore(str(number), store)
        dist.init_process_group("gloo", store=round_store, rank=rank, world_size=2)
        _wrap_and_destroy()
    if rank == 0:
        store.wait(["done 1"])  # rank 0 serves the store, so it must wait
    else:
        store.set("done 1", "")


@pytest.mark.timeout(150)
def test_a_wrapper_may_outlive_its_group():
    """The reducer then has the last reference to the group, whose gloo threads may need the GIL."""
    run_in_new_ranks(_rounds, (free_port(),), limit_s=120)
