"""``ddpx info``: facts about a machine for a bug report."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from importlib.metadata import entry_points
from pathlib import Path

import click
import torch
import torch.distributed as dist

from ddpx import _C
from ddpx.build_info import BuildFacts, build_facts
from ddpx.comm import transport
from ddpx.comm.shm import ShmOptions
from ddpx.testing import RankFailed, RankPool
from ddpx.version import __version__, supported_torch

_ENVIRONMENT = re.compile(
    r"(DDPX|TORCH|PYTORCH|NCCL|GLOO|OMP|MKL|KMP|CUDA|HIP|MASTER|PET)_.*"
    r"|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|LD_PRELOAD"
)
_BACKENDS = "torch.distributed.backends"  # the group of entry points of torch 2.14 and newer
_COUNTED = {"nccl", "nccl-legacy", "nccl2"}  # see csrc/health_c10d/group_monitor.cpp
_PROBE_TIMEOUT_S = 60.0
_DRIVER_TIMEOUT_S = 20.0


def gather(probe: bool = True) -> dict[str, dict[str, str]]:
    """Returns sections of facts.

    Args:
        probe: Start two processes, and test whether they share memory.
    """
    shared_memory = _shared_memory() if probe else "not tested"
    return {
        "versions": {
            "ddpx": __version__,
            "torch": torch.__version__,
            "supported torch": supported_torch(),
            "python": f"{platform.python_implementation()} {platform.python_version()}",
            "system": _system(),
            "kernel": f"{platform.release()} {platform.machine()}",
            "C library": " ".join(platform.libc_ver()),
        },
        "build": _build(),
        "machine": {
            "cores": f"{os.cpu_count()} ({len(os.sched_getaffinity(0))} usable by this process)",
            "threads of torch": str(torch.get_num_threads()),
            "devices": _devices(),
            "driver": _driver(),
        },
        "communication": {
            "backends": _backends(),
            "NCCL": _nccl(),
            "counted calls": _counted_calls(),
            "shared memory": shared_memory,
            "buckets over gloo": _transport(shared_memory, several_hosts=False),
            "on several hosts": _transport(shared_memory, several_hosts=True),
        },
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if _ENVIRONMENT.fullmatch(name)
        },
    }


@click.command("info")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@click.option("--probe/--no-probe", default=True, help="Test shared memory with 2 processes.")
def command(as_json: bool, probe: bool) -> None:
    """Prints facts for a bug report: versions, build, devices and communication.

    \b
    Examples:
      ddpx info
      ddpx info --json > info.json
    """
    facts = gather(probe)
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    for title, section in facts.items():
        click.echo(title)
        for name, value in (section or {"(nothing)": ""}).items():
            click.echo(f"  {name:<18} {value}".rstrip())


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.platform()


def _build() -> dict[str, str]:
    facts = build_facts() or BuildFacts("not known", "not known", "not known")
    return {
        "extension": Path(_C.__file__).name,
        "built": facts.date,
        "compiler": facts.compiler,
        "for torch": facts.torch,
        "new C++ ABI": "yes" if torch.compiled_with_cxx11_abi() else "no",
        "torch's compiler": torch.__config__.show().splitlines()[1].strip(" -"),
        "CUDA of torch": torch.version.cuda or "none",
        "HIP of torch": torch.version.hip or "none",
    }


def _devices() -> str:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return "cpu only"
    if accelerator.type == "cuda":
        number = torch.cuda.device_count()
        return ", ".join(torch.cuda.get_device_name(index) for index in range(number))
    return f"{torch.accelerator.device_count()} x {accelerator.type}"


def _driver() -> str:
    """The driver version of NVIDIA devices, from nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DRIVER_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):  # no nvidia-smi, or no device
        return "none"
    return ", ".join(sorted(set(done.stdout.split("\n")) - {""})) or "none"


def _nccl() -> str:
    if torch.version.cuda is None or not dist.is_nccl_available():
        return "none"
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def _counted_calls() -> str:
    """The backends over which ranks compare the numbers of their collective calls."""
    # torch registers some names only when they are used.
    names = {*dist.Backend.backend_list, *(each.name for each in entry_points(group=_BACKENDS))}
    nccl = {name for name in names if name.startswith("nccl")}
    counted = ", ".join(["gloo", "shm", *sorted(nccl & _COUNTED)])
    if nccl <= _COUNTED:
        return f"over {counted}"
    others = ", ".join(sorted(nccl - _COUNTED))
    return f"over {counted}; not over {others}, for lack of a counter in C++"


def _backends() -> str:
    available = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
        "shm": "shm" in dist.Backend.backend_list,
    }
    return ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in available.items())


def _reason_of(cause: Exception) -> str:
    """Returns the last line of a traceback, or the line before the stacks of a crash."""
    lines = str(cause).strip().splitlines()
    died = [line for line in lines if ": died, exit code " in line]
    return (died or lines)[-1]


def _shared_memory() -> str:
    try:
        ShmOptions().chosen_order()  # otherwise the processes raise this error
    except ValueError as error:
        return f"not tested: {error}"
    try:
        with RankPool(2, "shm") as pool:
            hosts = pool.run(_hosts, timeout=_PROBE_TIMEOUT_S)[0]
    except (RankFailed, RuntimeError, OSError) as cause:
        return f"no: {_reason_of(cause)}"
    if len(hosts) > 1:
        return "no: two test processes could not share memory, and used gloo"
    return "yes: two test processes shared memory"


def _transport(shared_memory: str, several_hosts: bool) -> str:
    """The transport of buckets over a gloo group, and the reason."""
    try:
        choice = transport.checked_choice(None)
    except ValueError as error:
        return f"an error: {error}"
    if choice == "group":
        return f"gloo ({transport.VARIABLE}=group)"
    if dist.get_debug_level() is dist.DebugLevel.DETAIL:
        return "an error" if choice == "shm" else "gloo (TORCH_DISTRIBUTED_DEBUG=DETAIL)"
    if choice == "auto" and several_hosts:
        return f"gloo, for DDP's bits ({transport.VARIABLE}=shm: shm within hosts, with other bits)"
    works = shared_memory.partition(":")[0]
    if works == "yes":
        is_gloos = not several_hosts and ShmOptions().chosen_order() is _C.ShmOrder.GLOO
        bits = "gloo's bits" if is_gloos else "other bits than gloo's"
        return f"shm{' within hosts' * several_hosts}, with {bits}"
    if works == "no":
        return "an error" if choice == "shm" else "gloo, because processes share no memory"
    return "not tested"


def _hosts() -> list[list[int]]:
    """Runs on a rank. Returns the groups of ranks that share memory, as the backend found them."""
    total = torch.ones(1000, device="cpu")
    dist.all_reduce(total)
    if total.ne(2).any():
        raise RuntimeError("an all-reduce of ones over two ranks did not return 2")
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    assert isinstance(backend, _C.ShmBackend)
    return backend.hosts
