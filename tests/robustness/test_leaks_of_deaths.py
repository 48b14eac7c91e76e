"""Peers that die one after another cause no leak in the surviving rank."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from resource_usage import Usage, assert_no_leak
from torch import nn

import ddpx
from ddpx import ReducerDDP
from ddpx.testing.rank_pool import forking_context

NUM_DEATHS = 200

_CONTEXT = forking_context()


class Net(nn.Module):
    """Dies in its backward if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 4)
        self.dies = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if self.dies:
            hidden.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
        return self.second(hidden)


def _join(rank: int, backend: str, folder: str, number: int) -> tuple[ReducerDDP, torch.optim.SGD]:
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store{number}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=40),
    )
    model = ReducerDDP(Net(), bucket_cap_mb=0.0001)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _step(model: ReducerDDP, optimizer: torch.optim.SGD) -> None:
    optimizer.zero_grad()
    model(torch.ones(3, 8)).square().mean().backward()
    optimizer.step()


def _prepare(path: list[str]) -> None:
    sys.path[:] = path
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # torch's flight recorder keeps the last 2000 collectives. This is no leak.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    torch.set_num_threads(1)


def _be_killed(path: list[str], rank: int, backend: str, folder: str, number: int) -> None:
    _prepare(path)
    model, optimizer = _join(rank, backend, folder, number)
    _step(model, optimizer)
    model.module.dies = True
    _step(model, optimizer)


def _outlive(path: list[str], backend: str, folder: str, to_parent: Connection) -> None:
    _prepare(path)

    def act(number: int) -> None:
        to_parent.send(number)
        model, optimizer = _join(number % 2, backend, folder, number)
        _step(model, optimizer)
        with pytest.raises(ddpx.RankFailure, match=r"died|was killed by SIGKILL"):
            _step(model, optimizer)
        if number % 3 == 0:
            assert ddpx.shrink(model, optimizer, step=1).world_size == 1
            _step(model, optimizer)
        dist.destroy_process_group()
        os.unlink(f"{folder}/store{number}")

    try:
        # torch keeps some texts and keys per group.
        usage = assert_no_leak(
            act,
            warm_up=30,
            times=NUM_DEATHS,
            bytes_per_call=20_000,
            objects_per_call=400,
            settle_s=2.0,
        )
    except BaseException:
        to_parent.send(traceback.format_exc())
    else:
        to_parent.send(usage)


@pytest.mark.full_only
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_peers_that_die(backend: str, tmp_path: Path) -> None:
    """Rank 0 and rank 1 alternate as survivor.

    After every third death the survivor continues alone.
    """
    ours, theirs = _CONTEXT.Pipe()
    folder, path = str(tmp_path), list(sys.path)
    survivor = _CONTEXT.Process(target=_outlive, args=(path, backend, folder, theirs), daemon=True)
    survivor.start()
    theirs.close()
    peers = []
    try:
        while isinstance(said := ours.recv(), int):
            args = (path, 1 - said % 2, backend, folder, said)
            peers.append(_CONTEXT.Process(target=_be_killed, args=args, daemon=True))
            peers[-1].start()
        assert isinstance(said, Usage), said
        print(said)
        for peer in peers:
            peer.join(10)
            assert peer.exitcode == -signal.SIGKILL
    finally:
        for process in (survivor, *peers):
            if process.is_alive():
                process.kill()
            process.join()
