"""What one rank runs: a plain training loop that prints its events as JSON lines.

| event | fields beside ``at``, the time by time.monotonic() |
| --- | --- |
| ``step`` | ``step``: the number of a finished optimizer step |
| ``log`` | ``what``, ``text``: a record of the logger ``ddpx.health`` |
| ``error`` | ``kind``, ``text``, ``lost``: the exception that ended the loop |
| ``shrunk`` | ``lost``: ddpx.shrink() made a group without these ranks |
| ``refused`` | ``kind``, ``text``, ``unchanged``: ddpx.shrink() raised |
| ``compared`` | ``difference`` from DDP's weights, ``digest`` of the own weights |
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import logging
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpx

STORE_PORT, PROXY_PORT = 29500, 29501
_COMPUTE_STEP = 5
_PACE_S = 0.1  # many ranks share few cores
_SHRINK_S = 5.0
_PR_SET_DUMPABLE = 4


@dataclass(frozen=True)
class Training:
    """The settings of one rank.

    Attributes:
        transport: One of TRANSPORTS in host_cases.py.
        store_host: The address of the host of rank 0, which serves the store.
        through_proxy: Whether the ranks reach the store through a proxy on the same host.
        num_steps: The number of steps, after which the weights are compared with DDP's. None: the
            loop goes on until an error.
        width: The size of a layer. A layer of 1024 has 4 MiB of gradients.
        compute_s: Seconds for which this rank computes in one forward, without releasing the GIL.
        uid: The user of the rank.
        dumpable: False: no other process of this user may open the rank's /proc entries.
        cloned: Whether the host has the boot ID and the PID namespace's number of other hosts.
    """

    rank: int
    world_size: int
    transport: str
    store_host: str
    through_proxy: bool = False
    num_steps: int | None = None
    width: int = 32
    compute_s: float = 0.0
    uid: int = 0
    dumpable: bool = True
    cloned: bool = False


def run(training: Training) -> None:
    """Trains, reports the end of the training, and stays alive, as ranks of a real job may."""
    torch.set_num_threads(1)
    logging.getLogger("ddpx.health").addHandler(_Printed())
    _become(training)
    _store = _join_group(training)  # rank 0 serves the store until its process ends
    if training.num_steps is not None:
        _compare_with_ddp(training, training.num_steps)
    else:
        _Loop(training, _ours(training)).run()
    time.sleep(3600)


def _print(event: str, **fields: Any) -> None:
    line = json.dumps({"event": event, "at": time.monotonic(), **fields})
    os.write(1, f"{line}\n".encode())  # at once: threads may print, and the rank may be killed


class _Printed(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _print("log", what=getattr(record, "event", ""), text=record.getMessage())


# ---- the process ---------------------------------------------------------------------------------


def _become(training: Training) -> None:
    if training.cloned:
        _take_identity_of_clone()
    if training.uid:
        os.setgroups([])
        os.setgid(training.uid)
        os.setuid(training.uid)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_PR_SET_DUMPABLE, int(training.dumpable), 0, 0, 0) == 0


def _take_identity_of_clone() -> None:
    """Mounts, over the files that tell machines apart, files that are equal on all hosts."""
    folder = tempfile.mkdtemp(prefix="ddpx-clone-")
    subprocess.run(["mount", "-t", "tmpfs", "clone", folder], check=True)
    os.symlink("pid:[4026531836]", f"{folder}/pid")
    with open(f"{folder}/boot_id", "w") as file:
        file.write("11111111-2222-3333-4444-555555555555\n")
    pairs = [(folder, f"/proc/{os.getpid()}/ns")]
    pairs.append((f"{folder}/boot_id", "/proc/sys/kernel/random/boot_id"))
    for source, target in pairs:
        subprocess.run(["mount", "--bind", source, target], check=True)
    subprocess.run(["umount", folder], check=True)  # the bind mounts keep the files
    os.rmdir(folder)
    assert os.readlink("/proc/self/ns/pid") == "pid:[4026531836]"


def _join_group(training: Training) -> dist.TCPStore | None:
    """Returns the store that this rank serves."""

    def store(port: int, serves: bool) -> dist.TCPStore:
        return dist.TCPStore(
            training.store_host, port, training.world_size, serves, wait_for_workers=False
        )

    own = store(STORE_PORT, serves=True) if training.rank == 0 else None
    if own is None or training.through_proxy:
        client = store(PROXY_PORT if training.through_proxy else STORE_PORT, serves=False)
    else:
        client = own
    dist.init_process_group(
        training.transport.partition("+")[0],
        store=client,
        rank=training.rank,
        world_size=training.world_size,
    )
    return own


# ---- the training --------------------------------------------------------------------------------


def _ours(training: Training) -> Callable[[nn.Module], nn.Module]:
    choice = "shm" if training.transport == "gloo+shm" else "auto"
    return functools.partial(ddpx.ReducerDDP, transport=choice)


class _Loop:
    def __init__(self, training: Training, wrap: Callable[[nn.Module], nn.Module]) -> None:
        self.training = training
        torch.manual_seed(0)
        width = training.width
        self.model = wrap(nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.data = torch.Generator().manual_seed(1 + training.rank)
        self.step = 0

    def run(self, num_steps: int | None = None) -> None:
        try:
            while self.step != num_steps:
                self._train_step()
                _print("step", step=self.step)
                self.step += 1
                time.sleep(_PACE_S)
        except Exception as error:
            lost = getattr(error, "lost_ranks", getattr(error, "ranks", ()))
            _print("error", kind=type(error).__name__, text=str(error), lost=list(lost))
            self._shrink()

    def _train_step(self) -> None:
        self.optimizer.zero_grad()
        inputs = torch.randn(4, self.training.width, generator=self.data)
        if self.step == _COMPUTE_STEP and self.training.compute_s:
            ctypes.PyDLL(None).usleep(int(self.training.compute_s * 1e6))
        self.model(inputs).square().mean().backward()
        self.optimizer.step()

    def _shrink(self) -> None:
        before = self._state()
        try:
            shrunk = ddpx.shrink(self.model, self.optimizer, step=self.step, timeout_s=_SHRINK_S)
            _print("shrunk", lost=list(shrunk.lost))
        except Exception as error:
            unchanged = self._state() == before
            _print("refused", kind=type(error).__name__, text=str(error), unchanged=unchanged)

    def _state(self) -> tuple[object, ...]:
        """Everything that a refused shrink must leave alone."""
        params = list(self.model.parameters())
        grads = [param.grad for param in params if param.grad is not None]
        groups = (id(dist.group.WORLD), id(self.model.process_group), dist.get_world_size())
        return *groups, _digest(params), _digest(grads)


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.detach().numpy().tobytes())
    return whole.hexdigest()


def _compare_with_ddp(training: Training, num_steps: int) -> None:
    gloo = dist.new_group(backend="gloo")
    wrappers: list[Callable[[nn.Module], nn.Module]] = [
        _ours(training),
        lambda module: DistributedDataParallel(module, process_group=gloo),
    ]
    weights = []
    for wrap in wrappers:
        loop = _Loop(training, wrap)
        loop.run(num_steps)
        weights.append([param.detach() for param in loop.model.parameters()])
    pairs = zip(*weights, strict=True)
    difference = max(float((own - theirs).abs().max()) for own, theirs in pairs)
    _print("compared", difference=difference, digest=_digest(weights[0]))
