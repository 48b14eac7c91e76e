"""The time to construct a process group, and its open files, by number of ranks.

    python benchmarks/construction.py [--ranks 2 16 48] [--rounds 5]

All ranks are processes of this machine. The time is that of the slowest rank, from the moment when
all ranks are ready; the median over the rounds is printed. CPU time is that of all ranks together,
and depends less on what else runs. Files are counted in excess of those
before the group, on the rank with the most, and on rank 0, which serves the store. The last column
is the time of the first reduce, which ``shm`` runs through gloo.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from tables import table

from ddpx.testing.rank_pool import forking_context

BACKENDS = ("gloo", "shm")
Round = tuple[float, float, int, float]  # seconds: construction, first reduce; files; CPU seconds


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _serve(sender: Connection, rank: int, ranks: int, rounds: int, port: int) -> None:
    import ddpx  # noqa: F401 - registers the backend

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0, timedelta(seconds=200))

    def meet(name: str) -> None:
        if store.add(name, 1) == ranks:
            store.set(f"{name}/all", "yes")
        store.wait([f"{name}/all"])

    measured: dict[str, list[Round]] = {name: [] for name in BACKENDS}
    for index in range(rounds):
        for name in BACKENDS:
            prefix = f"{name}{index}"
            files = _open_files()
            meet(prefix)
            start, cpu_start = time.perf_counter(), time.process_time()
            dist.init_process_group(
                name, store=dist.PrefixStore(prefix, store), rank=rank, world_size=ranks
            )
            constructed, cpu = time.perf_counter(), time.process_time() - cpu_start
            meet(f"{prefix}/constructed")
            files = _open_files() - files
            again = time.perf_counter()
            dist.reduce(torch.ones(10), 0)
            reduced = time.perf_counter()
            measured[name].append((constructed - start, reduced - again, files, cpu))
            meet(f"{prefix}/used")
            dist.destroy_process_group()
    sender.send(measured)
    store.add("end", 1)
    while rank == 0 and store.add("end", 0) < ranks:
        time.sleep(0.01)  # rank 0 serves the store
    os._exit(0)


def measure(ranks: int, rounds: int, port: int) -> list[dict[str, list[Round]]]:
    """The rounds of each rank, by backend."""
    context = forking_context()
    pipes = []
    for rank in range(ranks):
        receiver, sender = context.Pipe(duplex=False)
        arguments = (sender, rank, ranks, rounds, port)
        context.Process(target=_serve, args=arguments, daemon=True).start()
        pipes.append(receiver)
        sender.close()
    return [pipe.recv() for pipe in pipes]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 16, 48])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows = []
    for ranks in options.ranks:
        port = 20_000 + os.getpid() % 10_000 + ranks
        measured = measure(ranks, options.rounds, port)
        for name in BACKENDS:
            per_round = list(zip(*(rank[name] for rank in measured), strict=True))
            times = [max(own[0] for own in each) for each in per_round]
            reduces = [max(own[1] for own in each) for each in per_round]
            cpu = statistics.median(sum(own[3] for own in each) for each in per_round)
            rows.append(
                [
                    str(ranks),
                    name,
                    f"{statistics.median(times):.3f} s",
                    f"{cpu:.3f} s",
                    str(max(own[2] for own in per_round[-1])),
                    str(per_round[-1][0][2]),
                    f"{statistics.median(reduces):.3f} s",
                ]
            )
    head = [
        "ranks",
        "backend",
        "construction",
        "CPU",
        "files of a rank",
        "files of rank 0",
        "first reduce",
    ]
    print(table(head, rows))


if __name__ == "__main__":
    main()
