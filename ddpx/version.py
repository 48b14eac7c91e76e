"""The version of ddpx, and the versions of torch that ddpx supports.

The build reads this file without importing ddpx (csrc/extension.py), so the file imports nothing.
"""

from __future__ import annotations

__version__ = "0.1.0"

# Major and minor versions. docs/compatibility.md has the tested releases.
OLDEST_TORCH = (2, 11)
NEWEST_TORCH = (2, 15)


def supported_torch() -> str:
    """Returns the supported versions of torch, such as ``"2.11 to 2.15"``."""
    return " to ".join(f"{major}.{minor}" for major, minor in (OLDEST_TORCH, NEWEST_TORCH))


def refusal_of(torch: str) -> str | None:
    """Returns why a version of torch is refused. None if ddpx does not refuse that version."""
    if release_of(torch) >= OLDEST_TORCH:
        return None
    return (
        f"{_supported_but_installed(torch)}. "
        "Install a newer torch, and build ddpx again: pip install --no-build-isolation PATH"
    )


def warning_of(torch: str) -> str | None:
    """Returns a warning of a version of torch that is newer than the supported ones, or None."""
    if release_of(torch) <= NEWEST_TORCH:
        return None
    return f"{_supported_but_installed(torch)}. ddpx has not been tested with this version"


def _supported_but_installed(torch: str) -> str:
    return f"ddpx {__version__} supports torch {supported_torch()}, but torch {torch} is installed"


def release_of(torch: str) -> tuple[int, ...]:
    """Major and minor version."""
    return tuple(int(part) for part in torch.split("+")[0].split(".")[:2])
