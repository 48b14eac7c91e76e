"""Measures the memory of a rank after backward, and at its peak, in multiples of the gradients'
bytes.

Each contender has processes of its own, so that no contender reuses memory of another. malloc
returns each gradient to the system when it is freed. Otherwise it keeps some of them, and how many
depends on what lies between them on the heap, not on the wrapper.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import re
import statistics
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import contenders
import torch
import torch.distributed as dist
from contenders import DDP_CAN_BE_LAZY, LAZY, VIEWS, Wrap
from goals import Goal
from models import WIDE, build
from plan import Plan
from pooling import figure
from tables import Results, table, with_range
from torch import nn

from ddpx.testing import RankPool

NAME = "memory"
TITLE = "Memory"

_RANKS = 2
_NUM_STEPS = 6
_TIMEOUT_S = 120.0
# glibc's malloc gives allocations from this size on a mapping of their own. Its own threshold rises
# to 32 MiB when such an allocation is freed. It cannot fit a gradient into the place of a freed
# gradient of the same size, because of the alignment that torch asks for.
_RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
# The goal is 1.0, in the precision in which it is stated. Not all resident memory is gradients.
_LIMIT = 1.05
# The wrappers rebuild their buckets before the second step.
WHEN = {"first step": slice(0, 1), "second step": slice(1, 2), "later steps": slice(2, None)}
FIGURES = ("after", "peak", "after, RSS", "peak, RSS", "arena")
Snapshot = dict[str, float]  # multiples of the gradients' bytes, by figure


def _wraps() -> dict[str, Wrap]:
    lazy_ddp = {"DDP, lazy": contenders.ddp(**LAZY)} if DDP_CAN_BE_LAZY else {}
    return {
        "bare": contenders.bare(),
        "DDP, default": contenders.ddp(),
        "DDP, views": contenders.ddp(**VIEWS),
        **lazy_ddp,
        "DDP over shm, views": contenders.ddp_over_shm(**VIEWS),
        "ddpx over gloo, default": contenders.ours_over_gloo(),
        "ddpx over gloo, views": contenders.ours_over_gloo(**VIEWS),
        "ddpx over shm, default": contenders.ours_over_shm(),
        "ddpx over shm, views": contenders.ours_over_shm(**VIEWS),
        "ddpx over gloo, lazy": contenders.ours_over_gloo(**LAZY),
        "ddpx over shm, lazy": contenders.ours_over_shm(**LAZY),
    }


def _status_bytes(file: str, field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB", Path(f"/proc/self/{file}").read_text(), re.M)
    assert match is not None, f"/proc/self/{file} has no {field}"
    return 1024 * int(match[1])


def _own_bytes() -> int:
    """The proportional set size: a page that n processes map counts 1/n. Files do not count."""
    return sum(_status_bytes("smaps_rollup", field) for field in ("Pss_Anon", "Pss_Shmem"))


def _peak_of(run: Callable[[], None]) -> int:
    """The largest `_own_bytes()` of many samples while ``run`` runs."""
    largest = _own_bytes()
    ended = threading.Event()

    def sample() -> None:
        nonlocal largest
        while not ended.is_set():
            largest = max(largest, _own_bytes())

    sampler = threading.Thread(target=sample)
    sampler.start()
    run()
    ended.set()
    sampler.join()
    return largest


def _return_free_memory() -> None:
    """Makes malloc return the memory of freed temporaries, which no gradient uses."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _warm_up(wrap: Wrap) -> None:
    """Makes what the first step of any model makes: connections, threads, code."""
    model = wrap(nn.Linear(64, 64))
    for _ in range(3):
        contenders.step(model, torch.randn(8, 64))


def _snapshot(base: dict[str, int], peak: int, unit: int) -> Snapshot:
    group: Any = contenders.shm_group()._get_backend(torch.device("cpu"))
    with_free = {
        "after, RSS": _status_bytes("status", "VmRSS") - base["rss"],
        "peak, RSS": _status_bytes("status", "VmHWM") - base["rss"],
    }
    _return_free_memory()
    # peers' mappings of a page change its share, so all ranks measure at the same moment
    dist.barrier()
    after = {
        "after": _own_bytes() - base["own"],
        "peak": peak - base["own"],
        **with_free,
        "arena": group.resident_bytes,
    }
    dist.barrier()
    return {name: value / unit for name, value in after.items()}


def take_snapshots(name: str, tiny: bool) -> list[Snapshot]:
    """Runs on every rank. Returns one record for each step."""
    wrap = _wraps()[name]
    _warm_up(wrap)
    module, x = build(WIDE, tiny)
    unit = sum(param.numel() * param.element_size() for param in module.parameters())
    with torch.no_grad():
        module(x)  # allocates the module's own scratch memory
    gc.collect()
    _return_free_memory()
    dist.barrier()
    base = {"own": _own_bytes(), "rss": _status_bytes("status", "VmRSS")}
    model = wrap(module)
    snapshots = []
    for _ in range(_NUM_STEPS):
        _forget_peak()
        peak = _peak_of(functools.partial(contenders.step, model, x))
        snapshots.append(_snapshot(base, peak, unit))
    return snapshots


