"""Starts the failure detector of a process group, with its first wrapper."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from ddpx import _C, settings
from ddpx.health import ending, log, stall_timeout
from ddpx.health.failure import RankError

_started = threading.Lock()
# Groups with a failed call between steps; see between_steps().
_failed_between_steps: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def watch(group: dist.ProcessGroup) -> _C.Monitor | None:
    """Starts the failure detector. None if the group has one rank, or with ``DDPX_HEALTH=0``."""
    monitor = _C.monitor_of(group)
    if monitor is not None and not _started.locked():
        settings.switch_of("DDPX_HEALTH")  # checks the value; the core reads the variable
        settings.seconds_of("DDPX_HOST_LEASE")  # checks the value, too
        stall_timeout.apply()
        if _started.acquire(blocking=False):
            _start()
    return monitor


def begin(group: dist.ProcessGroup) -> _C.Monitor | None:
    """Calls :func:`watch` for a wrapper that is under construction."""
    monitor = watch(group)
    if monitor is not None and group is not dist.group.WORLD:
        with suppress(KeyError, ValueError):  # torch did not create the group
            monitor.name_ranks(dist.get_process_group_ranks(group))
    return monitor


@contextmanager
def constructing(group: dist.ProcessGroup) -> Iterator[None]:
    """A context for the collective calls of a construction; see :func:`explained`."""
    monitor = begin(group)
    if monitor is None:
        yield
        return
    monitor.begin_construction()
    try:
        with explained(monitor):
            yield
    finally:
        monitor.publish(_C.Doing.OUTSIDE)


def introduction(group: dist.ProcessGroup) -> bytes:
    """Returns ``_C.INTRODUCTION_BYTES`` bytes by which this rank introduces itself to the others.

    All zero if the ranks know each other already, or if there is no failure detector.
    """
    monitor = watch(group)
    record = b"" if monitor is None else monitor.introduction()
    return record.ljust(_C.INTRODUCTION_BYTES, b"\0")


def meet(
    introductions: Sequence[bytes],
    group: dist.ProcessGroup,
    all_gather: Callable[[bytes], list[bytes]],
) -> None:
    """Introduces the ranks of a group to each other, without the store.

    A collective call, unless all ``introductions`` are zero.

    Args:
        introductions: The results of :func:`introduction`, by rank.
        group: The ranks.
        all_gather: Gathers 8 bytes of each rank.
    """
    if not any(map(any, introductions)):
        return
    monitor = watch(group)
    host = 0 if monitor is None else monitor.find_host(introductions)
    hosts = [int.from_bytes(host, "little") for host in all_gather(host.to_bytes(8, "little"))]
    if monitor is not None:
        monitor.meet(introductions, hosts)


@contextmanager
def waiting_for_buffers(monitor: _C.Monitor | None) -> Iterator[None]:
    """A context for the collective calls for buffers, in a forward; see :func:`explained`."""
    if monitor is None:
        yield
        return
    monitor.publish(_C.Doing.BUFFERS)
    try:
        with explained(monitor):
            yield
    finally:
        monitor.publish(_C.Doing.FORWARD)


def publish_fault(monitor: _C.Monitor | None, error: Exception, is_of_module: bool) -> None:
    """Publishes that a forward has raised. Ranks that wait report it, unless training goes on.

    Args:
        monitor: The failure detector of the group, if there is one.
        error: The error.
        is_of_module: The module's own code raised the error. Ranks that wait then warn only.
    """
    if monitor is not None and torch.is_grad_enabled():
        monitor.publish_fault(ending.describe(error), is_of_module)


@contextmanager
def explained(monitor: _C.Monitor | None) -> Iterator[None]:
    """A context for a collective call. Raises RankError if the call fails due to lost ranks."""
    try:
        yield
    except RankError:
        raise
    except RuntimeError as error:
        if monitor is not None:
            monitor.explain_error(str(error))
        raise


@contextmanager
def collective_call(group: dist.ProcessGroup) -> Iterator[None]:
    """Publishes that this rank is in a collective call of a construction. No effect elsewhere."""
    monitor = watch(group)
    if monitor is not None:
        monitor.begin_call()
    yield  # not in a finally block: explain_error() must find the rank in the call
    if monitor is not None:
        monitor.end_call()


@contextmanager
def between_steps(group: dist.ProcessGroup) -> Iterator[None]:
    """A context for collective calls of ddpx outside of steps and constructions.

    The script may make these calls between a backward and the optimizer's step.

    Raises:
        RankError: A call failed due to lost ranks.
        RuntimeError: This process was forked off after the model was wrapped.
    """
    monitor = watch(group)
    try:
        with collective_call(group):
            yield
    except RankError:
        _failed_between_steps.add(group)
        raise
    except RuntimeError as error:
        if monitor is not None and ending.of_communication(error):
            _failed_between_steps.add(group)  # no effect if no rank is lost
            monitor.explain_error(str(error))
        raise


def failed_between_steps(group: dist.ProcessGroup) -> bool:
    """Whether a call in :func:`between_steps` has failed on this rank."""
    return group in _failed_between_steps


# ---- the start -----------------------------------------------------------------------------------


def _start() -> None:
    log.start()
    ending.publish_end()
    os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    """Runs in a forked child, which is not a rank: its first wrapper starts a new detector."""
    global _started
    _started = threading.Lock()
