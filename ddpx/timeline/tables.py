"""Tables as text."""

from __future__ import annotations

from collections.abc import Sequence


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a table. Columns are aligned if tabulate is installed."""
    try:
        from tabulate import tabulate
    except ImportError:
        return "\n".join("\t".join(str(cell) for cell in row) for row in [headers, *rows])
    return tabulate(rows, headers=headers, disable_numparse=True)
