"""The last collective calls of this rank, from torch's flight recorder."""

from __future__ import annotations

import json
import math
from typing import Any

import torch

_MOST_CALLS = 40
# All ranks pass tensors of one size. Other calls may have another size on each rank.
_SAME_SIZES = ("all_reduce", "broadcast", "reduce")


def read(group_name: str) -> dict[int, str]:
    """Returns the last calls to a group, by their numbers. Empty if torch does not record calls.

    torch records calls of NCCL unless ``TORCH_NCCL_TRACE_BUFFER_SIZE=0``.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    if dump is None:  # torch without NCCL
        return {}
    entries = json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
    return last_calls(entries, group_name)


def last_calls(entries: list[dict[str, Any]], group_name: str) -> dict[int, str]:
    """Describes the last calls to a group, by their numbers.

    Args:
        entries: The entries of torch's flight recorder.
        group_name: The name of the process group.
    """
    calls: dict[int, str] = {}
    last = 0
    for entry in entries:
        if entry["process_group"][0] != group_name or entry["is_p2p"]:
            continue
        number = int(entry["collective_seq_id"])
        if number < last:  # an earlier group had the same name
            calls.clear()
        last = number
        text = _describe(entry)
        # A call of several tensors has several entries with one number.
        calls[number] = f"{calls[number]} with {text}" if number in calls else text
    # The recorder may have dropped some entries of the oldest call.
    return dict(sorted(calls.items())[1:][-_MOST_CALLS:])


def _describe(entry: dict[str, Any]) -> str:
    """Names the call, and how many numbers of which type it has: shapes may differ for NCCL."""
    name = str(entry["profiling_name"]).rpartition(":")[2].removeprefix("_").removesuffix("_base")
    if name not in _SAME_SIZES:
        return name
    numbers = sum(math.prod(size) for size in entry["input_sizes"])
    dtypes = {"Byte" if dtype == "Bool" else dtype for dtype in entry["input_dtypes"]}
    return f"{name} of {numbers} {' and '.join(sorted(dtypes))}"
