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
from ddpx.planning import PlanReport
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
    """

    def __init__(self, replica: Replica, max_steps: int | None) -> None:
        params = replica.managed
        self._group = replica.group
        # Stored, because the file may be written after the group was destroyed.
        self.rank = self._group.rank()
        self.global_rank = rank_of_job(self._group)
        self._name = ""
        self._world_size = self._group.size()
        self._backend = replica.reducer.transport
        self._has_hook = replica.reducer.has_hook
        self._replica = weakref.ref(replica)
        self._device = replica.device
        self._names = tuple(param.name for param in params)
        self._num_bytes = tuple(
            0 if p.expect_sparse else local_part(p.tensor).nbytes for p in params
        )
        self._sent_bytes = tuple(
            0 if gradient.alone else gradient.num_bytes for gradient in gradients_of(replica)
        )
        self._kinds = tuple(
            f"{str(p.tensor.dtype).removeprefix('torch.')} on {p.tensor.device}"
            f"{', delayed' if p.delayed else ''}"
            for p in params
        )
        self._asked_steps = max_steps
        self._core_wait = CoreWait()
        self._readings: list[Reading] = []
        self._clock = ""
        self._plan_report: PlanReport | None = None
        per_step = 10 * len(params) + 16  # the bound for one bucket per parameter
        wanted = per_step * (max_steps or _STEPS_KEPT)
        capacity = max(min(wanted, _MOST_EVENTS), 2 * per_step)
        self._make_core = partial(_C.Recording, capacity, self._device, max_steps or 0)

    @property
    def started(self) -> bool:
        """Whether the recording was started."""
        return bool(self._readings)

    def start(self) -> None:
        """Starts the recording. A collective call over the model's process group."""
        with _on(self._device), health.between_steps(self._group):
            self._name = name_recording(self._group, self._device)
            self._readings.append(read_clocks(self._group, self._device))
        self._begin()

    def start_alone(self, key: str) -> None:
        """Starts the recording without a collective call, and without a comparison of clocks.

        Args:
            key: A text that is the same for all recordings that belong together.
        """
        self._name = name_by_store(self._group, key)
        self._clock = clock_identity()
        self._readings.append(Reading(_C.steady_now(), 0.0, 0.0))
        self._begin()

    def _begin(self) -> None:
        self._core = self._make_core()
        self._core_wait.start()
        replica = self._replica()
        if replica is not None:
            replica.reducer.add_recording(self._core)

    def stop(self, wait: bool = True) -> None:
        """Stops the recording of this rank.

        Args:
            wait: Wait until the device has finished all work. Pass False after an error, because
                the device may never finish.
        """
        replica = self._replica()
        if replica is not None:
            replica.reducer.remove_recording(self._core)
            self._backend = replica.reducer.transport  # a hook may have been registered since
            self._has_hook = replica.reducer.has_hook
            report = report_of(replica)
            self._plan_report = report if report is not None and report.final else None
        self._core_wait.stop()
        if wait:
            self._core.close()
        else:
            self._core.collect()

    def gather(self) -> list[RankData]:
        """Returns the data of all ranks, by rank. A collective call.

        Each rank sends its events and a short text. Parameters, plans and the search of plans are
        the same on all ranks, and are not sent.
        """
        with _on(self._device), health.between_steps(self._group):
            self._readings.append(read_clocks(self._group, self._device))
            own = self.data()
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

    def data(self) -> RankData:
        """Returns the data of this rank."""
        core = self._core
        return RankData(
            name=self._name,
            rank=self.rank,
            world_size=self._world_size,
            host=socket.gethostname(),
            backend=self._backend,
            device=str(self._device),
            param_names=self._names,
            param_bytes=self._num_bytes,
            readings=tuple(self._readings),
            device_error_ns=core.device_error_ns,
            num_lost=max(core.num_added - core.capacity, 0),
            plans=tuple(self._raw_plan(in_force) for in_force in core.plans),
            events=core.events(),
            param_kinds=self._kinds,
            clock=self._clock,
            asked_steps=self._asked_steps,
            cores=tuple(sorted(os.sched_getaffinity(0))),
            num_threads=torch.get_num_threads(),
            core_wait=self._core_wait.share,
            plan_report=self._plan_report,
            has_hook=self._has_hook,
        )

    def _raw_plan(self, in_force: _C.PlanInForce) -> RawPlan:
        buckets = [tuple(bucket) for bucket in in_force.plan.buckets]
        return RawPlan(
            in_force.first_step,
            tuple((params, sum(self._sent_bytes[i] for i in params)) for params in buckets),
        )


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Makes ``device`` the current device, which collective calls of objects use."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
