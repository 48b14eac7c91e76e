"""Loads the late device into this process: ``torch.device("late")``, and a backend for it.

The device lies in host memory. Its kernels, copies and collectives run on threads, one a stream,
later than the host and as late as streams and events allow. ``build()`` compiles it once.
"""

from __future__ import annotations

import fcntl
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

SOURCES = Path(__file__).parent
BUILD = SOURCES.parents[1] / "build" / "late_device"
NUM_DEVICES = 2

_NAME = "late_device_C"
_loaded: ModuleType | None = None


def build() -> Path:
    """Compiles the device if its sources are newer; returns the path of the extension."""
    from torch.utils import cpp_extension

    BUILD.mkdir(parents=True, exist_ok=True)
    library = BUILD / f"{_NAME}.so"
    with (BUILD / "building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sources = [*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]
        if library.exists() and all(s.stat().st_mtime < library.stat().st_mtime for s in sources):
            return library
        (BUILD / "lock").unlink(missing_ok=True)  # torch's own, of a build that was killed
        cpp_extension.load(
            _NAME,
            [str(path) for path in sorted(SOURCES.glob("*.cpp"))],
            extra_cflags=["-O1", "-g0"],
            build_directory=str(BUILD),
            is_python_module=False,
            is_standalone=False,
        )
        library.touch()
    return library


def load(hold_ms: float = 50.0, delay_us: float = 200.0, seed: int = 0) -> ModuleType:
    """Registers the device with torch, once per process, and sets how late it is.

    Args:
        hold_ms: a kernel runs when something waits for it, or after this time; 0: as soon as its
            stream is free.
        delay_us: a kernel starts at least so much later than it could, at most twice as much.
        seed: of the delays.
    """
    global _loaded
    if _loaded is None:
        spec = importlib.util.spec_from_file_location(_NAME, build())
        assert spec is not None
        assert spec.loader is not None
        extension = importlib.util.module_from_spec(spec)
        sys.modules[_NAME] = extension
        spec.loader.exec_module(extension)
        extension.register_device()
        torch.utils.rename_privateuse1_backend("late")
        torch._register_device_module("late", _device_module(extension))
        torch.utils.generate_methods_for_privateuse1_backend(unsupported_dtype=[torch.quint8])
        dist.Backend.register_backend("late", _make_backend, extended_api=True, devices=["late"])
        _loaded = extension
    _loaded.set_lateness(hold_ms, delay_us, seed)
    return _loaded


def new_group() -> dist.ProcessGroup:
    """A process group of all ranks, over gloo on CPU and over the late backend on the device."""
    group = dist.new_group(backend="cpu:gloo,late:late")
    assert isinstance(group, dist.ProcessGroup)
    return group


@contextmanager
def waits_ignored(function: str) -> Iterator[None]:
    """Leaves out stream waits and records that are made within C++ functions of this name.

    Raises:
        AssertionError: none was left out.
    """
    extension = load()
    extension.ignore_waits_from(function)
    try:
        yield
        assert extension.num_ignored() > 0, f"no wait was made from {function}"
    finally:
        extension.ignore_waits_from("")


def _make_backend(options: Any, _: Any) -> Any:
    store = dist.PrefixStore("late", options.store)
    gloo = dist.ProcessGroupGloo(store, options.group_rank, options.group_size, options.timeout)
    assert _loaded is not None
    return _loaded.LateBackend(options.group_rank, options.group_size, gloo)


def _device_module(extension: ModuleType) -> ModuleType:
    """What torch expects as ``torch.late``."""
    module = types.ModuleType("torch.late")
    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: NUM_DEVICES,
        "current_device": extension.current_device,
        "set_device": lambda device: extension.set_device(torch.device(device).index or 0),
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda seed: None,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "synchronize": lambda device=0: extension.synchronize(torch.device("late", device).index),
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module
