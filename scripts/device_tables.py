"""Measures the tables of docs/devices.md on the late device, and writes them into that file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from marked_page import write_between_marks

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "devices.md"
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "devices")]


def main() -> int:
    from device_ranks import DeviceRanks

    ranks = DeviceRanks("late", 2)
    try:
        write("removed waits", removed_waits(ranks))
        write("step costs", step_costs(ranks))
    finally:
        ranks.close()
    print(f"written to {PAGE.relative_to(ROOT)}")
    return 0


def removed_waits(ranks: Any) -> list[str]:
    from removed_waits import PROOFS

    rows = ["| wait | left out in | without it |", "| --- | --- | --- |"]
    for number, proof in enumerate(PROOFS):
        callers = " in ".join(
            f"`{name.removeprefix('ddpx::').partition('(')[0]}`"
            for name in proof.callers
            if not name.startswith("!")
        )
        rows.append(f"| {proof.name} | {callers} | {outcome(ranks, number)} |")
    return rows


def outcome(ranks: Any, number: int) -> str:
    import removed_waits

    from ddpx.testing import RankFailed

    try:
        answers = ranks.run(removed_waits.run, number, remove=True, timeout=8)
    except RankFailed:
        return "ranks make different collective calls, and a rank waits forever"
    if not any(num_applied for num_applied, _ in answers):
        return "**the wait was never made**"
    noticed = next((text for _, text in answers if text), "")
    if not noticed:
        return "**nothing**"
    if "not close" in noticed:
        return "wrong values"
    return noticed.partition(": ")[2].partition("\n")[0].replace("|", "\\|")


def step_costs(ranks: Any) -> list[str]:
    import step_costs as costs

    rows = [
        "| mode | wrapper | operations | bytes | collectives | their bytes | host waits | memory |",
        "| --- | --- | --: | --: | --: | --: | --: | --: |",
    ]
    for name in costs.SETTINGS:
        for wrapper in ("ddpx", "DDP"):
            cost = ranks.run(costs.cost_of, name, wrapper)[0]
            if isinstance(cost, str):
                rows.append(f"| {name} | {wrapper} | {cost} | | | | | |")
                continue
            rows.append(
                f"| {name} | {wrapper} | {cost.operations} | {cost.bytes:,} | {cost.collectives} | "
                f"{cost.collective_bytes:,} | {cost.synchronisations} | {cost.memory_bytes:,} |"
            )
    return rows


def write(name: str, rows: list[str]) -> None:
    write_between_marks(PAGE, name, "\n".join(rows))


if __name__ == "__main__":
    sys.exit(main())
