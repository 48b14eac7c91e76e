"""Measures on the late device and writes the tables of docs/devices.md."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "devices.md"
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "devices"), str(ROOT / "tests" / "late_device")]


def _costs() -> str:
    from costs import CHECKED, NUM_PARAMS, SETTINGS, measure

    costs = measure()
    lines = [
        f"{NUM_PARAMS} parameters of 64 float32 elements in 5 buckets, beyond the bare module:",
        "",
        "| setting | DDP: operations | KiB | ReducerDDP: operations | KiB |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for setting in (*SETTINGS, CHECKED):
        theirs, ours = costs.get((setting, "DDP")), costs[setting, "ReducerDDP"]
        left = f"{theirs.operations} | {theirs.kilobytes:.1f}" if theirs else "- | -"
        lines.append(f"| {setting} | {left} | {ours.operations} | {ours.kilobytes:.1f} |")
    return "\n".join(lines)


def _removed() -> str:
    from device_ranks import run_on
    from removed_waits import REMOVED, count_wrong

    from ddpx.testing import RankPool

    lines = [
        "| what waits, or is kept | C++ function | without it: wrong gradients on two ranks |",
        "| --- | --- | ---: |",
    ]
    with RankPool(2) as pool:
        for index, removed in enumerate(REMOVED):
            num_wrong = sum(run_on(pool, count_wrong, "late", index))
            name = removed.function.rstrip("(")
            lines.append(f"| {removed.what} | `{name}` | {num_wrong} |")
    return "\n".join(lines)


def main() -> None:
    """Rewrites what stands between the page's markers."""
    import late_device

    late_device.build()
    page = PAGE.read_text()
    for name, table in (("costs", _costs()), ("removed waits", _removed())):
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        before, rest = page.split(begin)
        page = f"{before}{begin}{table}\n{end}{rest.split(end)[1]}"
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
