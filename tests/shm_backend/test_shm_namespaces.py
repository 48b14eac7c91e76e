"""Two network namespaces as two hosts: ranks detect which peers share memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

# names of the namespaces and of their interfaces
NAMES = [f"ddpx{os.getpid() % 100_000}{side}" for side in "ab"]
ADDRESSES = ["10.231.7.1", "10.231.7.2"]
PORT = 29_631


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two network namespaces, connected by a pair of virtual interfaces."""
    try:
        for name in NAMES:
            _ip("netns", "add", name)
        _ip("link", "add", NAMES[0], "type", "veth", "peer", "name", NAMES[1])
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            _ip("link", "set", name, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            _ip("-n", name, "link", "set", name, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield NAMES
    except FileNotFoundError:
        pytest.skip("there is no `ip` program; apt install iproute2")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.mark.parametrize("layout", [[0, 0, 1, 1], [0, 1, 0]])
def test_ranks_in_two_namespaces(namespaces, layout):
    processes = []
    for rank, side in enumerate(layout):
        environment = {
            **os.environ,
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": str(PORT + len(layout)),
            "GLOO_SOCKET_IFNAME": namespaces[side],
            "RANK": str(rank),
            "WORLD_SIZE": str(len(layout)),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]),
        }
        command = ["ip", "netns", "exec", namespaces[side], sys.executable, __file__]
        processes.append(
            subprocess.Popen(
                [*command, repr(layout)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=90)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0, f"rank {rank}:\n{output}"


def _main(layout: list[int]) -> None:
    """Runs one rank."""
    import ddpx  # noqa: F401 - registers the backend

    dist.init_process_group("shm", timeout=timedelta(seconds=60))
    group = dist.group.WORLD
    assert group is not None
    hosts = group._get_backend(torch.device("cpu")).hosts
    assert hosts == [[r for r, other in enumerate(layout) if other == side] for side in (0, 1)]
    for size in (10, 100_000):
        tensors = [torch.full((size,), float(dist.get_rank() + i)) for i in range(3)]
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()
        world = dist.get_world_size()
        for i, tensor in enumerate(tensors):
            assert (tensor == sum(range(world)) + world * i).all()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main([int(side) for side in sys.argv[1].strip("[]").split(",")])
