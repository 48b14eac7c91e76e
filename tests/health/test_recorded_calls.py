"""Calls in the dumps of torch's flight recorder."""

from __future__ import annotations

from typing import Any

from ddpx.health.recorded_calls import last_calls


def _entry(number: int, name: str, size: list[int], group: str = "0", p2p: bool = False) -> Any:
    return {
        "collective_seq_id": number,
        "profiling_name": f"nccl:{name}",
        "input_sizes": [size],
        "input_dtypes": ["Float"],
        "process_group": [group, "default_pg"],
        "is_p2p": p2p,
    }


def test_calls_of_one_group_are_described():
    entries = [
        _entry(7, "reduce", [1]),  # of an earlier group with the same name
        _entry(0, "broadcast", [4]),
        _entry(1, "broadcast", [4]),
        _entry(1, "all_reduce", [9], group="1"),
        _entry(2, "_all_gather_base", [3]),
        _entry(2, "send", [3], p2p=True),
        _entry(3, "all_reduce", [2, 5]),
        _entry(3, "all_reduce", []),
        {**_entry(4, "broadcast", [6]), "input_dtypes": ["Bool"]},  # NCCL has no booleans
    ]
    assert last_calls(entries, "0") == {
        1: "broadcast of 4 Float",
        2: "all_gather",
        3: "all_reduce of 10 Float with all_reduce of 1 Float",
        4: "broadcast of 6 Byte",
    }


def test_only_the_last_calls_are_kept():
    calls = last_calls([_entry(number, "reduce", [1]) for number in range(100)], "0")
    assert list(calls) == list(range(60, 100))
