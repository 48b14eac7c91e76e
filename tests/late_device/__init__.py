"""A device in host memory that runs all work late. It tests device streams without a GPU.

:func:`build` compiles the device into ``build/late_device``. :func:`load` registers it with torch
as the device type "late", for the rest of the process. docs/devices.md describes it.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import functools
import hashlib
import importlib.util
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_SOURCES = Path(__file__).resolve().parent
_FOLDER = _SOURCES.parents[1] / "build" / "late_device"
_NAME = "late_device_C"


def build() -> Path:
    """Compiles the device if necessary. Returns the path of the library.

    If another process runs the build, this call waits for it.

    Raises:
        RuntimeError: the compiler failed. The text is its log.
    """
    _FOLDER.mkdir(parents=True, exist_ok=True)
    library = _FOLDER / f"{_NAME}.so"
    stamp = _FOLDER / "built_from"
    digest = _digest()
    with open(_FOLDER / "lock_of_build", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists() or not stamp.exists() or stamp.read_text() != digest:
            # torch's lock file remains after a process was killed.
            (_FOLDER / "lock").unlink(missing_ok=True)
            # torch loads what it has built, so the build runs in a separate process.
            compiler = subprocess.run(
                [sys.executable, "-c", "import late_device; late_device._compile()"],
                cwd=_SOURCES.parent,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            if compiler.returncode != 0:
                raise RuntimeError(f"the late device could not be built:\n{compiler.stdout}")
            stamp.write_text(digest)
    return library


def _digest() -> str:
    digest = hashlib.sha256(f"{torch.__version__} {sys.version}".encode())
    for path in sorted(_SOURCES.iterdir()):
        if path.suffix in (".cpp", ".h", ".py"):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _compile() -> None:
    from torch.utils import cpp_extension

    # As one file, since torch's large headers take most of the time. So names are unique among the
    # sources.
    whole = _FOLDER / "whole.cpp"
    whole.write_text("".join(f'#include "{path}"\n' for path in sorted(_SOURCES.glob("*.cpp"))))
    cpp_extension.load(
        name=_NAME,
        sources=[str(whole)],
        build_directory=str(_FOLDER),
        extra_cflags=["-O1", "-g0"],
        extra_ldflags=["-ldl"],
        with_cuda=False,
    )


@functools.cache
def load() -> types.ModuleType:
    """Registers the device and the process group backend "late" with torch. Returns its controls.

    Only ranks should load it: ``torch.accelerator`` is available in a process with the device.
    """
    spec = importlib.util.spec_from_file_location(_NAME, build())
    assert spec is not None and spec.loader is not None
    controls = importlib.util.module_from_spec(spec)
    torch.utils.rename_privateuse1_backend("late")
    spec.loader.exec_module(controls)
    torch._register_device_module("late", _device_module(controls))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("late", _make_backend, extended_api=True, devices=["late"])
    return controls


def _device_module(controls: Any) -> types.ModuleType:
    """``torch.late``: the functions that torch expects in the module of a device."""
    module = types.ModuleType("torch.late")
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: controls.NUM_DEVICES,
        "current_device": controls.current_device,
        "set_device": lambda device: controls.set_device(torch.device("late", device).index),
        "synchronize": lambda device=None: controls.synchronize(
            controls.current_device() if device is None else torch.device(device).index
        ),
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda seed: None,  # random numbers are drawn on the host
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module


def _make_backend(options: Any, _: object) -> Any:
    return make_backend(
        options.store, options.group_rank, options.group_size, options.timeout, "late"
    )


def make_backend(
    store: dist.Store, rank: int, size: int, timeout: datetime.timedelta, name: str
) -> Any:
    """A backend for tensors on the device, which stands for the class ``name``."""
    controls = load()
    gloo = [
        dist.ProcessGroupGloo(dist.PrefixStore(f"late{index}", store), rank, size, timeout)
        for index in range(controls.NUM_DEVICES)
    ]
    return controls.LateBackend(rank, size, gloo, name)


def milliseconds(number: float) -> datetime.timedelta:
    return datetime.timedelta(milliseconds=number)


@contextlib.contextmanager
def slow(part: str, time_ms: float) -> Iterator[None]:
    """In the block, work with ``part`` in its name takes longer by this time."""
    load().set_delay(part, milliseconds(time_ms))
    try:
        yield
    finally:
        load().set_delay(part, milliseconds(0))


class Removed:
    """A wait that :func:`without` removes.

    Attributes:
        num_applied: how often the wait was left out. Valid at the end of the block.
    """

    num_applied = 0


@contextlib.contextmanager
def without(kind: str, *callers: str) -> Iterator[Removed]:
    """In the block, waits of one kind are left out if all of ``callers`` are on the call stack.

    Args:
        kind: "STREAM", "HOST" or "RECORD".
        callers: parts of demangled names of functions that a shared library exports. A name after
            "!" must not be on the stack.
    """
    controls = load()
    removed = Removed()
    rule = controls.ignore(controls.Wait.__members__[kind], list(callers))
    try:
        yield removed
    finally:
        removed.num_applied = controls.num_ignored(rule)
        controls.stop_ignoring()
