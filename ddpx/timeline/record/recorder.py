"""Records the events of the reducer on one rank, and gathers them from all ranks."""

from __future__ import annotations

import os
import socket
import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from ddpx import _C, health
from ddpx.comm.collectives import all_gather_json, all_gather_rows
from ddpx.comm.process_group import rank_of_job
from ddpx.ddp.replica.replica import Replica
from ddpx.ddp.search.wrapper_search import gradients_of, report_of
from ddpx.params.dtensors import local_part
from ddpx.timeline.record.clocks import (
    Reading,
    clock_identity,
    name_by_store,
    name_recording,
    read_clocks,
)
from ddpx.timeline.record.core_wait import CoreWait
from ddpx.timeline.record.rank_data import RankData, RawPlan

# The largest capacity of a ring buffer in events of 32 bytes. Two steps always have room.
_MOST_EVENTS = 1 << 20
_STEPS_KEPT = 50
# The fields of RankData that differ between ranks, besides clock readings and events.
_OF_EACH_RANK = (
    *("rank", "host", "device", "device_error_ns", "num_lost"),
    *("cores", "num_threads", "core_wait"),
)


class Recorder:
    """Records the events of one model's reducer, from ``start`` to ``stop``.

    Args:
        replica: The object of the model's wrapper.
        max_steps: The number of steps to record. None: the last steps that the ring buffer holds.

    Attributes:
        global_rank: This rank in the job.
        data: The data of this rank, after :meth:`stop`.
    """

    data: RankData

    def __init__(self, replica: Replica, max_steps: int | None) -> None:
        params = replica.managed
        self._replica = weakref.ref(replica)
        self._group = replica.group
        self._device = replica.device
        # Stored, because the file may be written after the group was destroyed.
        self.global_rank = rank_of_job(self._group)
        self._sent_bytes = tuple(
            0 if gradient.alone else gradient.num_bytes for gradient in gradients_of(replica)
        )
        self._make_data = partial(
            RankData,
            rank=self._group.rank(),
            world_size=self._group.size(),
            host=socket.gethostname(),
            device=str(self._device),
            param_names=tuple(param.name for param in params),
            param_bytes=tuple(
                0 if p.expect_sparse else local_part(p.tensor).nbytes for p in params
            ),
            param_kinds=tuple(
                f"{str(p.tensor.dtype).removeprefix('torch.')} on {p.tensor.device}"
                f"{', delayed' if p.delayed else ''}"
                for p in params
            ),
            asked_steps=max_steps,
        )
        self._of_replica = _read(replica)
        per_step = 10 * len(params) + 16  # the bound for one bucket per parameter
        wanted = per_step * (max_steps or _STEPS_KEPT)
        capacity = max(min(wanted, _MOST_EVENTS), 2 * per_step)
        self._make_core = partial(_C.Recording, capacity, self._device, max_steps or 0)
        self._core: _C.Recording | None = None

    @property
    def started(self) -> bool:
        """Whether the recording was started."""
        return self._core is not None

    def start(self) -> None:
        """Starts the recording. A collective call over the model's process group."""
        with _on(self._device), health.between_steps(self._group):
            name = name_recording(self._group, self._device)
            reading = read_clocks(self._group, self._device)
        self._begin(name=name, clock="", readings=(reading,))

    def start_alone(self, key: str) -> None:
        """Starts the recording without a collective call, and without a comparison of clocks.

        Args:
            key: A text that is the same for all recordings that belong together.
        """
        self._begin(
            name=name_by_store(self._group, key),
            clock=clock_identity(),
            readings=(Reading(_C.steady_now(), 0.0, 0.0),),
        )

    def _begin(self, **of_start: Any) -> None:
        self._of_start = of_start
        self._core = self._make_core()
        self._core_wait = CoreWait()
        replica = self._replica()
        if replica is not None:
            replica.reducer.add_recording(self._core)

    def stop(self, wait: bool = True) -> None:
        """Stops the recording of this rank, whose data is complete then.

        Args:
            wait: Wait until the device has finished all work. Pass False after an error, because
                the device may never finish.
        """
        core, replica = self._core, self._replica()
        assert core is not None
        core_wait = self._core_wait.share()
        if replica is not None:
            replica.reducer.remove_recording(core)
            self._of_replica = _read(replica)
        if wait:
            core.close()
        else:
            core.collect()
        self.data = self._make_data(
            **self._of_start,
            **self._of_replica,
            device_error_ns=core.device_error_ns,
            num_lost=max(core.num_added - core.capacity, 0),
            plans=tuple(self._raw_plan(in_force) for in_force in core.plans),
            events=core.events(),
            cores=tuple(sorted(os.sched_getaffinity(0))),
            num_threads=torch.get_num_threads(),
            core_wait=core_wait,
        )

    def gather(self) -> list[RankData]:
        """Returns the data of all ranks, by rank. A collective call.

        Each rank sends its events and a short text. Parameters, plans and the search of plans are
        the same on all ranks, and are not sent.
        """
        with _on(self._device), health.between_steps(self._group):
            reading = read_clocks(self._group, self._device)
            own = replace(self.data, readings=(*self.data.readings, reading))
            line = {name: getattr(own, name) for name in _OF_EACH_RANK}
            line["readings"] = [asdict(reading) for reading in own.readings]
            lines = all_gather_json(line, self._group, self._device)
            events = all_gather_rows(own.events, self._group, self._device)
        return [
            replace(
                own,
                **{
                    **line,
                    "readings": tuple(Reading(**reading) for reading in line["readings"]),
                    "cores": tuple(line["cores"]),
                    "events": rows,
                },
            )
            for line, rows in zip(lines, events, strict=True)
        ]

    def _raw_plan(self, in_force: _C.PlanInForce) -> RawPlan:
        buckets = [tuple(bucket) for bucket in in_force.plan.buckets]
        return RawPlan(
            in_force.first_step,
            tuple((params, sum(self._sent_bytes[i] for i in params)) for params in buckets),
        )


def _read(replica: Replica) -> dict[str, Any]:
    """The values that may change while a recording runs: a script may register a hook."""
    report = report_of(replica)
    return {
        "backend": replica.reducer.transport,
        "has_hook": replica.reducer.has_hook,
        "plan_report": report if report is not None and report.final else None,
    }


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Makes ``device`` the current device, which collective calls of objects use."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
