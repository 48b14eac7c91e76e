"""Starts ranks with torchrun, in this process."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NoReturn

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ddpx import settings
from ddpx.cli import errors, guard, rank
from ddpx.cli.script import Script
from ddpx.comm import transport
from ddpx.ddp.arguments.bucket_sizes import checked_cap, checked_plan
from ddpx.health import stall_timeout

DEFAULT_NUM_RANKS = 2
_NOT_GIVEN = "not given"
_THREADS = "OMP_NUM_THREADS"
_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # each restart gets a new store


def torchrun_options(words: Sequence[str]) -> tuple[argparse.Namespace, Script]:
    """Parses options of ``ddpx run``, which are also those of torchrun, and the script after them.

    Args:
        words: The words of the command line.

    Raises:
        UserMistake: torchrun does not know an option, or the script does not exist.
    """
    parser = torchrun.get_args_parser()
    parser.error = _usage_error  # type: ignore[method-assign]
    purpose = "do not end other ranks if a rank fails"
    parser.add_argument("--keep-survivors", action="store_true", help=purpose)
    purpose = "bucket size in MiB, -1 for no limit, or auto"
    parser.add_argument("--bucket-cap-mb", help=purpose)
    if "PET_NPROC_PER_NODE" not in os.environ:  # torchrun reads the option from it, too
        parser.set_defaults(nproc_per_node=_NOT_GIVEN)
    options = parser.parse_args(list(words))
    if options.no_python or options.run_path:
        raise errors.UserMistake(
            "--no-python and --run-path are not supported, because ddpx must run the script "
            "itself. Pass the path of a Python file, or -m and the name of a module."
        )
    one_node = options.nnodes in ("1", "1:1")
    if options.nproc_per_node == _NOT_GIVEN:
        options.nproc_per_node = str(DEFAULT_NUM_RANKS if one_node else 1)
    has_rendezvous = (
        options.rdzv_backend != "static"
        or options.rdzv_endpoint
        or options.master_port is not None
        or options.master_addr != parser.get_default("master_addr")
    )
    if one_node and not has_rendezvous:
        options.standalone = True
    script = Script(
        options.training_script, bool(options.module), tuple(options.training_script_args)
    )
    script.check()
    return options, script


def local_options(num_ranks: int) -> argparse.Namespace:
    """Returns options of torchrun for ranks on this machine, also within a job of several nodes."""
    words = ["--standalone", "--nnodes=1", "--max-restarts=0", f"--nproc-per-node={num_ranks}"]
    options = torchrun.get_args_parser().parse_args([*words, "a script"])
    options.no_python = options.run_path = False  # PET_NO_PYTHON and PET_RUN_PATH may be set
    return options


def _may_restart(options: argparse.Namespace) -> bool:
    """Returns whether torchrun can start ranks again: after a failure, or when nodes join."""
    one_node = options.nnodes in ("1", "1:1")
    return options.max_restarts > 0 or not (one_node or options.rdzv_backend == "static")


def launch(
    options: argparse.Namespace,
    runner: str,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    keep_survivors: bool = False,
) -> int:
    """Calls ``main(arguments)`` of a module in each rank, and waits until all ranks have ended.

    Args:
        options: Options of torchrun.
        runner: The name of the module.
        arguments: The words for ``main``.
        environment: Environment variables of the ranks.
        keep_survivors: Do not end the other ranks when a rank fails.

    Returns:
        The exit code: 0; 1 if a rank failed; 128 plus the signal's number after a signal.

    Raises:
        UserMistake: torchrun rejects a value in ``options``, or an environment variable has a wrong
            value.
        KeyboardInterrupt: The user pressed Ctrl-C (SIGINT). All ranks have ended.
    """
    changes = dict(environment or {})
    with _environment(changes):
        _check_variables()
    options = argparse.Namespace(**vars(options))
    options.module = False
    command = [rank.__file__, runner, *arguments]
    if _may_restart(options):
        # In the launcher's store, restarted ranks would read addresses of ended ranks, and gloo
        # would hang. Without restarts its store is safer: nobody can take the port before rank 0.
        changes[_OWN_STORE] = os.environ.get(_OWN_STORE, "1")
    try:
        num_local = torchrun.determine_local_world_size(options.nproc_per_node)
        if num_local < 1:  # torch's error has no text
            raise errors.UserMistake(
                f"--nproc-per-node={options.nproc_per_node} is not a positive number of ranks."
            )
        if num_local > 1:
            # as torchrun, which prints a banner
            changes[_THREADS] = os.environ.get(_THREADS, "1")
        with ExitStack() as stack:
            if keep_survivors:
                command = [guard.__file__, "-u", *command]
                folder = tempfile.TemporaryDirectory(prefix="ddpx-guards-")
                changes[guard.FOLDER] = stack.enter_context(folder)
                for name, value in guard.NCCL_SURVIVAL.items():
                    changes[name] = os.environ.get(name, value)
            options.training_script, *options.training_script_args = command
            stack.enter_context(_handlers_kept())
            stack.enter_context(_environment(changes))
            torchrun.run(options)
    except ChildFailedError as failure:
        number, first = failure.get_first_failure()
        print(f"ddpx: rank {number} failed with exit code {first.exitcode}", file=sys.stderr)
        return 1
    except SignalException as stop:
        if stop.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        return 128 + int(stop.sigval)
    except (ValueError, AssertionError, RuntimeError) as cause:
        raise errors.UserMistake(
            f"torchrun cannot start: {' '.join(str(cause).split())}"
        ) from cause
    return 0


def _check_variables() -> None:
    """Finds mistakes that otherwise every rank would report, after its start."""
    with errors.mistakes():
        stall_timeout.apply()
        settings.seconds_of("DDPX_HOST_LEASE")
        transport.checked_choice(None)
        checked_cap()
        checked_plan()
        for variable in ("DDPX_HEALTH", "DDPX_CHECK_FINITE"):
            settings.switch_of(variable)


def _usage_error(message: str) -> NoReturn:
    if "training_script" in message:
        raise errors.UserMistake("give a script: ddpx run train.py")
    raise errors.UserMistake(
        f"torchrun rejects the options: {message} (ddpx run --help has examples.)"
    )


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Restores signal handlers, which torchrun replaces."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
