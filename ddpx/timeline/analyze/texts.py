"""Sizes as text."""

from __future__ import annotations

_KIB, _MIB = 1 << 10, 1 << 20


def size_text(num_bytes: float) -> str:
    """ "20 KiB", "1.5 MiB", "12 MiB"."""
    unit, name = (_KIB, "KiB") if num_bytes < _MIB else (_MIB, "MiB")
    size = num_bytes / unit
    return f"{size:.0f} {name}" if size >= 10 else f"{size:.1f} {name}"