def measure(plan: Plan) -> Results:
    rows = {}
    for name in _wraps():
        launches = []
        for _ in range(plan.launches):
            with (
                patch.dict(os.environ, _RETURN_FREED_MEMORY),
                RankPool(_RANKS, start_method=plan.start_method) as pool,
            ):
                launches.append(pool.run(take_snapshots, name, plan.tiny, timeout=_TIMEOUT_S))
        rows[name] = {
            when: {
                what: figure(
                    [[_of_steps(rank[steps], what) for rank in launch] for launch in launches]
                )
                for what in FIGURES
            }
            for when, steps in WHEN.items()
        }
    return {"rows": rows, "ranks": _RANKS, "model": WIDE}


def _of_steps(snapshots: list[Snapshot], what: str) -> float:
    return statistics.median(snapshot[what] for snapshot in snapshots)


def goals(results: Results) -> list[Goal]:
    rows = results["rows"]
    found = []
    for name in rows:
        transport, _, mode = name.partition(", ")
        if not transport.startswith("ddpx"):
            continue
        for when in WHEN:
            if mode == "lazy" and transport != "ddpx over gloo":
                continue  # the table shows what the segments cost
            # A DDP without this mode needs at least the memory of its default mode.
            mine, ddp = rows[name][when], rows.get(f"DDP, {mode}", rows["DDP, default"])[when]
            if mode == "views":
                after = mine["after"]["median"] / rows["bare"][when]["after"]["median"]
                what = f"memory after backward / bare module's gradients, {name}, {when}"
                found.append(Goal(what, after, _LIMIT))
            # Lazy buckets reach their peak for a moment, which samples may miss.
            figure_of_peak = "peak, RSS" if mode == "lazy" else "peak"
            peak = mine[figure_of_peak]["median"] / ddp[figure_of_peak]["median"]
            what = f"peak of memory / that of DDP over gloo, {name}, {when}"
            found.append(Goal(what, peak, _LIMIT))
    return found


def summary(results: Results) -> str:
    """The summary for README.md."""
    peaks = []
    for name in ("DDP, views", "ddpx over gloo, views", "ddpx over shm, views"):
        first, *_, later = (results["rows"][name][when]["peak"]["median"] for when in WHEN)
        peaks.append(f"{name} {later:.2f} ({first:.2f} in the first step)")
    return (
        "Peak memory within a step (proportional set size), beyond the bare module without "
        f"gradients, as a multiple of the gradients' bytes ({results['model']}, "
        f"{results['ranks']} ranks): {'; '.join(peaks)}."
    )


def section(results: Results) -> str:
    text = [
        f"{results['model']}, {results['ranks']} ranks, each contender in separate processes. "
        "Figures are the memory of a rank beyond the bare module without gradients, as multiples "
        "of the bytes of its gradients.",
        "- `after`: the proportional set size after backward, without files. A page that two ranks "
        "map counts half for each rank.\n"
        "- `peak`: the largest of many samples of the same within the step. malloc returns each "
        "freed gradient at once (`MALLOC_MMAP_THRESHOLD_=1048576`). With its default settings it "
        "keeps some of them, which depends on the layout of the heap.\n"
        "- `after, RSS`: the resident set size. Shared pages count in full, and over shm a rank "
        "also maps the buckets of its peers.\n"
        "- `peak, RSS`: the same, at its maximum within the step (`VmHWM`).\n"
        "- `arena`: the memory of buckets, as the shm backend reports it, after the step.\n"
        "- `lazy`: `lazy_bucket_allocation=True` without views. DDP has this argument since torch "
        "2.15. Over shm, a bucket of 1 MiB or more is a segment of its own. A step then makes a "
        "segment for each such bucket, which all ranks of the host map, and returns its memory at "
        "the end. The shm backend keeps one empty segment of 4 MiB for small buckets.",
        "Verdicts compare `after` with the figure of the bare module, which is not exactly 1, and "
        "`peak` with the figure of DDP over gloo in the same mode. For `lazy` they compare `peak, "
        "RSS` over gloo, which misses no moment. The goals of 1.0 have the "
        "precision of their digits.",
    ]
    rows = [
        [name, when, *(with_range(figures[what]) for what in FIGURES)]
        for name, by_step in results["rows"].items()
        for when, figures in by_step.items()
    ]
    text.append(table(["contender", "", *FIGURES], rows))
    return "\n\n".join(text)
