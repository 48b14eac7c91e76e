"""Tables and sizes as text."""

from __future__ import annotations

from collections.abc import Sequence

_KIB, _MIB = 1 << 10, 1 << 20


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a table. Columns are aligned if tabulate is installed."""
    try:
        from tabulate import tabulate
    except ImportError:
        return "\n".join("\t".join(str(cell) for cell in row) for row in [headers, *rows])
    return tabulate(rows, headers=headers, disable_numparse=True)


def size_text(num_bytes: float) -> str:
    """ "20 KiB", "1.5 MiB", "12 MiB"."""
    unit, name = (_KIB, "KiB") if num_bytes < _MIB else (_MIB, "MiB")
    size = num_bytes / unit
    return f"{size:.0f} {name}" if size >= 10 else f"{size:.1f} {name}"
