"""A training as users write it, for torchrun and for plain processes.

One rank ends it in a given way.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join

from ddpx import ReducerDDP
from ddpx.testing.rank_pool import choose_gpu


def _note(what: str) -> None:
    """Prints in one write, since other threads log."""
    os.write(2, f"{what} {time.monotonic()}\n".encode())


def main() -> None:
    fault, victim, transport = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    device = "cuda" if transport == "nccl" else "cpu"
    if device == "cuda":
        choose_gpu(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    if fault == "own hook":  # like a library that prints tracebacks in colors
        sys.excepthook = sys.__excepthook__
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(transport, timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    if fault == "late peers" and rank != victim:
        time.sleep(2)
    if fault in ("early exception", "late peers") and rank == victim:
        time.sleep(0.5)
        _note("FAULT")
        raise ValueError("no such sample")
    if fault == "child" and rank == victim:  # the other ranks wait in their constructions
        child = multiprocessing.get_context("fork").Process(target=[].pop)
        child.start()
        child.join()
        time.sleep(1)
    if fault == "bad option" and rank == victim:
        _note("FAULT")
        ReducerDDP(nn.Linear(64, 64), bucket_cap_mb=float("nan"))
    model = ReducerDDP(nn.Linear(64, 64).to(device))
    if "slow threads" in fault:
        _start_threads_slowly()
    if fault == "finalizer" and rank == victim:
        weakref.finalize(_note, _remove_again)  # at the end of Python
    try:
        with Join([model]) if fault == "kill behind Join" else nullcontext():
            _train(model, fault, victim, device)
    finally:
        if "destroy" in fault:
            dist.destroy_process_group()
    if fault == "finalizer" and rank != victim:
        time.sleep(1)  # the victim ends meanwhile
        model(torch.ones(2, 64))
    if "destroy" not in fault and fault != "finalizer":
        dist.destroy_process_group()
    print(f"rank {rank} done", flush=True)


def _start_threads_slowly() -> None:
    """As on a busy machine: the script ends while a thread starts."""
    start = threading.Thread.start

    def start_late(thread: threading.Thread) -> None:
        time.sleep(0.1)
        start(thread)

    threading.Thread.start = start_late  # type: ignore[method-assign]


def _remove_again() -> None:
    """As the end of a temporary folder that another rank has removed."""
    raise FileNotFoundError("no such folder")


def _train(model: ReducerDDP, fault: str, victim: int, device: str) -> None:
    rank = dist.get_rank()
    for step in range(1_000_000 if fault == "none" else 4):
        if step == 2 and rank == victim:
            _note("FAULT")
            if fault.startswith("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault == "exception":
                raise ValueError("no such sample")
            elif fault == "system exit":
                sys.exit(5)
            elif fault == "leave":
                sys.exit(0)
            elif fault.startswith("exit 0"):
                try:
                    raise ValueError("no such sample")
                except ValueError:
                    os._exit(0)
            elif fault == "interrupt":
                # If a shell starts a job in the background, the job ignores SIGINT.
                signal.signal(signal.SIGINT, signal.default_int_handler)
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
                time.sleep(30)
            elif fault == "own hook":
                raise ValueError("no such sample")
            elif fault == "logged":
                try:
                    raise ValueError("no such sample")
                except ValueError as error:
                    sys.excepthook(type(error), error, error.__traceback__)
                time.sleep(1)  # the other ranks wait meanwhile
            elif fault.startswith("thread"):
                # An exception in another thread of the script is printed, and ends nothing.
                if fault == "thread, one hook":  # as with a library that logs exceptions
                    threading.excepthook = lambda args: sys.excepthook(*args[:3])
                thread = threading.Thread(target=lambda: [][0])
                thread.start()
                thread.join()
                time.sleep(1)
        if fault == "kill behind a call" and step == 2:
            dist.all_reduce(torch.ones(4, device=device))
        if fault == "kill behind Join" and step == 2:
            break  # no more batches
        if fault == "leave early" and step == 2 and rank == victim:
            break
        loss = model(torch.ones(2, 64, device=device)).sum()
        loss.backward()
        if device == "cuda":
            loss.item()  # the host waits for the device


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        _note(f"END {os.environ['RANK']}")
        raise
