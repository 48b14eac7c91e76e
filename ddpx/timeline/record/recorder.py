"""One rank's part of a recording: rings of events, readings of clocks, files."""

from __future__ import annotations

import socket
import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddpx import _C
from ddpx.ddp.module import ReducerDDP
from ddpx.timeline.record.clocks import (
    Reading,
    clock_identity,
    name_by_store,
    name_recording,
    read_clocks,
)
from ddpx.timeline.record.exchange import all_gather_json, all_gather_rows
from ddpx.timeline.record.rank_data import RankData, RawPlan

# A ring has room for this many events at most, of 32 bytes; but for two steps in any case.
_MOST_EVENTS = 1 << 20
_STEPS_KEPT = 50
# Fields of RankData, beside readings of the clock and events.
_OF_EACH_RANK = ("rank", "host", "device", "device_error_ns", "num_lost")


class Recorder:
    """Notes what the reducer of one model does, from ``start`` to ``stop``.

    Args:
        model: the wrapper.
        max_steps: record that many steps and no more. None: the last ones that the ring holds.
    """

    def __init__(self, model: ReducerDDP, max_steps: int | None) -> None:
        params = model._averaging.managed
        self._group = model.process_group
        # Kept, since a file may be written when the group has been destroyed.
        self.rank = self._group.rank()
        self.global_rank = dist.get_rank()
        self._name = ""
        self._world_size = self._group.size()
        self._backend = _backend_name(self._group, model.device)
        self._model = weakref.ref(model)
        self._device = model.device
        self._names = tuple(param.name for param in params)
        self._num_bytes = tuple(
            0 if p.expect_sparse else p.tensor.numel() * p.tensor.element_size() for p in params
        )
        self._kinds = tuple(
            f"{str(p.tensor.dtype).removeprefix('torch.')} on {p.tensor.device}"
            f"{', delayed' if p.delayed else ''}"
            for p in params
        )
        self._readings: list[Reading] = []
        self._clock = ""
        per_step = 10 * len(params) + 16  # each in a bucket of its own, at worst
        wanted = per_step * (max_steps or _STEPS_KEPT)
        capacity = max(min(wanted, _MOST_EVENTS), 2 * per_step)
        self._make_core = partial(_C.Recording, capacity, self._device, max_steps or 0)

    @property
    def started(self) -> bool:
        return bool(self._readings)

    def start(self) -> None:
        """Collective over the model's process group."""
        with _on(self._device):
            self._name = name_recording(self._group, self._device)
            self._readings.append(read_clocks(self._group, self._device))
        self._begin()

    def start_alone(self, key: str) -> None:
        """Calls nothing that is collective, and reads no other rank's clock.

        Args:
            key: by which recordings of other ranks belong to this one.
        """
        self._name = name_by_store(self._group, key)
        self._clock = clock_identity()
        self._readings.append(Reading(_C.steady_now(), 0.0, 0.0))
        self._begin()

    def _begin(self) -> None:
        self._core = self._make_core()
        model = self._model()
        if model is not None:
            model.reducer.add_recording(self._core)

    def stop(self, wait: bool = True) -> None:
        """Of this rank alone.

        Args:
            wait: for a device, until it has done all. Not after an error: it may never come to it.
        """
        model = self._model()
        if model is not None:
            model.reducer.remove_recording(self._core)
        if wait:
            self._core.close()
        else:
            self._core.collect()

    def gather(self) -> list[RankData]:
        """What all ranks recorded, by rank. Collective over the model's process group.

        Each rank sends its ring's events, of 32 bytes, and a line of text: what is the same on all
        ranks, params and plans, each knows by itself.
        """
        with _on(self._device):
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
                    "events": rows,
                },
            )
            for line, rows in zip(lines, events, strict=True)
        ]

    def data(self) -> RankData:
        """What this rank recorded so far."""
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
        )

    def _raw_plan(self, in_force: _C.PlanInForce) -> RawPlan:
        buckets = [tuple(bucket) for bucket in in_force.plan.buckets]
        return RawPlan(
            in_force.first_step,
            tuple((params, sum(self._num_bytes[i] for i in params)) for params in buckets),
        )


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Collectives of objects use the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    try:
        return group._get_backend(device).name()
    except RuntimeError:  # a group written in Python may have none
        return group.name()
